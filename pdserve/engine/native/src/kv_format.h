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

// True if pairs of the last sixteen of 32 dimensions are among the lanes.
inline bool has_upper(Mask pairs) { return bits_of(pairs) >> 8 != 0; }

// Every format has three functions. `bytes` gives the bytes of one token of a head. `load` returns 32 dimensions from `from` on
// as bfloat16; those outside `pairs` are any finite numbers. `store` writes sixteen dimensions. Quantised formats also have
// `widen16`, the inverse of `store`.

struct Bf16Kv {
    static constexpr bool kScaled = false;
    static constexpr long bytes(long dim) { return dim * 2; }
    static I16 load(const uint8_t* row, long from, Mask pairs) { return load_words(row + from * 2, pairs); }
    static void store(uint8_t* row, long at, F16 value) { store_bf16((bf16*)row + at, value); }
};

struct Fp32Kv {
    static constexpr bool kScaled = false;
    static constexpr long bytes(long dim) { return dim * 4; }
    static I16 load(const uint8_t* row, long from, Mask pairs) {
        const float* at = (const float*)row + from;
        const F16 low = pdserve::load(at);  // a head is a whole number of vectors
        const F16 high = has_upper(pairs) ? pdserve::load(at + kLanes) : zeros();
        return narrow_pairs(low, high);
    }
    static void store(uint8_t* row, long at, F16 value) { pdserve::store((float*)row + at, value); }
};

// Rounds to the nearest whole number, halves upwards, within [-largest, largest].
inline I16 whole_lanes(F16 value, float largest) {
    const F16 up = round_down(value + broadcast(0.5f));
    return to_ints(min(max(up, broadcast(-largest)), broadcast(largest)));
}

struct Int8Kv {
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 127;
    static constexpr long bytes(long dim) { return dim; }
    static I16 load(const uint8_t* row, long from, Mask pairs) {
        return narrow_pairs(widen16(row, from), has_upper(pairs) ? widen16(row, from + kLanes) : zeros());
    }
    static F16 widen16(const uint8_t* row, long at) {
        return to_floats(widen_signed_bytes(_mm_loadu_si128((const __m128i*)(row + at))));
    }
    static void store(uint8_t* row, long at, F16 value) {
        _mm_storeu_si128((__m128i*)(row + at), low_bytes(whole_lanes(value, kLargest)));
    }
};

struct Fp8Kv {
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 448;
    static constexpr long bytes(long dim) { return dim; }
    // For a normal number, the exponent's bias is raised from 7 to 127. The eight smaller numbers stand in a table.
    static I16 load(const uint8_t* row, long from, Mask pairs) {
        static const Table small({0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60});
        const __m128i* bytes = (const __m128i*)(row + from);
        const I16 stored = widen_to_halves(_mm_loadu_si128(bytes), has_upper(pairs) ? _mm_loadu_si128(bytes + 1) : _mm_setzero_si128());
        const I16 size = stored & broadcast(0x007F007F);
        const I16 normal = shift_left(size, 4) + broadcast(0x3C003C00);
        const I16 above = shift_right(size + broadcast(0x00780078), 7) & broadcast(0x00010001);  // 1 from 8 on
        const I16 chosen = shift_left(above, 16) - above;  // all bits of a half where `above` has a 1
        return (normal & chosen) | (small[size] - (small[size] & chosen)) | shift_left(stored & broadcast(0x00800080), 8);
    }
    static F16 widen16(const uint8_t* row, long at) {
        const I16 stored = widen_bytes(_mm_loadu_si128((const __m128i*)(row + at)));
        const I16 size = stored & broadcast(0x7F);
        const I16 normal = shift_left(size, 20) + broadcast(120 << 23);
        const F16 small = to_floats(size) * broadcast(0x1p-9f);
        const Mask is_small = less(to_floats(size), broadcast(8.0f));
        const I16 found = select(is_small, as_ints(small), normal);
        return as_floats(found | shift_left(shift_right(stored, 7), 31));
    }
    // Rounds to nearest, halves to even.
    static void store(uint8_t* row, long at, F16 value) {
        const F16 bounded = min(max(value, broadcast(-kLargest)), broadcast(kLargest));
        const F16 size = absolute(bounded);
        I16 bits = as_ints(size);  // the last 20 of the 23 mantissa bits are dropped
        const I16 odd = shift_right(bits, 20) & broadcast(1);
        bits = bits + (odd + broadcast(0x7FFFF));
        const I16 normal = shift_right(bits, 20) - broadcast(120 << 3);
        // Neighbours of 2^14 are 2^-9 apart, as the numbers below 2^-6 are.
        const F16 raised = size + broadcast(0x1p14f);
        const I16 small = as_ints(raised) - broadcast(0x46800000);
        const Mask is_small = less(size, broadcast(0x1p-6f));
        const I16 sign = shift_left(shift_right(as_ints(bounded), 31), 7);
        const I16 number = select(is_small, small, normal) | sign;
        _mm_storeu_si128((__m128i*)(row + at), low_bytes(number));
    }
};

struct Int4Kv {
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 7;
    static constexpr long bytes(long dim) { return dim / 2; }
    static I16 load(const uint8_t* row, long from, Mask pairs) {
        static const Table numbers({0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
                                    0,      0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0});
        const __m128i* bytes = (const __m128i*)(row + from / 2);
        const I16 byte = widen_bytes(has_upper(pairs) ? _mm_loadu_si128(bytes) : _mm_loadl_epi64(bytes));
        return numbers[(byte | shift_left(byte, 12)) & broadcast(0x000F000F)];
    }
    static F16 widen16(const uint8_t* row, long at) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i*)(row + at / 2)), last = _mm_set1_epi8(15);
        const __m128i even = _mm_and_si128(bytes, last), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), last);
        return to_floats(widen_bytes(_mm_unpacklo_epi8(even, odd)) - broadcast(8));
    }
    static void store(uint8_t* row, long at, F16 value) {
        const __m128i numbers = low_bytes(whole_lanes(value, kLargest) + broadcast(8));
        const __m128i pairs = _mm_maddubs_epi16(numbers, _mm_set1_epi16(0x1001));  // even + 16 * odd
        _mm_storel_epi64((__m128i*)(row + at / 2), _mm_packus_epi16(pairs, pairs));
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
// The scale is NaN from the first number on that is not finite, since no stored number could tell.
template <class Kv>
inline void quantise_head(const float* values, long stride, long first, long count, long dim, uint8_t* rows, float* scale_at) {
    F16 highest = zeros(), check = zeros();
    for (long i = 0; i < count; i++)
        for (long at = 0; at < dim; at += kLanes) {
            const F16 value = pdserve::load(values + i * stride + at);
            highest = max(highest, absolute(value));
            check = fma(value, zeros(), check);
        }
    const float needed = largest_lane(highest) / Kv::kLargest, before = first > 0 ? *scale_at : 0.0f;
    const float scale = std::max(before, needed < kSmallestScale ? 0.0f : needed);
    const F16 inverse = broadcast(scale > 0 ? 1.0f / scale : 0.0f), old = broadcast(before);
    if (scale > before)
        for (long i = 0; i < first; i++)
            for (long at = 0; at < dim; at += kLanes) {
                uint8_t* row = rows + i * Kv::bytes(dim);
                Kv::store(row, at, Kv::widen16(row, at) * old * inverse);
            }
    for (long i = 0; i < count; i++)
        for (long at = 0; at < dim; at += kLanes)
            Kv::store(rows + (first + i) * Kv::bytes(dim), at, pdserve::load(values + i * stride + at) * inverse);
    *scale_at = scale + sum_lanes(check);
}

}  // namespace pdserve
