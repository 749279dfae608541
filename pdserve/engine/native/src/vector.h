// Functions of sixteen floats at a time: bfloat16 in and out, and exponentials whose result depends only on the argument.
#pragma once

#include <immintrin.h>

#include <cstdint>

#ifdef __clang__
#define PDSERVE_UNROLL(n) _Pragma("unroll")
#else
#define PDSERVE_DO(x) _Pragma(#x)
#define PDSERVE_UNROLL(n) PDSERVE_DO(GCC unroll n)
#endif

namespace pdserve {

using bf16 = uint16_t;  // the upper half of a float

constexpr int kLanes = 16;

inline long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

inline __mmask16 first_lanes(long count) { return count >= kLanes ? 0xFFFF : __mmask16((1u << count) - 1); }

inline __m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 load_bf16(const bf16* from) { return widen(_mm256_loadu_si256((const __m256i*)from)); }

inline void store_bf16(bf16* to, __m512 value, __mmask16 lanes = 0xFFFF) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(value));
}

// Returns the sum of all lanes in a fixed order, which the compiler's own reduction does not promise: halves are added until one
// lane is left.
inline float sum_lanes(__m512 x) {
    const __m256 eight = _mm256_add_ps(_mm512_extractf32x8_ps(x, 1), _mm512_castps512_ps256(x));
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Combines the lanes of each of sixteen vectors, and returns the result of vector i in lane i. The order is that of `sum_lanes`.
template <class Combine>
inline __m512 fold_rows(const __m512 (&x)[kLanes], const Combine& combine) {
    __m512 four[4];  // of vectors i, i + 4, i + 8 and i + 12: four lanes each
    for (int i = 0; i < 4; i++) {
        const __m512 low = combine(_mm512_shuffle_f32x4(x[i], x[i + 4], 0xEE), _mm512_shuffle_f32x4(x[i], x[i + 4], 0x44));
        const __m512 high = combine(_mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xEE), _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x44));
        four[i] = combine(_mm512_shuffle_f32x4(low, high, 0xDD), _mm512_shuffle_f32x4(low, high, 0x88));
    }
    __m512 two[2];
    for (int i = 0; i < 2; i++) {
        const __m512d even = _mm512_castps_pd(four[2 * i]), odd = _mm512_castps_pd(four[2 * i + 1]);
        two[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)), _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
    return combine(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xDD));
}

// Returns e^x to 2 units in the last place. It is exactly 1 at 0 and exactly 0 below -87, minus infinity included. It uses
// Cephes' polynomial of degree 6 around the nearest multiple of ln 2.
inline __m512 exp_lanes(__m512 x) {
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    const __m512 bounded = _mm512_min_ps(_mm512_maskz_mov_ps(counts, x), _mm512_set1_ps(88.0f));
    const __m512 turns = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504089f)), 0);
    __m512 rest = _mm512_fnmadd_ps(turns, _mm512_set1_ps(0.693359375f), bounded);
    rest = _mm512_fnmadd_ps(turns, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3981999507e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.3334519073e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.1665795894e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.6666665459e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.0000001201e-1f));
    sum = _mm512_fmadd_ps(_mm512_mul_ps(rest, rest), sum, _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(counts, sum, turns);
}

// Returns e^x to 3e-6 in half the instructions, for results that are rounded to bfloat16 (4e-3) at once. 2^f is a polynomial of
// degree 4 for f within a half, with the least greatest error.
inline __m512 exp_coarse(__m512 x) {
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504089f));
    const __m512 turns = _mm512_roundscale_ps(power, 0);
    const __m512 rest = _mm512_sub_ps(power, turns);
    __m512 sum = _mm512_set1_ps(0.009582849219f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.055906426162f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.240240991116f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.693124175072f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(counts, sum, turns);
}

inline __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 power = exp_lanes(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(one, power));
}

// Returns x / 2 * (1 + tanh(u)) for u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + e^(-2u)).
inline __m512 gelu_tanh(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), squared = _mm512_mul_ps(x, x);
    const __m512 inner = _mm512_fmadd_ps(squared, _mm512_set1_ps(0.044715f), one);
    const __m512 power = exp_lanes(_mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.5957691216f)), inner));
    return _mm512_div_ps(x, _mm512_add_ps(one, power));
}

// Returns bound * tanh(x / bound). What is not a number stays so.
inline __m512 capped(__m512 x, __m512 bound) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 power = exp_lanes(_mm512_mul_ps(_mm512_div_ps(_mm512_abs_ps(x), bound), _mm512_set1_ps(-2.0f)));
    const __m512 size = _mm512_mul_ps(_mm512_div_ps(_mm512_sub_ps(one, power), _mm512_add_ps(one, power)), bound);
    const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
    return _mm512_mask_mov_ps(_mm512_or_ps(size, sign), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

}  // namespace pdserve
