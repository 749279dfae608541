// Per-token functions besides matrix products. The result of a row depends only on that row.
#pragma once

#include <cmath>

#include "kv_format.h"
#include "matmul.h"

namespace pdserve {

// Writes one group of float32 numbers as integers up to 127, and their scale and offset.
inline void put_group(const float* x, int8_t* to, float& scale, int32_t& offset) {
    __m512 largest = _mm512_setzero_ps();
    for (long i = 0; i < kGroup; i += kLanes) largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    const float top = _mm512_reduce_max_ps(largest);
    const __m512 inverse = _mm512_set1_ps(top > 0 ? 127.0f / top : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (long i = 0; i < kGroup; i += kLanes) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtepi32_epi8(whole));
    }
    scale = top / 127.0f;
    offset = -128 * _mm512_reduce_add_epi32(sum);
}

// Writes float32 [k] to row `row` of `out`: as integers if `out` has scales, else as bfloat16.
inline void put_row(const float* x, long k, const Rows& out, long row) {
    if (out.scales == nullptr) {
        bf16* to = (bf16*)(out.words + row * out.stride);
        for (long i = 0; i < k; i += kLanes) store_bf16(to + i, _mm512_loadu_ps(x + i));
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
    for (long i = 0; i < k; i += kLanes) _mm512_storeu_ps(spare + i, load_bf16(x + i));
    put_row(spare, k, out, row);
}

// Writes x / rms(x) * weight to row `row` of `out`; x is [k] float32. `spare` has room for k floats.
inline void norm_row(const float* x, const float* weight, long k, float eps, float* spare, const Rows& out, long row) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < k; i += kLanes) {
        const __m512 value = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(sum_lanes(squares) / float(k) + eps));
    for (long i = 0; i < k; i += kLanes) {
        const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(x + i), scale);
        _mm512_storeu_ps(spare + i, _mm512_mul_ps(value, _mm512_loadu_ps(weight + i)));
    }
    put_row(spare, k, out, row);
}

// Rotates one head by the rows of `table`: cosines, then sines with the first half negated.
inline void turn_head(const float* x, const float* table, long dim, float* to) {
    const float *cosine = table, *sine = table + dim;
    const long half = dim / 2;
    for (long i = 0; i < half; i++) {
        to[i] = x[i] * cosine[i] + x[i + half] * sine[i];
        to[i + half] = x[i + half] * cosine[i + half] + x[i] * sine[i + half];
    }
}

// Writes one head to a row of plain K or V, rounded once.
template <class Kv>
inline void put_head(const float* x, long dim, uint8_t* to) {
    for (long i = 0; i < dim; i += kLanes) Kv::store(to, i, _mm512_loadu_ps(x + i));
}

}  // namespace pdserve
