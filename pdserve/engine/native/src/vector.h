// Functions of sixteen floats at a time: bfloat16 in and out, and exponentials. A lane's result depends only on its argument.
#pragma once

#include "lanes.h"

namespace pdserve {

inline long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

inline F16 load_bf16(const bf16* from) { return widen(_mm256_loadu_si256((const __m256i*)from)); }

inline void store_bf16(bf16* to, F16 value) { _mm256_storeu_si256((__m256i*)to, narrow(value)); }
inline void store_bf16(bf16* to, F16 value, Mask lanes) { store_halves(to, narrow(value), lanes); }

// Returns the even and the odd bfloat16 of each word, as floats.
inline F16 even_halves(I16 words) { return as_floats(shift_left(words, 16)); }
inline F16 odd_halves(I16 words) { return as_floats(words & broadcast(int32_t(0xFFFF0000))); }

// Returns e^x to 2 units in the last place. It is exactly 1 at 0 and exactly 0 below -87, minus infinity included. It uses
// Cephes' polynomial of degree 6 around the nearest multiple of ln 2.
inline F16 exp_lanes(F16 x) {
    const Mask counts = at_least(x, broadcast(-87.0f));
    const F16 bounded = min(keep(counts, x), broadcast(88.0f));
    const F16 turns = round_even(bounded * broadcast(1.44269504089f));
    F16 rest = fnma(turns, broadcast(0.693359375f), bounded);
    rest = fnma(turns, broadcast(-2.12194440e-4f), rest);
    F16 sum = broadcast(1.9875691500e-4f);
    sum = fma(sum, rest, broadcast(1.3981999507e-3f));
    sum = fma(sum, rest, broadcast(8.3334519073e-3f));
    sum = fma(sum, rest, broadcast(4.1665795894e-2f));
    sum = fma(sum, rest, broadcast(1.6666665459e-1f));
    sum = fma(sum, rest, broadcast(5.0000001201e-1f));
    sum = fma(rest * rest, sum, rest + broadcast(1.0f));
    return raise(counts, sum, turns);
}

// Returns e^x to 3e-6 in half the instructions, for results that are rounded to bfloat16 (4e-3) at once. 2^f is a polynomial of
// degree 4 for f within a half, with the least greatest error.
inline F16 exp_coarse(F16 x) {
    const Mask counts = at_least(x, broadcast(-87.0f));
    const F16 power = x * broadcast(1.44269504089f);
    const F16 turns = round_even(power);
    const F16 rest = power - turns;
    F16 sum = broadcast(0.009582849219f);
    sum = fma(sum, rest, broadcast(0.055906426162f));
    sum = fma(sum, rest, broadcast(0.240240991116f));
    sum = fma(sum, rest, broadcast(0.693124175072f));
    sum = fma(sum, rest, broadcast(1.0f));
    return raise(counts, sum, turns);
}

inline F16 silu(F16 x) {
    const F16 one = broadcast(1.0f);
    const F16 power = exp_lanes(zeros() - x);
    return x / (one + power);
}

// Returns x / 2 * (1 + tanh(u)) for u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + e^(-2u)).
inline F16 gelu_tanh(F16 x) {
    const F16 one = broadcast(1.0f), squared = x * x;
    const F16 inner = fma(squared, broadcast(0.044715f), one);
    const F16 power = exp_lanes(x * broadcast(-1.5957691216f) * inner);
    return x / (one + power);
}

// Returns bound * tanh(x / bound). What is not a number stays so.
inline F16 capped(F16 x, F16 bound) {
    const F16 one = broadcast(1.0f);
    const F16 power = exp_lanes(absolute(x) / bound * broadcast(-2.0f));
    const F16 size = (one - power) / (one + power) * bound;
    const I16 sign = as_ints(x) & broadcast(int32_t(0x80000000));
    return select(no_number(x), x, as_floats(as_ints(size) | sign));
}

}  // namespace pdserve
