// The threads of one model, and the way they share work.
//
// A run goes through phases, and a phase is a number of pieces of work. A thread takes the pieces of its own share one after
// the other; they lie beside each other. Then it takes pieces that the other threads have not begun. So a thread that has lost
// its core for a while delays one piece, not half a phase. A phase ends when all its pieces are done, no matter which thread did
// them. A late thread finds nothing to do and goes on to the next phase. Waiting threads spin only for a moment and then sleep:
// two workers with two threads each on two cores must not take each other's time slices by spinning.
//
// An exception in a piece ends the run: the other threads leave at their next wait, and `run` throws the exception again.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace pdserve {

// Tens of microseconds. The value was chosen, not tuned. Beside another busy process two threads lose more than their share of
// time.
constexpr int kSpins = 2000;

// Waits until done(value). A thread that changes the value so that done(value) holds must notify.
template <class Done>
inline void wait_until(const std::atomic<uint32_t>& value, const Done& done) {
    for (int i = 0; i < kSpins; i++) {
        if (done(value.load(std::memory_order_acquire))) return;
        _mm_pause();
    }
    for (uint32_t seen; !done(seen = value.load(std::memory_order_acquire));) value.wait(seen, std::memory_order_acquire);
}

class Pool {
  public:
    ~Pool() { stop(); }

    // Runs work(thread) on `threads` threads and returns when all have left it. The caller is thread 0. Every thread must go
    // through the same phases. Throws what a thread threw, or std::system_error when the system gives no thread; it can be
    // called again after that.
    void run(int threads, const std::function<void(int)>& work) {
        if (threads != this->threads() || lanes_ == nullptr) resize(threads);
        work_ = &work;
        signal(round_);
        take_part(0);
        wait_until(left_, [this](uint32_t left) { return left == workers_.size(); });
        left_.store(0, std::memory_order_relaxed);
        if (!failed_.load(std::memory_order_relaxed)) return;
        reset();
        std::rethrow_exception(std::exchange(error_, nullptr));
    }

    int threads() const { return int(workers_.size()) + 1; }

    // Runs a phase: f(piece) once for each piece of [0, count). Every thread begins with an equal share of the pieces.
    template <class F>
    void share(int thread, long count, const F& f) {
        phase(thread, count, [this, count](int of) { return count * of / threads(); }, f);
    }

    // Runs a phase with one share for all threads, so pieces begin in their order.
    template <class F>
    void queue(int thread, long count, const F& f) {
        phase(thread, count, [count](int of) { return of == 0 ? 0 : count; }, f);
    }

    // Returns the piece of a queue that is probably taken next; `count` or more when none is left.
    long next_in_queue(int thread) const {
        return long(lanes_[0].next.load(std::memory_order_relaxed) - (lanes_[thread].phase << kPieceBits));
    }

  private:
    static constexpr int kPieceBits = 20;  // bits of 64 for the piece: no phase has a million pieces, and the phases last for centuries

    struct alignas(64) Lane {
        std::atomic<uint64_t> next{0};  // state of this thread's share: the number of its phase, then its first piece that is not taken
        uint64_t phase = 0;             // the phase that this thread is in
        uint32_t due = 0;               // pieces since the pool began that are done when this phase ends
    };

    struct Abandoned {};  // another thread threw

    static void signal(std::atomic<uint32_t>& value) {
        value.fetch_add(1, std::memory_order_acq_rel);
        value.notify_all();
    }

    template <class Bound, class F>
    void phase(int thread, long count, const Bound& bound, const F& f) {
        if (workers_.empty()) {
            lanes_[0].phase++;
            for (long piece = 0; piece < count; piece++) {
                lanes_[0].next.store((lanes_[0].phase << kPieceBits) + uint64_t(piece) + 1, std::memory_order_relaxed);
                f(piece);
            }
            return;
        }
        Lane& own = lanes_[thread];
        own.phase++;
        own.due += uint32_t(count);
        uint32_t done = 0;
        for (int i = 0; i < threads(); i++) {
            const int of = (thread + i) % threads();
            const long first = bound(of), size = bound(of + 1) - first;
            for (long piece; (piece = take(lanes_[of].next, own.phase, size)) >= 0; done++) f(first + piece);
        }
        if (done > 0 && done_.fetch_add(done, std::memory_order_acq_rel) + done == own.due) done_.notify_all();
        wait_until(done_, [&](uint32_t now) { return int32_t(now - own.due) >= 0 || failed_.load(std::memory_order_relaxed); });
        if (failed_.load(std::memory_order_relaxed)) throw Abandoned();
    }

    // Takes a piece of a share of `size` and returns it, or -1 when none is left. A phase that is over has no pieces left,
    // because its number is smaller.
    static long take(std::atomic<uint64_t>& next, uint64_t phase, long size) {
        const uint64_t begin = phase << kPieceBits;
        uint64_t seen = next.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t piece = std::max(seen, begin);
            if (piece - begin >= uint64_t(size)) return -1;
            if (next.compare_exchange_weak(seen, piece + 1, std::memory_order_relaxed)) return long(piece - begin);
        }
    }

    void take_part(int thread) {
        try {
            (*work_)(thread);
        } catch (const Abandoned&) {
        } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
            signal(done_);
        }
    }

    void serve(int thread, uint32_t round) {
        for (;; round++) {
            wait_until(round_, [round](uint32_t now) { return now != round; });
            if (work_ == nullptr) return;
            take_part(thread);
            signal(left_);
        }
    }

    void stop() {
        work_ = nullptr;  // tells the workers to end
        if (!workers_.empty()) signal(round_);
        for (auto& worker : workers_) worker.join();
        workers_.clear();
    }

    void resize(int threads) {
        stop();
        lanes_.reset(new Lane[threads]);
        done_.store(0);
        workers_.reserve(threads - 1);
        const uint32_t round = round_.load();
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i, round] { serve(i, round); });
    }

    void reset() {  // call it only when no thread is in a phase
        for (int i = 0; i < threads(); i++) lanes_[i].phase = lanes_[i].due = 0, lanes_[i].next.store(0);
        done_.store(0);
        failed_.store(false);
    }

    const std::function<void(int)>* work_ = nullptr;
    std::unique_ptr<Lane[]> lanes_;
    std::atomic<uint32_t> round_{0}, left_{0}, done_{0};  // done_ counts pieces
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;
    std::vector<std::thread> workers_;
};

}  // namespace pdserve
