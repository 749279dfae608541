// The use of the head's product: the largest logit of each row is kept while logits are computed, so those that nobody else wants
// need no memory.
#pragma once

#include "draw.h"
#include "matmul.h"

namespace pdserve {

// The largest of some logits of a row, and the lowest id that has it. The logit is NaN as soon as one of them is. The result of
// `add` depends on neither order nor grouping, so it is the same for any number of threads.
struct Best {
    float logit = -std::numeric_limits<float>::infinity();
    int32_t id = std::numeric_limits<int32_t>::max();

    void add(const Best& other) {
        if (other.logit < logit || std::isnan(logit)) return;
        if (other.logit == logit && other.id > id) return;
        *this = other;
    }

    // Adds the logits of the columns from `column` on.
    [[gnu::noinline]] void add(F16 x, long column, Mask lanes) {
        if (any(lanes & no_number(x))) return add({std::numeric_limits<float>::quiet_NaN(), id});
        const float largest = largest_lane(select(lanes, x, broadcast(-std::numeric_limits<float>::infinity())));
        const uint32_t found = bits_of(lanes & equal(x, broadcast(largest)));
        if (found) add({largest, int32_t(column + __builtin_ctz(found))});
    }

    // Returns the id, or kNoToken when the largest logit is not a finite number.
    int32_t token() const { return std::isfinite(logit) ? id : kNoToken; }
};

// Bounds the logits of a product, keeps the largest of each row in `best`, and stores all of them where they are wanted.
struct TakeLogits {
    float* to;  // [rows, stride], or null
    long stride, columns;
    long first_id;  // the id of the first column
    float softcap;  // 0 means none
    Best* best;     // [rows]
    void operator()(long row, long column, F16 low, F16 high) const {
        if (softcap > 0) low = capped(low, broadcast(softcap)), high = capped(high, broadcast(softcap));
        if (to != nullptr) Store{to + row * stride + first_id, columns}(0, column, low, high);
        const F16 least = broadcast(best[row].logit);
        if (!any(~(less(low, least) & less(high, least)))) return;  // nearly always; a NaN is not less
        best[row].add(low, first_id + column, first_lanes(columns - column));
        if (columns - column > kLanes) best[row].add(high, first_id + column + kLanes, first_lanes(columns - column - kLanes));
    }
};

}  // namespace pdserve
