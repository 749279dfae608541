// The steps from a row of logits to its token: log-probabilities, bias, penalties, bans, the mask, and the draw.
#pragma once

#include <cmath>
#include <cstring>

#include "draw.h"

namespace pdserve {

// Finds the `most` largest logits, largest first, the lower id first among equals.
inline void find_likeliest(const float* logits, long count, long most, std::vector<Candidate>& found) {
    found.clear();
    F16 least = broadcast(0.0f);
    for (long i = 0; i < count && most > 0; i += kLanes) {
        const Mask lanes = first_lanes(count - i);
        const bool full = long(found.size()) == most;
        uint32_t higher = bits_of(full ? lanes & greater(load(logits + i, lanes), least) : lanes);
        if (!higher) continue;
        for (; higher; higher &= higher - 1) {
            const long id = i + __builtin_ctz(higher);
            size_t place = found.size();
            while (place > 0 && found[place - 1].weight < logits[id]) place--;
            if (long(place) == most) continue;
            if (long(found.size()) == most) found.pop_back();
            found.insert(found.begin() + place, {logits[id], int32_t(id)});
        }
        least = broadcast(found.back().weight);
    }
}

// Turns logits into log-probabilities of the model's own distribution. `logsum`: the logarithm of the sum of e^(x - largest).
struct Normaliser {
    float largest;
    double logsum;

    // Returns a log-probability, at least vLLM's stand-in for minus infinity, which JSON cannot write.
    float of(float logit) const { return float(std::max(double(logit - largest) - logsum, -9999.0)); }
};

inline Normaliser normaliser(const float* logits, long count, float largest, DrawScratch& s) {
    return {largest, std::log(weigh(logits, count, largest, 1.0, s.weights))};
}

// Applies bias, penalties and bans in float32. Each operation is rounded by itself, in the order of sampler.py. Ids outside the
// vocabulary are skipped.
inline void edit(float* logits, long count, const PdRow& how) {
    const auto known = [count](int32_t id) { return id >= 0 && id < count; };
    const float repetition = float(how.repetition), presence = float(how.presence), frequency = float(how.frequency);
    for (long i = 0; i < how.biases; i++)
        if (known(how.bias_ids[i])) logits[how.bias_ids[i]] += how.bias[i];
    for (long i = 0; i < how.seen; i++) {
        if (!known(how.seen_ids[i])) continue;
        float& x = logits[how.seen_ids[i]];
        x = x > 0 ? x / repetition : x * repetition;
        if (how.output_counts[i] > 0) x = (x - frequency * float(how.output_counts[i])) - presence;
    }
    for (long i = 0; i < how.banned; i++)
        if (known(how.banned_ids[i])) logits[how.banned_ids[i]] = -std::numeric_limits<float>::infinity();
}

// Returns which of the ids from i on a mask allows.
inline Mask allowed_lanes(const uint8_t* mask, long i, long count) {
    uint16_t allowed;
    std::memcpy(&allowed, mask + i / 8, sizeof allowed);
    return lanes_of(allowed) & first_lanes(count - i);
}

// Makes all ids impossible that a mask does not allow.
inline void apply_mask(float* logits, long count, const uint8_t* mask) {
    const F16 impossible = broadcast(-std::numeric_limits<float>::infinity());
    for (long i = 0; i < count; i += kLanes)
        store(logits + i, impossible, ~allowed_lanes(mask, i, count) & first_lanes(count - i));
}

// Returns the lowest id of the largest logit that a mask allows. It reads only these logits: a mask often allows few ids.
inline int32_t best_allowed(const float* logits, long count, const uint8_t* mask) {
    float best = -std::numeric_limits<float>::infinity();
    int32_t id = kNoToken;
    for (long i = 0; i < count; i += kLanes) {
        const Mask lanes = allowed_lanes(mask, i, count);
        if (!any(lanes)) continue;
        const F16 x = load(logits + i, lanes);
        const Mask higher = lanes & greater(x, broadcast(best));
        if (!any(higher)) continue;
        best = largest_lane(select(higher, x, broadcast(best)));
        id = int32_t(i + __builtin_ctz(bits_of(higher & equal(x, broadcast(best)))));
    }
    return std::isfinite(best) ? id : kNoToken;
}

// Remembers the logits that `edit` will change. A mask changes none of an id that can be drawn.
inline void remember(const float* logits, long count, const PdRow& how, std::vector<Candidate>& before) {
    before.clear();
    const auto keep = [&](const int32_t* ids, long size) {
        for (long i = 0; i < size; i++)
            if (ids[i] >= 0 && ids[i] < count) before.push_back({logits[ids[i]], ids[i]});
    };
    keep(how.bias_ids, how.biases);
    keep(how.seen_ids, how.seen);
    keep(how.banned_ids, how.banned);
}

inline int32_t choose(float* logits, long count, const PdRow& how, DrawScratch& s) {
    edit(logits, count, how);
    if (how.mask != nullptr) {
        if (!(how.temperature > 0)) return best_allowed(logits, count, how.mask);
        apply_mask(logits, count, how.mask);
    }
    return how.temperature > 0 ? draw(logits, count, how, s) : best_of(logits, count);
}

// Draws the token of one row, whose logits may be changed. Writes the log-probabilities when they are wanted and a token was
// drawn.
inline int32_t take(float* logits, long count, const PdRow& how, DrawScratch& s) {
    if (how.logprobs == nullptr) return choose(logits, count, how, s);
    const float largest = top_of(logits, count);
    if (!std::isfinite(largest)) return kNoToken;
    const Normaliser scale = normaliser(logits, count, largest, s);
    find_likeliest(logits, count, how.tops, s.likeliest);
    remember(logits, count, how, s.before);
    for (size_t i = 0; i < s.likeliest.size(); i++) {
        how.logprobs[1 + i] = scale.of(s.likeliest[i].weight);
        how.top_ids[i] = s.likeliest[i].id;
    }
    const int32_t id = choose(logits, count, how, s);
    if (id == kNoToken) return id;
    const auto old = std::find_if(s.before.begin(), s.before.end(), [id](const Candidate& one) { return one.id == id; });
    how.logprobs[0] = scale.of(old != s.before.end() ? old->weight : logits[id]);
    return id;
}

}  // namespace pdserve
