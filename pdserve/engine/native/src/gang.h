// The ranks of a gang: processes of one machine that compute one model together, each with its own share of the weights.
//
// A stage is the ranks that share the same layers (tensor parallelism); stages follow each other (pipeline parallelism). Ranks meet
// in memory that all of them have mapped: rank 0 writes a step there, every rank computes its share, and products whose numbers are
// split among the ranks of a stage leave their sums there. A sum is read after all ranks of the stage have met, and there are two
// places for sums, which are used in turns: a rank that writes to a place again has met the others since they read it.
//
// No wait is without an end: a waiting rank spins for a moment, then sleeps, and looks a few times in a tenth of a second whether
// the gang is lost. A gang is lost for good when a rank fails, when a wait takes too long, or when a process says so.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "abi.h"
#include "pool.h"
#include "vector.h"

namespace pdserve {

constexpr int kMostStages = 8;
constexpr long kLookMs = 20;  // so often a sleeping rank looks whether the gang is lost

struct GangLost {};

class Gang {
  public:
    explicit Gang(const PdGang& of) : of_(of) {
        if (of.memory == nullptr) return;
        shared_ = (Shared*)of.memory;
        step_ = (uint8_t*)of.memory + round(sizeof(Shared));
        best_ = step_ + round(of.step_bytes);
        logits_ = (float*)(best_ + round(of.ranks * of.rows * kBestBytes));
        carried_ = logits_ + round(of.rows * of.vocab);
        sums_ = carried_ + round(of.rows * of.hidden);
        gathered_ = (bf16*)(sums_ + 2 * of.ranks * round(of.sum_rows * of.hidden));
    }

    // Returns the bytes of the memory that ranks share.
    static long bytes(const PdGang& of) {
        const long floats = round(of.rows * of.vocab) + round(of.rows * of.hidden) + 2 * of.ranks * round(of.sum_rows * of.hidden);
        return round(sizeof(Shared)) + round(of.step_bytes) + round(of.ranks * of.rows * kBestBytes) + floats * long(sizeof(float)) +
               of.rows * of.gathered * long(sizeof(bf16));
    }

    int rank() const { return int(of_.rank); }
    int ranks() const { return int(of_.ranks); }
    bool leads() const { return of_.rank == 0 && of_.stage == 0; }
    bool first_stage() const { return of_.stage == 0; }
    bool last_stage() const { return of_.stage == of_.stages - 1; }
    long rows() const { return of_.rows; }
    float* logits() const { return logits_; }
    float* carried() const { return carried_; }  // [rows, hidden], what a stage hands to the next one
    void* bests(int rank) const { return best_ + rank * of_.rows * kBestBytes; }

    // Returns a place for sums of a rank, [sum_rows, hidden].
    float* sums(int place, int rank) const { return sums_ + (place * of_.ranks + rank) * round(of_.sum_rows * of_.hidden); }

    // Tells whether ranks gather rows, and compute whole sums of their own columns, which they leave in the place of rank 0.
    bool gathers() const { return of_.gathered > 0; }
    long gathered_width() const { return of_.gathered; }
    bf16* gathered() const { return gathered_; }  // [rows, gathered], of one product at a time

    // Returns the sum of what all ranks of the stage left at `offset` of a place, as one rank with all parts adds it up.
    F16 sum(int place, long offset) const {
        if (gathers()) return load(sums(place, 0) + offset);
        F16 all[kMostRanks];
        for (int i = 0; i < ranks(); i++) all[i] = load(sums(place, i) + offset);
        for (int width = 1; width < ranks(); width *= 2)
            for (int i = 0; i + width < ranks(); i += 2 * width) all[i] = all[i] + all[i + width];
        return all[0];
    }

    // Waits for the other ranks of the stage.
    void meet() { arrive(shared_->met[of_.stage], meetings_ += uint32_t(of_.ranks)); }

    // Waits for the ranks of all stages, at the end of a step.
    void end_step() { arrive(shared_->ended, ends_ += uint32_t(of_.ranks * of_.stages)); }

    // Hands what is carried to the next stage; one rank of the stage does it.
    void hand_on() { add(shared_->handed[of_.stage]); }

    // Waits for what the stage before carried in this step.
    void take_over() {
        const uint32_t due = ++taken_;
        wait(shared_->handed[of_.stage - 1], of_.timeout_ms, [due](uint32_t now) { return int32_t(now - due) >= 0; });
    }

    // Writes a step for the other ranks, and wakes them. Returns false, and does nothing, when it has no room for it.
    bool publish(const PdStep& step, long groups, bool all_layers) {
        Writer to{step_, of_.step_bytes};
        to.put(&step, sizeof(step));
        to.put(&all_layers, sizeof(all_layers));
        to.put(step.token_ids, step.rows * sizeof(int32_t));
        to.put(step.span_start, step.spans * sizeof(int32_t));
        to.put(step.span_count, step.spans * sizeof(int32_t));
        to.put(step.drafted, step.spans * sizeof(int32_t));
        to.put(step.out, step.out_rows * sizeof(int32_t));
        for (const PdGroup* group = step.groups; group < step.groups + groups; group++) {
            to.put(group->span_table, (step.spans + 1) * sizeof(int64_t));
            to.put(group->tables, group->span_table[step.spans] * sizeof(int32_t));
        }
        if (to.left < 0 || step.rows > of_.rows) return false;
        add(shared_->begun);
        return true;
    }

    // Writes the counts of the rows that count for the other ranks, as a step without rows. The step before had room for more.
    void publish_counts(const int32_t* counts, long spans) {
        PdStep step{};
        step.spans = spans;
        const bool all_layers = true;
        Writer to{step_, of_.step_bytes};
        to.put(&step, sizeof(step));
        to.put(&all_layers, sizeof(all_layers));
        to.put(counts, spans * sizeof(int32_t));
        add(shared_->begun);
    }

    // Waits for a step, however long it takes, and reads it. Its arrays stay where they are until `end_step`. groups: the pool of each
    // group; their tables are changed. A step without rows has `span_count` alone, the counts of `publish_counts`. Throws GangLost.
    PdStep next_step(PdGroup* groups, long count, bool& all_layers) {
        const uint32_t due = ++steps_;
        wait(shared_->begun, -1, [due](uint32_t now) { return int32_t(now - due) >= 0; });
        Reader from{step_};
        PdStep step = *(const PdStep*)from.take(sizeof(PdStep));
        all_layers = *(const bool*)from.take(sizeof(bool));
        if (step.rows == 0) return step.span_count = (const int32_t*)from.take(step.spans * sizeof(int32_t)), step;
        step.token_ids = (const int32_t*)from.take(step.rows * sizeof(int32_t));
        step.span_start = (const int32_t*)from.take(step.spans * sizeof(int32_t));
        step.span_count = (const int32_t*)from.take(step.spans * sizeof(int32_t));
        step.drafted = (const int32_t*)from.take(step.spans * sizeof(int32_t));
        step.out = (const int32_t*)from.take(step.out_rows * sizeof(int32_t));
        for (PdGroup* group = groups; group < groups + count; group++) {
            group->span_table = (const int64_t*)from.take((step.spans + 1) * sizeof(int64_t));
            group->tables = (const int32_t*)from.take(group->span_table[step.spans] * sizeof(int32_t));
        }
        step.groups = groups, step.best = nullptr;
        return step;
    }

    bool lost() const { return shared_->lost.value.load(std::memory_order_acquire) != 0; }

    // Ends the gang: every rank that waits throws GangLost.
    void lose() { shared_->lost.value.store(1, std::memory_order_release); }

  private:
    static constexpr long kBestBytes = 8;
    static constexpr long kMostRanks = 8;

    struct alignas(64) Counter {
        std::atomic<uint32_t> value, sleepers;
    };

    // The first bytes of the memory. Zeros are a gang that has computed nothing.
    struct Shared {
        Counter begun, ended, lost, met[kMostStages], handed[kMostStages];
    };

    // Both round each array up to whole words of 8 bytes.
    struct Writer {
        uint8_t* to;
        long left;
        void put(const void* from, long size) {
            const long whole = (size + 7) / 8 * 8;
            if ((left -= whole) >= 0) std::memcpy(to, from, size), to += whole;
        }
    };
    struct Reader {
        const uint8_t* from;
        const void* take(long size) {
            const uint8_t* taken = from;
            from += (size + 7) / 8 * 8;
            return taken;
        }
    };

    static long now_ms() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000 + now.tv_nsec / 1000000;
    }

    static long round(long size) { return (size + 63) / 64 * 64; }

    static void add(Counter& to) {
        to.value.fetch_add(1);
        if (to.sleepers.load() > 0) syscall(SYS_futex, &to.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }

    void arrive(Counter& at, uint32_t due) {
        add(at);
        wait(at, of_.timeout_ms, [due](uint32_t now) { return int32_t(now - due) >= 0; });
    }

    // Waits until done(value). timeout_ms below 0: for ever. The gang is lost when it takes longer.
    template <class Done>
    void wait(Counter& on, long timeout_ms, const Done& done) {
        for (int i = 0; i < kSpins; i++) {
            if (done(on.value.load(std::memory_order_acquire))) return;
            _mm_pause();
        }
        on.sleepers.fetch_add(1);
        const long ends_ms = now_ms() + timeout_ms;
        bool there = false;
        for (uint32_t seen; !(there = done(seen = on.value.load())) && !lost();) {
            const timespec look{0, kLookMs * 1000000};
            syscall(SYS_futex, &on.value, FUTEX_WAIT, seen, &look, nullptr, 0);
            if (timeout_ms >= 0 && now_ms() > ends_ms) lose();
        }
        on.sleepers.fetch_sub(1);
        if (!there) throw GangLost();
    }

    PdGang of_;
    Shared* shared_ = nullptr;
    uint8_t *step_ = nullptr, *best_ = nullptr;
    float *logits_ = nullptr, *carried_ = nullptr, *sums_ = nullptr;
    bf16* gathered_ = nullptr;
    uint32_t meetings_ = 0, ends_ = 0, steps_ = 0, taken_ = 0;
};

}  // namespace pdserve
