// The storage formats of K and V: plain numbers, or quantised numbers with one scale for each block and head.
//
// A value is a stored number times its scale. int8: [-127, 127]. fp8: E4M3 without infinities, up to 448. int4: [-7, 7] stored
// plus 8, two neighbouring dimensions in a byte, the even one in the low half. bfloat16 holds all of them exactly, so products
// take them as they are, and scales multiply scores and weights. pdserve/engine/kv/format.py computes the same bytes.
#pragma once

#include <algorithm>
#include <cstring>

#include "vector.h"

namespace pdserve {

constexpr float kSmallestScale = 0x1p-100f;  // a smaller scale becomes 0, so that 1 / scale is finite

// Every format has three functions. `bytes` gives the bytes of one token of a head. `load` returns 32 dimensions from `from` on
// as bfloat16; those outside `pairs` are any finite numbers. `store` writes sixteen dimensions. Quantised formats also have
// `widen16`, the inverse of `store`.

struct Bf16Kv {
    static constexpr bool kScaled = false;
    static constexpr long bytes(long dim) { return dim * 2; }
    static __m512i load(const uint8_t* row, long from, __mmask16 pairs) { return _mm512_maskz_loadu_epi32(pairs, row + from * 2); }
    static void store(uint8_t* row, long at, __m512 value) { store_bf16((bf16*)row + at, value); }
};

struct Fp32Kv {
    static constexpr bool kScaled = false;
    static constexpr long bytes(long dim) { return dim * 4; }
    static __m512i load(const uint8_t* row, long from, __mmask16 pairs) {
        const float* at = (const float*)row + from;
        const __m512 low = _mm512_loadu_ps(at);  // a head is a whole number of vectors
        const __m512 high = _mm512_maskz_loadu_ps(pairs >> 8 ? 0xFFFF : 0, at + kLanes);
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    static void store(uint8_t* row, long at, __m512 value) { _mm512_storeu_ps((float*)row + at, value); }
};

// Rounds to the nearest whole number, halves upwards, within [-largest, largest].
inline __m512i whole_lanes(__m512 value, float largest) {
    const __m512 up = _mm512_roundscale_ps(_mm512_add_ps(value, _mm512_set1_ps(0.5f)), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(up, _mm512_set1_ps(-largest)), _mm512_set1_ps(largest)));
}

struct Int8Kv {
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 127;
    static constexpr long bytes(long dim) { return dim; }
    static __m512i load(const uint8_t* row, long from, __mmask16 pairs) {
        const __m256i stored = _mm256_maskz_loadu_epi16(pairs, row + from);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(stored)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(stored, 1)));
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    static __m512 widen16(const uint8_t* row, long at) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(row + at))));
    }
    static void store(uint8_t* row, long at, __m512 value) {
        _mm_storeu_si128((__m128i*)(row + at), _mm512_cvtepi32_epi8(whole_lanes(value, kLargest)));
    }
};

struct Fp8Kv {
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 448;
    static constexpr long bytes(long dim) { return dim; }
    // For a normal number, the exponent's bias is raised from 7 to 127. The eight smaller numbers stand in a table.
    static __m512i load(const uint8_t* row, long from, __mmask16 pairs) {
        const __m512i stored = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi16(pairs, row + from));
        const __m512i size = _mm512_and_si512(stored, _mm512_set1_epi16(0x7F));
        const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
        const __m512i small = _mm512_castsi128_si512(_mm_set_epi16(0x3C60, 0x3C40, 0x3C20, 0x3C00, 0x3BC0, 0x3B80, 0x3B00, 0));
        const __mmask32 is_small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
        const __m512i found = _mm512_mask_permutexvar_epi16(normal, is_small, size, small);
        return _mm512_or_si512(found, _mm512_slli_epi16(_mm512_srli_epi16(stored, 7), 15));
    }
    static __m512 widen16(const uint8_t* row, long at) {
        const __m512i stored = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(row + at)));
        const __m512i size = _mm512_and_si512(stored, _mm512_set1_epi32(0x7F));
        const __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
        const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(size), _mm512_set1_ps(0x1p-9f));
        const __mmask16 is_small = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(8));
        const __m512i found = _mm512_mask_mov_epi32(normal, is_small, _mm512_castps_si512(small));
        return _mm512_castsi512_ps(_mm512_or_si512(found, _mm512_slli_epi32(_mm512_srli_epi32(stored, 7), 31)));
    }
    // Rounds to nearest, halves to even.
    static void store(uint8_t* row, long at, __m512 value) {
        const __m512 bounded = _mm512_min_ps(_mm512_max_ps(value, _mm512_set1_ps(-kLargest)), _mm512_set1_ps(kLargest));
        const __m512 size = _mm512_abs_ps(bounded);
        __m512i bits = _mm512_castps_si512(size);  // the last 20 of the 23 mantissa bits are dropped
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
        bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFFF)));
        const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(120 << 3));
        // Neighbours of 2^14 are 2^-9 apart, as the numbers below 2^-6 are.
        const __m512 raised = _mm512_add_ps(size, _mm512_set1_ps(0x1p14f));
        const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(raised), _mm512_set1_epi32(0x46800000));
        const __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
        const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(_mm512_castps_si512(bounded), 31), 7);
        const __m512i number = _mm512_or_si512(_mm512_mask_mov_epi32(normal, is_small, small), sign);
        _mm_storeu_si128((__m128i*)(row + at), _mm512_cvtepi32_epi8(number));
    }
};

struct Int4Kv {
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 7;
    static constexpr long bytes(long dim) { return dim / 2; }
    static __m512i load(const uint8_t* row, long from, __mmask16 pairs) {
        const __m512i byte = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(pairs, row + from / 2));
        const __m512i halves = _mm512_and_si512(_mm512_or_si512(byte, _mm512_slli_epi32(byte, 12)), _mm512_set1_epi32(0x000F000F));
        alignas(32) static const bf16 numbers[16] = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
                                                     0,      0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
        return _mm512_permutexvar_epi16(halves, _mm512_castsi256_si512(_mm256_load_si256((const __m256i*)numbers)));
    }
    static __m512 widen16(const uint8_t* row, long at) {
        const __m512i byte = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)(row + at / 2)));
        const __m512i halves = _mm512_and_si512(_mm512_or_si512(byte, _mm512_slli_epi64(byte, 28)), _mm512_set1_epi32(15));
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(halves, _mm512_set1_epi32(8)));
    }
    static void store(uint8_t* row, long at, __m512 value) {
        const __m512i halves = _mm512_add_epi32(whole_lanes(value, kLargest), _mm512_set1_epi32(8));
        _mm_storel_epi64((__m128i*)(row + at / 2), _mm512_cvtepi64_epi8(_mm512_or_si512(halves, _mm512_srli_epi64(halves, 28))));
    }
};

// Calls f<Format>() for a value of PdStep's kv_format. Returns false when there is no such format.
template <class Function>
inline bool with_format(int64_t format, const Function& f) {
    switch (format) {
        case 0: return f.template operator()<Bf16Kv>(), true;
        case 1: return f.template operator()<Fp32Kv>(), true;
        case 2: return f.template operator()<Int8Kv>(), true;
        case 3: return f.template operator()<Fp8Kv>(), true;
        case 4: return f.template operator()<Int4Kv>(), true;
    }
    return false;
}

// Writes `count` tokens of one head, [count, dim] float32 with `stride` between them, into a block from offset `first` on. `rows`
// and `scale_at` are those of the block and head. When the new tokens need a larger scale, the older tokens are rounded again;
// otherwise they stay as they are. A block without older tokens has no scale yet: the memory holds a former owner's value.
template <class Kv>
inline void quantise_head(const float* values, long stride, long first, long count, long dim, uint8_t* rows, float* scale_at) {
    __m512 highest = _mm512_setzero_ps();
    for (long i = 0; i < count; i++)
        for (long at = 0; at < dim; at += kLanes)
            highest = _mm512_max_ps(highest, _mm512_abs_ps(_mm512_loadu_ps(values + i * stride + at)));
    const float needed = _mm512_reduce_max_ps(highest) / Kv::kLargest, before = first > 0 ? *scale_at : 0.0f;
    const float scale = std::max(before, needed < kSmallestScale ? 0.0f : needed);
    const __m512 inverse = _mm512_set1_ps(scale > 0 ? 1.0f / scale : 0.0f), old = _mm512_set1_ps(before);
    if (scale > before)
        for (long i = 0; i < first; i++)
            for (long at = 0; at < dim; at += kLanes) {
                uint8_t* row = rows + i * Kv::bytes(dim);
                Kv::store(row, at, _mm512_mul_ps(_mm512_mul_ps(Kv::widen16(row, at), old), inverse));
            }
    for (long i = 0; i < count; i++)
        for (long at = 0; at < dim; at += kLanes)
            Kv::store(rows + (first + i) * Kv::bytes(dim), at, _mm512_mul_ps(_mm512_loadu_ps(values + i * stride + at), inverse));
    *scale_at = scale;
}

}  // namespace pdserve
