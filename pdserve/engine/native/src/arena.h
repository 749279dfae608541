// Memory for weights. It uses huge pages where the kernel gives them, so that reading through it seldom waits for an address
// translation. All of it is freed at once.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <vector>

namespace pdserve {

// Allocator of vectors whose first element starts a cache line, so that a load of 64 bytes never touches two lines.
template <class T>
struct LineAllocator {
    using value_type = T;
    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}
    T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), std::align_val_t(64)); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(64)); }
    template <class U>
    bool operator==(const LineAllocator<U>&) const {
        return true;
    }
};

template <class T>
using Lines = std::vector<T, LineAllocator<T>>;

class Arena {
  public:
    ~Arena() {
        for (auto [memory, size] : pieces_) munmap(memory, size);
    }

    // Returns zeroed memory, aligned to a cache line. Throws std::bad_alloc.
    void* take(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > left_) grow(bytes);
        void* taken = next_;
        next_ += bytes, left_ -= bytes;
        return taken;
    }

  private:
    static constexpr size_t kHuge = size_t(2) << 20;
    static constexpr size_t kPiece = 32 * kHuge;  // memory that is never touched costs nothing

    void grow(size_t bytes) {
        const size_t size = std::max(kPiece, (bytes + kHuge - 1) / kHuge * kHuge) + kHuge;
        void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        pieces_.push_back({memory, size});
        const size_t start = (size_t(memory) + kHuge - 1) / kHuge * kHuge;
        next_ = (char*)start, left_ = size - (start - size_t(memory));
        madvise(next_, left_, MADV_HUGEPAGE);
    }

    struct Piece {
        void* memory;
        size_t size;
    };
    std::vector<Piece> pieces_;
    char* next_ = nullptr;
    size_t left_ = 0;
};

}  // namespace pdserve
