// The vector layer with AVX2 and FMA: two registers of 256 bits for sixteen lanes. See lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pdserve {

struct F16 {
    __m256 low, high;
    friend F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
    friend F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
    friend F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
    friend F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
};

struct I16 {
    __m256i low, high;
    friend I16 operator+(I16 a, I16 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
    friend I16 operator-(I16 a, I16 b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
    friend I16 operator&(I16 a, I16 b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
    friend I16 operator|(I16 a, I16 b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
};

struct Mask {  // all bits of a lane, or none
    __m256i low, high;
    Mask operator&(Mask other) const { return {_mm256_and_si256(low, other.low), _mm256_and_si256(high, other.high)}; }
    Mask operator|(Mask other) const { return {_mm256_or_si256(low, other.low), _mm256_or_si256(high, other.high)}; }
    Mask operator~() const {
        const __m256i every = _mm256_set1_epi32(-1);
        return {_mm256_xor_si256(low, every), _mm256_xor_si256(high, every)};
    }
};

inline Mask lanes_of(uint32_t bits) {
    const __m256i spread = _mm256_set1_epi32(int(bits));
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    return {_mm256_cmpeq_epi32(_mm256_and_si256(spread, low), low), _mm256_cmpeq_epi32(_mm256_and_si256(spread, high), high)};
}
inline uint32_t bits_of(Mask mask) {
    return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(mask.low))) | uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(mask.high))) << 8;
}

inline F16 zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I16 broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline F16 load(const float* from, Mask mask) { return {_mm256_maskload_ps(from, mask.low), _mm256_maskload_ps(from + 8, mask.high)}; }
inline void store(float* to, F16 x) { _mm256_storeu_ps(to, x.low), _mm256_storeu_ps(to + 8, x.high); }
inline void store(float* to, F16 x, Mask mask) {
    _mm256_maskstore_ps(to, mask.low, x.low), _mm256_maskstore_ps(to + 8, mask.high, x.high);
}

inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline F16 fnma(F16 a, F16 b, F16 c) { return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F16 absolute(F16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
template <int How>
inline F16 rounded(F16 x) {
    return {_mm256_round_ps(x.low, How), _mm256_round_ps(x.high, How)};
}
inline F16 round_even(F16 x) { return rounded<_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC>(x); }
inline F16 round_down(F16 x) { return rounded<_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC>(x); }

template <int How>
inline Mask compared(F16 a, F16 b) {
    return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, How)), _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, How))};
}
inline Mask less(F16 a, F16 b) { return compared<_CMP_LT_OQ>(a, b); }
inline Mask greater(F16 a, F16 b) { return compared<_CMP_GT_OQ>(a, b); }
inline Mask at_least(F16 a, F16 b) { return compared<_CMP_GE_OQ>(a, b); }
inline Mask equal(F16 a, F16 b) { return compared<_CMP_EQ_OQ>(a, b); }
inline Mask no_number(F16 x) { return compared<_CMP_UNORD_Q>(x, x); }
inline F16 select(Mask mask, F16 yes, F16 no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(mask.low)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(mask.high))};
}
inline I16 select(Mask mask, I16 yes, I16 no) {
    return {_mm256_blendv_epi8(no.low, yes.low, mask.low), _mm256_blendv_epi8(no.high, yes.high, mask.high)};
}
inline F16 keep(Mask mask, F16 x) {
    return {_mm256_and_ps(x.low, _mm256_castsi256_ps(mask.low)), _mm256_and_ps(x.high, _mm256_castsi256_ps(mask.high))};
}
inline F16 load(const float* from, Mask mask, F16 other) { return select(mask, load(from, mask), other); }

inline I16 to_ints(F16 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline F16 to_floats(I16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline I16 as_ints(F16 x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline F16 as_floats(I16 x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline I16 shift_right(I16 x, int by) { return {_mm256_srli_epi32(x.low, by), _mm256_srli_epi32(x.high, by)}; }
inline I16 shift_left(I16 x, int by) { return {_mm256_slli_epi32(x.low, by), _mm256_slli_epi32(x.high, by)}; }

// The power is built in the exponent's bits, in two steps: 2^-126 / 2 is subnormal, and x may be below 1.
inline F16 raise(Mask mask, F16 x, F16 turns) {
    const I16 whole = to_ints(turns), half = {_mm256_srai_epi32(whole.low, 1), _mm256_srai_epi32(whole.high, 1)};
    const auto power = [](I16 exponent) { return as_floats(shift_left(exponent + broadcast(127), 23)); };
    return keep(mask, x * power(half) * power(whole - half));
}

inline __m256 lower(F16 x) { return x.low; }
inline __m256 upper(F16 x) { return x.high; }
inline float first(F16 x) { return _mm256_cvtss_f32(x.low); }

inline F16 widen(__m256i halves) {
    return as_floats(shift_left(I16{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(halves)),
                                    _mm256_cvtepu16_epi32(_mm256_extracti128_si256(halves, 1))}, 16));
}

inline __m256i narrow(F16 x) {
    const I16 bits = as_ints(x), zero = bits & broadcast(int32_t(0x80000000));
    const I16 sum = bits + (shift_right(bits, 16) & broadcast(1)) + broadcast(0x7FFF);
    const Mask tiny = less(absolute(x), broadcast(0x1p-126f));
    const I16 found = select(no_number(x), bits | broadcast(0x00400000), select(tiny, zero, sum));
    const I16 halves = shift_right(found, 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(halves.low, halves.high), 0xD8);
}

// The mask is one of first lanes.
inline void store_halves(bf16* to, __m256i halves, Mask mask) {
    const uint32_t bits = bits_of(mask);
    if (bits == 0xFFFF) return _mm256_storeu_si256((__m256i*)to, halves);
    alignas(32) bf16 spare[16];
    _mm256_store_si256((__m256i*)spare, halves);
    std::memcpy(to, spare, 2 * __builtin_popcount(bits));
}

inline I16 widen_bytes(__m128i bytes) { return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))}; }
inline I16 widen_signed_bytes(__m128i bytes) { return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))}; }
inline __m128i low_bytes(I16 x) {
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i low = _mm256_shuffle_epi8(x.low, pick), high = _mm256_shuffle_epi8(x.high, pick);
    const __m128i first = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    return _mm_unpacklo_epi64(first, _mm_unpacklo_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

struct DoubleSum {
    __m256d part[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    void add(F16 x) {
        part[0] = _mm256_add_pd(part[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.low)));
        part[1] = _mm256_add_pd(part[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.low, 1)));
        part[2] = _mm256_add_pd(part[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.high)));
        part[3] = _mm256_add_pd(part[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.high, 1)));
    }
    double total() const {
        alignas(32) double each[4];
        _mm256_store_pd(each, _mm256_add_pd(_mm256_add_pd(part[0], part[1]), _mm256_add_pd(part[2], part[3])));
        return (each[0] + each[1]) + (each[2] + each[3]);
    }
};

template <class Combine>
inline F16 fold_rows(const F16 (&x)[16], const Combine& combine) {
    F16 four[4];  // of vectors i, i + 4, i + 8 and i + 12: four lanes each
    for (int i = 0; i < 4; i++) {
        const F16 even = combine(F16{x[i].high, x[i + 8].high}, F16{x[i].low, x[i + 8].low});
        const F16 odd = combine(F16{x[i + 4].high, x[i + 12].high}, F16{x[i + 4].low, x[i + 12].low});
        four[i] = combine(F16{_mm256_permute2f128_ps(even.low, odd.low, 0x31), _mm256_permute2f128_ps(even.high, odd.high, 0x31)},
                          F16{_mm256_permute2f128_ps(even.low, odd.low, 0x20), _mm256_permute2f128_ps(even.high, odd.high, 0x20)});
    }
    const auto pairs = [](F16 a, F16 b, auto unpack) {
        const auto of = [&](__m256 x, __m256 y) { return _mm256_castpd_ps(unpack(_mm256_castps_pd(x), _mm256_castps_pd(y))); };
        return F16{of(a.low, b.low), of(a.high, b.high)};
    };
    F16 two[2];
    for (int i = 0; i < 2; i++)
        two[i] = combine(pairs(four[2 * i], four[2 * i + 1], [](__m256d a, __m256d b) { return _mm256_unpacklo_pd(a, b); }),
                         pairs(four[2 * i], four[2 * i + 1], [](__m256d a, __m256d b) { return _mm256_unpackhi_pd(a, b); }));
    return combine(F16{_mm256_shuffle_ps(two[0].low, two[1].low, 0x88), _mm256_shuffle_ps(two[0].high, two[1].high, 0x88)},
                   F16{_mm256_shuffle_ps(two[0].low, two[1].low, 0xDD), _mm256_shuffle_ps(two[0].high, two[1].high, 0xDD)});
}

inline I16 load_words(const void* from) {
    return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
}
inline I16 load_words(const void* from, Mask mask) {
    return {_mm256_maskload_epi32((const int*)from, mask.low), _mm256_maskload_epi32((const int*)from + 8, mask.high)};
}
inline void store_words(void* to, I16 x) {
    _mm256_storeu_si256((__m256i*)to, x.low), _mm256_storeu_si256((__m256i*)to + 1, x.high);
}
inline int32_t sum_lanes(I16 x) {
    alignas(32) int32_t each[8];
    _mm256_store_si256((__m256i*)each, _mm256_add_epi32(x.low, x.high));
    int32_t sum = 0;
    for (const int32_t one : each) sum += one;
    return sum;
}
inline I16 narrow_pairs(F16 low, F16 high) { return {narrow(low), narrow(high)}; }
inline I16 widen_to_halves(__m128i low, __m128i high) { return {_mm256_cvtepu8_epi16(low), _mm256_cvtepu8_epi16(high)}; }
inline I16 shift_right_halves(I16 x, int by) { return {_mm256_srli_epi16(x.low, by), _mm256_srli_epi16(x.high, by)}; }

class Table {
  public:
    explicit Table(const bf16 (&values)[16]) {
        alignas(16) uint8_t lower[16], upper[16];
        for (int i = 0; i < 16; i++) lower[i] = uint8_t(values[i]), upper[i] = uint8_t(values[i] >> 8);
        lower_ = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)lower));
        upper_ = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)upper));
    }
    I16 operator[](I16 indices) const { return {found(indices.low), found(indices.high)}; }

  private:
    __m256i found(__m256i indices) const {
        const __m256i small = _mm256_and_si256(indices, _mm256_set1_epi16(15));
        const __m256i both = _mm256_or_si256(small, _mm256_slli_epi16(small, 8));
        return _mm256_blendv_epi8(_mm256_shuffle_epi8(lower_, both), _mm256_shuffle_epi8(upper_, both), _mm256_set1_epi16(int16_t(0xFF00)));
    }
    __m256i lower_, upper_;
};

inline void transpose8(__m256i (&r)[8]) {
    __m256i t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

inline void transpose(I16 (&rows)[16]) {
    __m256i a[8], b[8], c[8], d[8];
    for (int i = 0; i < 8; i++) a[i] = rows[i].low, b[i] = rows[i].high, c[i] = rows[i + 8].low, d[i] = rows[i + 8].high;
    transpose8(a), transpose8(b), transpose8(c), transpose8(d);
    for (int i = 0; i < 8; i++) rows[i] = {a[i], c[i]}, rows[i + 8] = {b[i], d[i]};
}

inline void interleave(I16 a, I16 b, I16& low, I16& high) {
    const auto woven = [](__m256i x, __m256i y) {
        const __m256i even = _mm256_unpacklo_epi16(x, y), odd = _mm256_unpackhi_epi16(x, y);
        return I16{_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31)};
    };
    low = woven(a.low, b.low), high = woven(a.high, b.high);
}

}  // namespace pdserve
