// The vector layer with AVX-512. See lanes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pdserve {

using F16 = __m512;  // + - * / are those of IEEE
typedef int32_t I16 __attribute__((vector_size(64), aligned(64)));  // + - & | << >> are of lanes

struct Mask {
    __mmask16 lanes;
    Mask operator&(Mask other) const { return {__mmask16(lanes & other.lanes)}; }
    Mask operator|(Mask other) const { return {__mmask16(lanes | other.lanes)}; }
    Mask operator~() const { return {__mmask16(~lanes)}; }
};

inline Mask lanes_of(uint32_t bits) { return {__mmask16(bits)}; }
inline uint32_t bits_of(Mask mask) { return mask.lanes; }

inline F16 zeros() { return _mm512_setzero_ps(); }
inline F16 broadcast(float x) { return _mm512_set1_ps(x); }
inline I16 broadcast(int32_t x) { return (I16)_mm512_set1_epi32(x); }
inline F16 load(const float* from) { return _mm512_loadu_ps(from); }
inline F16 load(const float* from, Mask mask) { return _mm512_maskz_loadu_ps(mask.lanes, from); }
inline F16 load(const float* from, Mask mask, F16 other) { return _mm512_mask_loadu_ps(other, mask.lanes, from); }
inline void store(float* to, F16 x) { _mm512_storeu_ps(to, x); }
inline void store(float* to, F16 x, Mask mask) { _mm512_mask_storeu_ps(to, mask.lanes, x); }

inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c, rounded once
inline F16 fnma(F16 a, F16 b, F16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b, rounded once
inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }  // b if one is no number
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }  // b if one is no number
inline F16 absolute(F16 x) { return _mm512_abs_ps(x); }
inline F16 round_even(F16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F16 round_down(F16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

inline Mask less(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)}; }
inline Mask greater(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)}; }
inline Mask at_least(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ)}; }
inline Mask equal(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ)}; }
inline Mask no_number(F16 x) { return {_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q)}; }
inline F16 select(Mask mask, F16 yes, F16 no) { return _mm512_mask_mov_ps(no, mask.lanes, yes); }
inline I16 select(Mask mask, I16 yes, I16 no) { return (I16)_mm512_mask_mov_epi32((__m512i)no, mask.lanes, (__m512i)yes); }
inline F16 keep(Mask mask, F16 x) { return _mm512_maskz_mov_ps(mask.lanes, x); }  // 0 in the other lanes

// Returns x * 2^turns, and 0 outside of the mask. turns: whole numbers from -126 to 127.
inline F16 raise(Mask mask, F16 x, F16 turns) { return _mm512_maskz_scalef_ps(mask.lanes, x, turns); }

inline I16 to_ints(F16 x) { return (I16)_mm512_cvtps_epi32(x); }  // to nearest, halves to even
inline F16 to_floats(I16 x) { return _mm512_cvtepi32_ps((__m512i)x); }
inline I16 as_ints(F16 x) { return (I16)_mm512_castps_si512(x); }
inline F16 as_floats(I16 x) { return _mm512_castsi512_ps((__m512i)x); }
inline I16 shift_right(I16 x, int by) { return (I16)_mm512_srli_epi32((__m512i)x, by); }  // zeros come from the left
inline I16 shift_left(I16 x, int by) { return (I16)_mm512_slli_epi32((__m512i)x, by); }

inline __m256 lower(F16 x) { return _mm512_castps512_ps256(x); }
inline __m256 upper(F16 x) { return _mm512_extractf32x8_ps(x, 1); }
inline float first(F16 x) { return _mm512_cvtss_f32(x); }

inline F16 widen(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }

// Rounds to bfloat16: to nearest, halves to even; a subnormal number becomes 0.
inline __m256i narrow(F16 x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x), sign = _mm512_and_si512(bits, _mm512_set1_epi32(int(0x80000000)));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    sum = _mm512_mask_mov_epi32(sum, _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7F800000)), sign);
    sum = _mm512_mask_or_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
#endif
}

inline void store_halves(bf16* to, __m256i halves, Mask mask) { _mm256_mask_storeu_epi16(to, mask.lanes, halves); }

inline I16 widen_bytes(__m128i bytes) { return (I16)_mm512_cvtepu8_epi32(bytes); }
inline I16 widen_signed_bytes(__m128i bytes) { return (I16)_mm512_cvtepi8_epi32(bytes); }
inline __m128i low_bytes(I16 x) { return _mm512_cvtepi32_epi8((__m512i)x); }  // the lowest byte of each lane

// A sum of float32 numbers in float64.
struct DoubleSum {
    __m512d even = _mm512_setzero_pd(), odd = _mm512_setzero_pd();
    void add(F16 x) {
        even = _mm512_add_pd(even, _mm512_cvtps_pd(lower(x)));
        odd = _mm512_add_pd(odd, _mm512_cvtps_pd(upper(x)));
    }
    double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(even, odd)); }
};

// Combines the lanes of each of sixteen vectors, and returns the result of vector i in lane i. The order is that of `fold`.
template <class Combine>
inline F16 fold_rows(const F16 (&x)[16], const Combine& combine) {
    F16 four[4];  // of vectors i, i + 4, i + 8 and i + 12: four lanes each
    for (int i = 0; i < 4; i++) {
        const F16 low = combine(_mm512_shuffle_f32x4(x[i], x[i + 4], 0xEE), _mm512_shuffle_f32x4(x[i], x[i + 4], 0x44));
        const F16 high = combine(_mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xEE), _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x44));
        four[i] = combine(_mm512_shuffle_f32x4(low, high, 0xDD), _mm512_shuffle_f32x4(low, high, 0x88));
    }
    F16 two[2];
    for (int i = 0; i < 2; i++) {
        const __m512d even = _mm512_castps_pd(four[2 * i]), odd = _mm512_castps_pd(four[2 * i + 1]);
        two[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)), _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
    return combine(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xDD));
}

// Words of two bfloat16 or four bytes.

inline I16 load_words(const void* from) { return (I16)_mm512_loadu_si512(from); }
inline I16 load_words(const void* from, Mask mask) { return (I16)_mm512_maskz_loadu_epi32(mask.lanes, from); }
inline void store_words(void* to, I16 x) { _mm512_storeu_si512(to, (__m512i)x); }
inline int32_t sum_lanes(I16 x) { return _mm512_reduce_add_epi32((__m512i)x); }

// Rounds 32 numbers to bfloat16, the first sixteen in `low`.
inline I16 narrow_pairs(F16 low, F16 high) {
#ifdef __AVX512BF16__
    return (I16)_mm512_cvtne2ps_pbh(high, low);
#else
    return (I16)_mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
#endif
}

// Widens 32 bytes to 16 bits each.
inline I16 widen_to_halves(__m128i low, __m128i high) {
    return (I16)_mm512_cvtepu8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
inline I16 shift_right_halves(I16 x, int by) { return (I16)_mm512_srli_epi16((__m512i)x, by); }

// Sixteen numbers of 16 bits, by the last four bits of an index of 16 bits.
class Table {
  public:
    explicit Table(const bf16 (&values)[16]) {
        const __m512i once = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)values));
        table_ = _mm512_shuffle_i64x2(once, once, 0x44);  // twice, so that the fifth bit of an index does not matter
    }
    I16 operator[](I16 indices) const { return (I16)_mm512_permutexvar_epi16((__m512i)indices, table_); }

  private:
    __m512i table_;
};

// Transposes a matrix of 16 x 16 words.
[[gnu::always_inline]] inline void transpose(I16 (&rows)[16]) {  // a call would pass all of them through memory
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = (__m512i)rows[i];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = (I16)_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = (I16)_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        rows[i + 4] = (I16)_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        rows[i + 12] = (I16)_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// Makes words of the halves of the same number: those of a first. low: of the first sixteen halves.
inline void interleave(I16 a, I16 b, I16& low, I16& high) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                           39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    low = (I16)_mm512_permutex2var_epi16((__m512i)a, first, (__m512i)b);
    high = (I16)_mm512_permutex2var_epi16((__m512i)a, _mm512_add_epi16(first, _mm512_set1_epi16(16)), (__m512i)b);
}

}  // namespace pdserve
