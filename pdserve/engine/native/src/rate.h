// The rate of the product instruction alone. Its operands stay in registers, so it waits for nothing: no product is faster.
#pragma once

#include "matmul.h"
#ifdef PDSERVE_AMX
#include "tile_products.h"
#endif

namespace pdserve {

#ifdef __AVX512F__
constexpr int kChains = 20;  // sums that do not wait for each other: two products begin in each clock, and take up to six
#else
constexpr int kChains = 5;  // each is a pair of registers
#endif

constexpr uint32_t kOnes = 0x3F803F80;  // two bfloat16: subnormal numbers would take longer

// Returns x in one register. The compiler takes it for other numbers, so it computes nothing of them before a loop.
inline I16 another(I16 x) {
#ifdef __AVX512F__
    asm("" : "+v"(x));
    return x;
#else
    asm("" : "+x"(x.low));
    return {x.low, x.low};
#endif
}

// Adds products to each of kChains sums, `rounds` times. Returns the operations: two for a product and its addition.
template <class Dot>
int64_t multiply_registers(int64_t rounds) {
    constexpr bool integers = !std::is_same_v<Dot, Bf16Dot>;
    alignas(64) uint32_t start[(kChains + 1) * kLanes];  // no two are equal: of equal chains the compiler computes one
    for (uint32_t i = 0; i < (kChains + 1) * kLanes; i++) start[i] = kOnes + i;
    typename Dot::Sum sum[kChains];
    for (int i = 0; i < kChains; i++)
        if constexpr (integers)
            sum[i] = load_words(start + i * kLanes);
        else
            sum[i] = as_floats(load_words(start + i * kLanes));
    I16 x = broadcast(int32_t(kOnes));
    const I16 w = load_words(start + kChains * kLanes);
    for (int64_t round = 0; round < rounds; round++) {
        PDSERVE_UNROLL(20)
        for (int i = 0; i < kChains; i++) {
            if constexpr (integers) x = another(x);
            sum[i] = Dot::add(sum[i], x, w);
        }
    }
    typename Dot::Sum found[kChains];  // another array, because what is in memory at the end would be there in the loop as well
    for (int i = 0; i < kChains; i++) found[i] = sum[i];
    asm volatile("" : : "r"(&found) : "memory");
    return rounds * kChains * kLanes * (integers ? 4 : 2) * 2;
}

#ifdef PDSERVE_AMX
// Does the same by tiles. Their numbers are those after a configuration, 0.
template <bool Bytes>
int64_t multiply_tile_registers(int64_t rounds) {
    const TileUse use;
    with_tiles([&]<class Tiles>() {
        Tiles::hold(kSide);
        for (int64_t round = 0; round < rounds; round++)
            each_tile<kRowTile>([&]<int Sum>() {
                if constexpr (Bytes)
                    Tiles::template add_bytes<Sum, kRowTile, kWeightTile>();
                else
                    Tiles::template add<Sum, kRowTile, kWeightTile>();
            });
    });
    return rounds * kRowTile * kSide * kSide * kSide * (Bytes ? 4 : 2) * 2;
}
#endif

}  // namespace pdserve
