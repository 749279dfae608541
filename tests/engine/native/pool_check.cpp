// What pool.h promises, tried out: says what is wrong line by line, then the name of what was tried.
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

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

// A thread that throws, in any phase and any piece.
void throwing() {
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
}

// Thread 1 stands still in the first piece that it gets, until the others are done: they have to be done without it.
void standing_still() {
    Pool pool;
    std::atomic<long> done{0};
    pool.run(2, [&](int thread) {
        for (int phase = 0; phase < kPhases; phase++) {
            bool first = true;
            pool.share(thread, kPieces, [&](long) {
                if (thread == 1 && first)
                    while (done < (phase + 1) * kPieces - 1) std::this_thread::yield();
                first = false;
                done++;
            });
        }
    });
    if (done != kPhases * kPieces) std::puts("a piece was lost or done twice");
}

// Thread 1 comes when half of the phases are over: they end without it, and it takes part in the rest.
void coming_late() {
    Pool pool;
    std::atomic<long> over{0};
    std::atomic<bool> early{false};
    std::atomic<int> taken{0};
    pool.run(2, [&](int thread) {
        if (thread == 1)
            while (over < kPhases / 2) std::this_thread::yield();
        for (int phase = 0; phase < kPhases; phase++) {
            pool.share(thread, kPieces, [&](long) {
                if (thread == 1 && phase < kPhases / 2) early = true;
                if (phase == kPhases - 1) {
                    taken |= 1 << thread;
                    while (taken != 3) std::this_thread::yield();  // both are in it
                }
            });
            if (thread == 0) over = phase + 1;
        }
    });
    if (early) std::puts("a phase that was over had pieces left");
}

int main(int, char** arguments) {
    const std::string what = arguments[1];
    if (what == "throwing") throwing();
    if (what == "standing still") standing_still();
    if (what == "coming late") coming_late();
    std::puts(what.c_str());
}
