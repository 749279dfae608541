// The threads of one model. They meet at barriers, spin for a moment only and then sleep: two workers of two threads
// each on two cores must not spin each other out of their time slices.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace pdserve {

// Tens of microseconds: chosen, not tuned. Beside another busy process two threads lose more than their share of time.
constexpr int kSpins = 2000;

inline void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < kSpins; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        _mm_pause();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

class Pool {
  public:
    ~Pool() { resize(1); }

    // Runs work(thread) on `threads` threads, the caller among them as thread 0, and returns when all are done.
    void run(int threads, const std::function<void(int)>& work) {
        if (threads != int(workers_.size()) + 1) resize(threads);
        work_ = &work;
        signal(round_);
        work(0);
        barrier();
    }

    int threads() const { return int(workers_.size()) + 1; }

    // Every thread of the current `run` comes here before any goes on.
    void barrier() {
        if (workers_.empty()) return;
        const uint32_t now = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(threads())) {
            arrived_.store(0, std::memory_order_relaxed);
            signal(phase_);
        } else {
            wait_while(phase_, now);
        }
    }

  private:
    static void signal(std::atomic<uint32_t>& value) {
        value.fetch_add(1, std::memory_order_acq_rel);
        value.notify_all();
    }

    void resize(int threads) {
        work_ = nullptr;  // the wish to end
        if (!workers_.empty()) signal(round_);
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        const uint32_t round = round_.load();
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i, round] { serve(i, round); });
    }

    void serve(int thread, uint32_t round) {
        for (;;) {
            wait_while(round_, round);
            round++;
            if (work_ == nullptr) return;
            (*work_)(thread);
            barrier();
        }
    }

    const std::function<void(int)>* work_ = nullptr;
    std::atomic<uint32_t> round_{0}, phase_{0}, arrived_{0};
    std::vector<std::thread> workers_;
};

}  // namespace pdserve
