// The vector layer: sixteen floats or integers at a time, as the instruction set that this file is compiled for computes them.
//
// Every set has the same sixteen lanes. What needs one register of 512 bits with AVX-512 is a pair of 256 bits with AVX2. All
// functions give the same bits on each set: the operations are those of IEEE, and their order is written out.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifdef __clang__
#define PDSERVE_UNROLL(n) _Pragma("unroll")
#else
#define PDSERVE_DO(x) _Pragma(#x)
#define PDSERVE_UNROLL(n) PDSERVE_DO(GCC unroll n)
#endif

namespace pdserve {

using bf16 = uint16_t;  // the upper half of a float

constexpr int kLanes = 16;

}  // namespace pdserve

#ifdef __AVX512F__
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif

namespace pdserve {

// Returns the lanes below `count`.
inline Mask first_lanes(long count) { return lanes_of(count >= kLanes ? 0xFFFF : (1u << count) - 1); }

inline bool any(Mask mask) { return bits_of(mask) != 0; }

// Combines the lanes of a vector in a fixed order: halves are combined until one lane is left.
template <class Combine>
inline float fold(F16 x, const Combine& combine) {
    const __m256 eight = combine(upper(x), lower(x));
    const __m128 four = combine(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = combine(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(combine(two, _mm_movehdup_ps(two)));
}

struct Add {
    F16 operator()(F16 a, F16 b) const { return a + b; }
    __m256 operator()(__m256 a, __m256 b) const { return _mm256_add_ps(a, b); }
    __m128 operator()(__m128 a, __m128 b) const { return _mm_add_ps(a, b); }
};

struct Max {
    F16 operator()(F16 a, F16 b) const { return max(a, b); }
    __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
    __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};

// While it lives, subnormal numbers are zero for its thread, as they always are for the dot product of bfloat16.
class Flush {
  public:
    Flush() { _mm_setcsr(before_ | 0x8040); }  // flush to zero, denormals are zero
    ~Flush() { _mm_setcsr(before_); }
    Flush(const Flush&) = delete;

  private:
    const unsigned before_ = _mm_getcsr();
};

inline float sum_lanes(F16 x) { return fold(x, Add()); }
inline float largest_lane(F16 x) { return fold(x, Max()); }

}  // namespace pdserve
