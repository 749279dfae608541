// How long the ranks of a gang take to add up a product whose numbers they share: see meetings.py.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "gang.h"

using namespace pdserve;

// Returns the microseconds of each sum of `numbers` floats, without the first tenth.
static std::vector<double> timed(Gang& gang, long numbers, int rounds) {
    std::vector<float> x(numbers, 0.0f);
    std::vector<double> times;
    for (int round = 0; round < rounds; round++) {
        const int place = round % 2;
        const auto began = std::chrono::steady_clock::now();
        float* own = gang.sums(place, gang.rank());
        for (long i = 0; i < numbers; i += kLanes) store(own + i, broadcast(float(round + gang.rank())));
        gang.meet();
        for (long i = 0; i < numbers; i += kLanes) store(&x[i], load(&x[i]) + gang.sum(place, i));
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count());
    }
    times.erase(times.begin(), times.begin() + rounds / 10);
    return times;
}

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const int ranks = atoi(arguments[1]), rounds = atoi(arguments[2]);
    const long most = 1 << 20;
    PdGang of{0, ranks, 0, 1, 1, 1, most, 32, 0, 64, 10'000, nullptr};
    of.memory = mmap(nullptr, Gang::bytes(of), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int rank = 1; rank < ranks; rank++)
        if (fork() == 0) {
            of.rank = rank;
            break;
        }
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(of.rank, &own);
    sched_setaffinity(0, sizeof(own), &own);
    Gang gang(of);
    for (long bytes : {2304L, 65536L, 1048576L}) {
        std::vector<double> times = timed(gang, bytes / 4, rounds);
        std::sort(times.begin(), times.end());
        if (of.rank == 0) printf("%ld %.2f %.2f\n", bytes, times[times.size() / 2], times[times.size() * 99 / 100]);
    }
    while (of.rank == 0 && wait(nullptr) > 0) {
    }
}
