// The draw of one token from a row of logits, with the same bits as sampler.py. Weights are float32 and multiples of 2^-34, so
// their sums in float64 are exact in any order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "abi.h"
#include "arena.h"
#include "vector.h"

namespace pdserve {

constexpr long kBlock = 64;  // weights in a block: the search for the k-th largest uses the largest of each block

constexpr int kBins = 1024;  // bin_of(1.0) is 1016

struct Candidate {
    float weight;
    int32_t id;
};

// Working memory of one thread.
struct DrawScratch {
    Lines<float> weights;
    std::vector<float> tops;
    std::vector<Candidate> kept, edge, likeliest, before;

    // Reserves all memory that rows of `count` logits with at most `edits` changed ones may need, because a thread of the pool
    // should not run out of memory later.
    void fit(long count, long edits, long most_likely) {
        weights.reserve(round_up(count, kBlock));
        tops.reserve(round_up(count, kBlock) / kBlock);
        kept.reserve(count), edge.reserve(count);
        likeliest.reserve(most_likely + 1), before.reserve(edits);
    }
};

inline float largest_of(const float* logits, long count) {
    F16 top = broadcast(-std::numeric_limits<float>::infinity());
    for (long i = 0; i < count; i += kLanes) top = max(top, load(logits + i, first_lanes(count - i), top));
    return largest_lane(top);
}

constexpr int32_t kNoToken = -1;  // NO_TOKEN of core/step_plan.py

// Returns the largest logit as `largest_of` does, but NaN when one of them is NaN. Each comparison is independent, while each
// maximum waits for the one before it, so the test costs little.
inline float top_of(const float* logits, long count) {
    F16 top = broadcast(-std::numeric_limits<float>::infinity());
    Mask odd = lanes_of(0);
    for (long i = 0; i < count; i += kLanes) {
        const F16 x = load(logits + i, first_lanes(count - i), top);
        odd = odd | no_number(x);
        top = max(top, x);
    }
    return any(odd) ? std::numeric_limits<float>::quiet_NaN() : largest_lane(top);
}

// Returns the lowest id of the largest logit; kNoToken when this logit is not a finite number.
inline int32_t best_of(const float* logits, long count) {
    const float best = top_of(logits, count);
    if (!std::isfinite(best)) return kNoToken;
    const F16 wanted = broadcast(best);
    for (long i = 0; i < count; i += kLanes) {
        const Mask lanes = first_lanes(count - i);
        const uint32_t found = bits_of(lanes & equal(load(logits + i, lanes), wanted));
        if (found) return int32_t(i + __builtin_ctz(found));
    }
    return kNoToken;  // not reached: one of them is the largest
}

inline F16 step(F16 sum, F16 by, float next) { return sum * by + broadcast(next); }

// Returns e^x for x up to 0, rounded to a multiple of 2^-34. It is exactly 1 at 0, and 0 below -25, where it would round to 0
// anyway. It is exp_lanes with separate multiplications and additions, so that torch can compute the same bits.
inline F16 weight_lanes(F16 x) {
    const Mask counts = at_least(x, broadcast(-25.0f));
    if (!any(counts)) return zeros();
    const F16 bounded = keep(counts, x);
    const F16 turns = round_even(bounded * broadcast(1.44269504089f));
    F16 rest = bounded - turns * broadcast(0.693359375f);
    rest = rest + turns * broadcast(2.12194440e-4f);
    F16 sum = step(broadcast(1.9875691500e-4f), rest, 1.3981999507e-3f);
    sum = step(sum, rest, 8.3334519073e-3f);
    sum = step(sum, rest, 4.1665795894e-2f);
    sum = step(sum, rest, 1.6666665459e-1f);
    sum = step(sum, rest, 5.0000001201e-1f);
    sum = rest * rest * sum + (rest + broadcast(1.0f));
    const F16 power = raise(counts, sum, turns);
    const F16 coarse = broadcast(0x1p-11f);  // just above it float32 has steps of 2^-34, and wider ones further up
    const Mask fine = less(power, coarse);
    return select(fine, power + coarse - coarse, power);
}

// Writes e^((x - largest) / temperature) of a row, and zeros up to a whole block. Returns the sum of all.
inline double weigh(const float* logits, long count, float largest, double temperature, Lines<float>& weights) {
    const F16 top = broadcast(largest);
    const F16 inverse = broadcast(1.0f / std::max(float(temperature), 1e-30f));
    weights.resize(round_up(count, kBlock));
    DoubleSum sum;
    for (long i = 0; i < count; i += kLanes) {
        const Mask lanes = first_lanes(count - i);
        const F16 below = load(logits + i, lanes) - top;
        const F16 weight = keep(lanes, weight_lanes(below * inverse));
        store(&weights[i], weight);
        sum.add(weight);
    }
    std::fill(weights.begin() + round_up(count, kLanes), weights.end(), 0.0f);
    return sum.total();
}

inline void keep_from(float edge, DrawScratch& s) {
    s.kept.clear();
    const F16 least = broadcast(edge);
    for (long i = 0; i < long(s.weights.size()); i += kLanes)
        for (uint32_t found = bits_of(at_least(load(&s.weights[i]), least)); found; found &= found - 1) {
            const long id = i + __builtin_ctz(found);
            if (s.weights[id] > 0) s.kept.push_back({s.weights[id], int32_t(id)});
        }
}

// Orders candidates: largest weight first, the lower id first among equals.
inline bool before(const Candidate& a, const Candidate& b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; }

// Keeps the k largest. The k-th largest of the blocks' maxima is a lower bound for the k-th largest weight.
inline void keep_top_k(long k, DrawScratch& s) {
    float edge = 0;
    if (k <= long(s.weights.size()) / kBlock) {
        s.tops.clear();
        for (long i = 0; i < long(s.weights.size()); i += kBlock) s.tops.push_back(largest_of(&s.weights[i], kBlock));
        std::nth_element(s.tops.begin(), s.tops.begin() + (k - 1), s.tops.end(), std::greater<float>());
        edge = s.tops[k - 1];
    }
    keep_from(edge, s);
    if (long(s.kept.size()) <= k) return;
    std::nth_element(s.kept.begin(), s.kept.begin() + k, s.kept.end(), before);
    s.kept.resize(k);
    std::sort(s.kept.begin(), s.kept.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

// Returns the bin of a weight from 0 to 1: its exponent and three bits of its mantissa.
inline int bin_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return int(bits >> 20);
}

// Keeps the fewest of the largest candidates whose share of `total` reaches p; at least one. Only the bin of weights in which p
// is reached is sorted, so in a flat distribution most of the vocabulary is not sorted.
inline void keep_top_p(double p, double total, DrawScratch& s) {
    double mass[kBins] = {}, reached = 0;
    for (const Candidate& one : s.kept) mass[bin_of(one.weight)] += one.weight;
    int bin = kBins - 1;
    for (; bin > 0 && reached + mass[bin] < p * total; bin--) reached += mass[bin];
    s.edge.clear();
    for (const Candidate& one : s.kept)
        if (bin_of(one.weight) == bin) s.edge.push_back(one);
    std::sort(s.edge.begin(), s.edge.end(), before);
    size_t count = 0;
    while (count < s.edge.size() && reached < p * total) reached += s.edge[count++].weight;
    if (count == s.edge.size()) {  // the whole bin is kept, or rounding left p just out of reach
        std::erase_if(s.kept, [&](const Candidate& one) { return bin_of(one.weight) < bin; });
        return;
    }
    const Candidate first_out = s.edge[count];
    std::erase_if(s.kept, [&](const Candidate& one) { return !before(one, first_out); });
}

// Inverts the cumulative sum over the kept candidates, which are in ascending order of id.
inline int32_t pick_kept(double uniform, const DrawScratch& s) {
    const double total = std::accumulate(s.kept.begin(), s.kept.end(), 0.0, [](double sum, const Candidate& c) { return sum + c.weight; });
    double reached = 0;
    for (const Candidate& one : s.kept)
        if ((reached += one.weight) > uniform * total) return one.id;
    return s.kept.back().id;
}

// Inverts the cumulative sum over all weights. It skips whole blocks up to the one that holds the target.
inline int32_t pick(double uniform, double total, const Lines<float>& weights) {
    double reached = 0;
    int32_t last = 0;
    for (long i = 0; i < long(weights.size()); i += kBlock) {
        DoubleSum sum;
        for (long j = i; j < i + kBlock; j += kLanes) sum.add(load(&weights[j]));
        const double block = sum.total();
        if (block > 0) last = int32_t(i);
        if (reached + block > uniform * total) break;
        reached += block;
    }
    int32_t positive = last;
    for (int32_t id = last; id < last + kBlock; id++) {
        if (weights[id] > 0) positive = id;
        if ((reached += weights[id]) > uniform * total) break;
    }
    return positive;  // the last positive weight, when rounding took the target up to the whole sum
}

// Returns a number in [0, 1) that depends only on seed and index, as `uniform` of core/sampling.py does.
inline double uniform(uint64_t seed, uint64_t index) {
    const auto mix = [](uint64_t z) {
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    };
    const uint64_t state = mix(seed + 0x9E3779B97F4A7C15u);
    return double(mix(state + (index + 1) * 0x9E3779B97F4A7C15u) >> 11) * 0x1p-53;
}

inline int32_t draw(const float* logits, long count, const PdRow& how, DrawScratch& s) {
    const float largest = top_of(logits, count);
    if (!std::isfinite(largest)) return kNoToken;
    const double chance = uniform(how.seed, how.index);
    double total = weigh(logits, count, largest, how.temperature, s.weights);
    const bool few = how.top_k > 0 && how.top_k < count;
    if (!few && how.top_p >= 1.0 && how.min_p <= 0.0) return pick(chance, total, s.weights);
    if (few) {
        keep_top_k(how.top_k, s);
        total = 0;
        for (const Candidate& one : s.kept) total += one.weight;
    } else {
        // A weight below (1 - p) / count of the total cannot be among the fewest whose share reaches p. The largest weight is
        // 1, so weights below min_p are removed anyway. Both limits are set a little lower, to stay clear of rounding.
        const double share = how.top_p < 1.0 ? 0.5 * (1.0 - how.top_p) * total / double(count) : 0.0;
        keep_from(float(std::max(share, 0.999 * how.min_p)), s);
    }
    if (how.top_p < 1.0) keep_top_p(how.top_p, total, s);
    if (how.min_p > 0.0) std::erase_if(s.kept, [&](const Candidate& one) { return one.weight < how.min_p; });  // the largest is 1
    return pick_kept(chance, s);
}

}  // namespace pdserve
