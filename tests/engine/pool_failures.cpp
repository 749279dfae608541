// What pool.h does when a thread throws, said line by line for test_native_failures.py.
#include <cstdio>
#include <new>
#include <stdexcept>

#include "pool.h"

using pdserve::Pool;

constexpr int kPhases = 100;
constexpr long kPieces = 7;

// So many pieces that were done; a piece of `bad_phase` throws in whichever thread has it.
template <class Error>
long run(Pool& pool, int threads, int bad_phase, long bad_piece) {
    std::atomic<long> done{0};
    pool.run(threads, [&](int thread) {
        for (int phase = 0; phase < kPhases; phase++)
            pool.share(thread, kPieces, [&](long piece) {
                if (phase == bad_phase && piece == bad_piece) throw Error("planted");
                done++;
            });
    });
    return done;
}

struct NoMemory : std::bad_alloc {
    explicit NoMemory(const char*) {}
};

int main() {
    Pool pool;
    for (int threads : {1, 2, 3, 5})
        for (int phase : {0, 50, kPhases - 1})
            for (long piece = 0; piece < kPieces; piece++) {
                try {
                    run<NoMemory>(pool, threads, phase, piece);
                    std::puts("nothing was thrown");
                } catch (const std::bad_alloc&) {
                }
                try {
                    run<std::runtime_error>(pool, threads, phase, piece);
                    std::puts("nothing was thrown");
                } catch (const std::runtime_error&) {
                }
                if (run<NoMemory>(pool, threads, -1, 0) != kPhases * kPieces) std::puts("a piece was lost or done twice");
            }
    std::puts("done");
}
