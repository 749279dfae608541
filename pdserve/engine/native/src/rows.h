// Per-token functions besides matrix products. The result of a row depends only on that row.
#pragma once

#include <cmath>

#include "kv_format.h"
#include "matmul.h"

namespace pdserve {

// Writes one group of float32 numbers as integers up to 127, and their scale and offset. The scale is NaN where one of the numbers is
// not finite: no integer could tell.
inline void put_group(const float* x, int8_t* to, float& scale, int32_t& offset) {
    F16 largest = zeros(), check = zeros();
    for (long i = 0; i < kGroup; i += kLanes) {
        const F16 value = load(x + i);
        largest = max(largest, absolute(value));
        check = fma(value, zeros(), check);
    }
    const float top = largest_lane(largest);
    const F16 inverse = broadcast(top > 0 ? 127.0f / top : 0.0f);
    I16 sum = broadcast(0);
    for (long i = 0; i < kGroup; i += kLanes) {
        const I16 whole = to_ints(load(x + i) * inverse);
        sum = sum + whole;
        _mm_storeu_si128((__m128i*)(to + i), low_bytes(whole));
    }
    scale = top / 127.0f + sum_lanes(check);
    offset = -128 * sum_lanes(sum);
}

// Writes float32 [k] to row `row` of `out`: as integers if `out` has scales, else as bfloat16.
inline void put_row(const float* x, long k, const Rows& out, long row) {
    if (out.scales == nullptr) {
        bf16* to = (bf16*)(out.words + row * out.stride);
        for (long i = 0; i < k; i += kLanes) store_bf16(to + i, load(x + i));
        return;
    }
    int8_t* to = (int8_t*)(out.words + row * out.stride);
    for (long i = 0; i < k; i += kGroup) {
        const long group = out.group(row) + i / kGroup;
        put_group(x + i, to + i, out.scales[group], out.offsets[group]);
    }
}

// Writes bfloat16 [k] to row `row` of `out` as `put_row` does. `spare` has room for k floats.
inline void requantise(const bf16* x, long k, float* spare, const Rows& out, long row) {
    for (long i = 0; i < k; i += kLanes) store(spare + i, load_bf16(x + i));
    put_row(spare, k, out, row);
}

// Writes x / rms(x) * weight to `to`, which may be x; both are [k] float32.
inline void norm_to(const float* x, const float* weight, long k, float eps, float* to) {
    F16 squares = zeros();
    for (long i = 0; i < k; i += kLanes) {
        const F16 value = load(x + i);
        squares = fma(value, value, squares);
    }
    const F16 scale = broadcast(1.0f / std::sqrt(sum_lanes(squares) / float(k) + eps));
    for (long i = 0; i < k; i += kLanes) {
        const F16 value = load(x + i) * scale;
        store(to + i, value * load(weight + i));
    }
}

// Writes x / rms(x) * weight to row `row` of `out`; x is [k] float32. `spare` has room for k floats.
inline void norm_row(const float* x, const float* weight, long k, float eps, float* spare, const Rows& out, long row) {
    norm_to(x, weight, k, eps, spare);
    put_row(spare, k, out, row);
}

// Adds [k] float32 to `to`.
inline void add_to(const float* x, long k, float* to) {
    for (long i = 0; i < k; i += kLanes) store(to + i, load(to + i) + load(x + i));
}

// Rotates the first `dim` numbers of a head by the rows of `table`: cosines, then sines with the first half negated.
inline void turn_head(const float* x, const float* table, long dim, float* to) {
    const float *cosine = table, *sine = table + dim;
    const long half = dim / 2;
    const auto turned = [](F16 a, F16 cosines, F16 b, F16 sines) {
        return a * cosines + b * sines;
    };
    for (long i = 0; i < half; i += kLanes) {
        const Mask lanes = first_lanes(half - i);
        const auto load = [lanes](const float* from) { return pdserve::load(from, lanes); };
        const F16 low = load(x + i), high = load(x + half + i);
        store(to + i, turned(low, load(cosine + i), high, load(sine + i)), lanes);
        store(to + half + i, turned(high, load(cosine + half + i), low, load(sine + half + i)), lanes);
    }
}

// Rotates the first `turned` of `dim` numbers of a head, and copies the others.
inline void turn_part(const float* x, const float* table, long turned, long dim, float* to) {
    turn_head(x, table, turned, to);
    std::copy(x + turned, x + dim, to + turned);
}

// Writes one head to a row of plain K or V, rounded once.
template <class Kv>
inline void put_head(const float* x, long dim, uint8_t* to) {
    for (long i = 0; i < dim; i += kLanes) Kv::store(to, i, load(x + i));
}

}  // namespace pdserve
