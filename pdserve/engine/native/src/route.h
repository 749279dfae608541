// The router of a mixture of experts: from its products for one row to experts and weights. The result of a row depends only on
// that row. pdserve/engine/layers/moe.py chooses by the same rules.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "abi.h"
#include "arena.h"
#include "vector.h"

namespace pdserve {

constexpr float kLeastSum = 1e-20f;  // DeepSeek-V3 adds it to the sum by which it divides weights

// Working memory of one thread for rows of `experts` scores.
struct RouteScratch {
    Lines<float> scores, ranks;  // padded to whole vectors
    std::vector<uint16_t> left;  // the experts that may still be chosen, sixteen in each
    std::vector<float> groups;    // the scores of groups
    std::vector<uint8_t> taken;   // groups that are chosen

    void fit(long experts, long groups_needed) {
        const long padded = round_up(experts, kLanes);
        if (long(scores.size()) < padded) scores.resize(padded);
        if (long(ranks.size()) < padded) ranks.resize(padded);
        if (long(left.size()) < padded / kLanes) left.resize(padded / kLanes);
        if (long(groups.size()) < groups_needed) groups.resize(groups_needed);
        if (long(taken.size()) < groups_needed) taken.resize(groups_needed);
    }
};

inline F16 sigmoid(F16 x) {
    const F16 one = broadcast(1.0f);
    return one / (one + exp_lanes(zeros() - x));
}

// Writes the scores of all experts: the softmax of the products, or the sigmoid of each.
inline void score_experts(const float* products, const PdMoe& how, float* scores) {
    F16 most = broadcast(-std::numeric_limits<float>::infinity()), sum = zeros();
    const auto each = [&](const auto& f) {
        for (long i = 0; i < how.experts; i += kLanes) f(i, first_lanes(how.experts - i));
    };
    if (how.sigmoid) {
        each([&](long i, Mask lanes) { store(scores + i, sigmoid(load(products + i, lanes))); });
        return;
    }
    each([&](long i, Mask lanes) { most = select(lanes, max(most, load(products + i, lanes)), most); });
    const F16 largest = broadcast(largest_lane(most));
    each([&](long i, Mask lanes) {
        const F16 grown = exp_lanes(load(products + i, lanes) - largest);
        store(scores + i, grown);
        sum = select(lanes, sum + grown, sum);
    });
    const F16 total = broadcast(sum_lanes(sum));
    each([&](long i, Mask) { store(scores + i, load(scores + i) / total); });
}

// Leaves only the experts of the best groups. Among equal groups the lowest is better.
inline void keep_groups(const PdMoe& how, RouteScratch& s) {
    const long size = how.experts / how.groups;
    for (long group = 0; group < how.groups; group++) {
        float best = -std::numeric_limits<float>::infinity(), second = best;
        for (long i = group * size; i < (group + 1) * size; i++) {
            second = std::max(second, std::min(best, s.ranks[i]));
            best = std::max(best, s.ranks[i]);
        }
        s.groups[group] = how.best_two ? best + second : best;
    }
    std::fill(s.left.begin(), s.left.end(), 0);
    std::fill(s.taken.begin(), s.taken.end(), 0);
    for (long chosen = 0; chosen < how.top_groups; chosen++) {
        long best = -1;
        for (long group = 0; group < how.groups; group++)
            if (!s.taken[group] && (best < 0 || s.groups[group] > s.groups[best])) best = group;
        s.taken[best] = 1;
        for (long i = best * size; i < (best + 1) * size; i++) s.left[i / kLanes] |= uint16_t(1u << i % kLanes);
    }
}

// Takes the expert of the highest rank from those that are left, the lowest of equal ones.
inline int32_t take_expert(const PdMoe& how, RouteScratch& s) {
    F16 most = broadcast(-std::numeric_limits<float>::infinity());
    for (long i = 0; i < how.experts; i += kLanes)
        most = select(lanes_of(s.left[i / kLanes]), max(most, load(&s.ranks[i])), most);
    const F16 largest = broadcast(largest_lane(most));
    for (long i = 0;; i += kLanes) {
        const uint32_t found = s.left[i / kLanes] & bits_of(equal(load(&s.ranks[i]), largest));
        if (found == 0) continue;
        const int lane = __builtin_ctz(found);
        s.left[i / kLanes] &= uint16_t(~(1u << lane));
        return int32_t(i + lane);
    }
}

// Writes the experts of a row, ascending, and their weights. products: [experts]. bias: [experts], or null. A row that is not a
// number gets experts that exist.
inline void route_row(const float* products, const float* bias, const PdMoe& how, RouteScratch& s, int32_t* experts, float* weights) {
    score_experts(products, how, s.scores.data());
    for (long i = 0; i < how.experts; i += kLanes) {
        const Mask lanes = first_lanes(how.experts - i);
        const F16 score = load(&s.scores[i]);
        const F16 rank = bias == nullptr ? score : score + load(bias + i, lanes);
        const Mask none = no_number(rank);
        store(&s.ranks[i], select(none, broadcast(std::numeric_limits<float>::infinity()), rank));
        s.left[i / kLanes] = uint16_t(bits_of(lanes));
    }
    if (how.groups > how.top_groups) keep_groups(how, s);
    for (long i = 0; i < how.experts_per_token; i++) experts[i] = take_expert(how, s);
    std::sort(experts, experts + how.experts_per_token);
    float sum = 0;
    for (long i = 0; i < how.experts_per_token; i++) sum += weights[i] = s.scores[experts[i]];
    for (long i = 0; i < how.experts_per_token; i++)
        weights[i] = (how.renormalise ? weights[i] / (sum + kLeastSum) : weights[i]) * float(how.scale);
}

// Rows that are sorted by their experts. A slot is one row at one of its experts; slots of an expert follow each other, in the
// order of their rows.
struct Slots {
    std::vector<int32_t> row, begin;  // [slots], the row of each slot; [experts + 1], the first slot of each expert
    std::vector<float> weight;        // [slots]
    std::vector<int32_t> next;        // [experts]

    void fit(long slots, long experts) {
        if (long(row.size()) < slots) row.resize(slots);
        if (long(weight.size()) < slots) weight.resize(slots);
        if (long(begin.size()) < experts + 1) begin.resize(experts + 1);
        if (long(next.size()) < experts) next.resize(experts);
    }

    // experts, weights: [rows, each], as `route_row` writes them.
    void sort(const int32_t* experts, const float* weights, long rows, long each, long count) {
        std::fill_n(begin.begin(), count + 1, 0);
        for (long i = 0; i < rows * each; i++) begin[experts[i] + 1]++;
        for (long i = 0; i < count; i++) next[i] = begin[i], begin[i + 1] += begin[i];
        for (long i = 0; i < rows * each; i++) {
            const int32_t slot = next[experts[i]]++;
            row[slot] = int32_t(i / each), weight[slot] = weights[i];
        }
    }
};

// A use of a product: each row is multiplied with its weight and added to a row of the result. rows null: to the row of the same
// number.
struct AddWeighted {
    float* to;
    long columns;
    const int32_t* rows;
    const float* weights;
    void operator()(long row, long column, F16 low, F16 high) const {
        float* at = to + (rows == nullptr ? row : rows[row]) * columns + column;
        const F16 by = broadcast(weights[row]);
        add(at, first_lanes(columns - column), low, by);
        if (columns - column > kLanes) add(at + kLanes, first_lanes(columns - column - kLanes), high, by);
    }
    static void add(float* at, Mask lanes, F16 value, F16 by) {
        store(at, load(at, lanes) + value * by, lanes);
    }
};

}  // namespace pdserve
