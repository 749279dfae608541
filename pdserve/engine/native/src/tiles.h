// Tile registers, as AMX has them: eight matrices of at most 16 rows of 64 bytes. `HardwareTiles` are those of the CPU.
// `EmulatedTiles` give the same bits on any CPU with AVX-512, so that whatever is computed by tiles can be tested everywhere.
//
// Registers 0 to 3 hold sums, 4 and 5 rows of x, and 6 and 7 weights. A product multiplies sixteen words of each row of x with
// sixteen words of sixteen columns. Numbers of registers are known to the compiler.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "vector.h"

namespace pdserve {

constexpr int kSide = 16;         // rows of a tile; also its columns, and words of k
constexpr int kRowTile = 4, kWeightTile = 6;  // the first register for rows of x, and for weights
constexpr long kTileBytes = 64;   // of a row of a tile

class HardwareTiles {
  public:
    // Makes the registers for sums and rows of x hold `rows` rows. It takes some 50 ns if the number differs from the last one.
    static void hold(int rows) {
        if (rows == held_) return;
        Configuration wanted;
        for (int i = 0; i < 8; i++) wanted.row_bytes[i] = kTileBytes, wanted.rows[i] = uint8_t(i < kWeightTile ? rows : kSide);
        asm volatile("ldtilecfg %0" : : "m"(wanted));  // gcc 12's intrinsic does not tell the compiler that it reads memory
        held_ = rows;
    }

    // Forgets what this thread's registers hold: other libraries release the registers when they have used them.
    static void forget() { held_ = 0; }

    static void release() {
        if (held_ != 0) asm volatile("tilerelease");
        held_ = 0;
    }

    template <int T>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(T));
    }

    // Loads rows that are `stride` bytes apart.
    template <int T>
    static void load(const void* from, long stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
    }

    template <int T>
    static void store(void* to, long stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
    }

    // Adds products of bfloat16.
    template <int Sum, int X, int W>
    static void add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
    }

    // Adds products of 8-bit integers, x signed, w unsigned.
    template <int Sum, int X, int W>
    static void add_bytes() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
    }

  private:
    struct alignas(64) Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    static inline thread_local int held_ = 0;  // rows; 0 when it is not known
};

// The semantics were compared with those of a CPU in 200 cases; see tests/engine/native/test_native_tiles.py. Sums of bfloat16
// need subnormal numbers to be zero (`Flush`), as the CPU's tiles take them whatever is set.
class EmulatedTiles {
  public:
    static void hold(int rows) { file().rows = rows; }
    static void forget() {}
    static void release() {}

    template <int T>
    static void zero() {
        std::memset(file().tile[T], 0, sizeof file().tile[T]);
    }

    template <int T>
    static void load(const void* from, long stride) {
        for (int row = 0; row < rows_of(T); row++) std::memcpy(at(T, row), (const char*)from + row * stride, kTileBytes);
    }

    template <int T>
    static void store(void* to, long stride) {
        for (int row = 0; row < rows_of(T); row++) std::memcpy((char*)to + row * stride, at(T, row), kTileBytes);
    }

    // Each element adds up the products of even and of odd numbers apart, in two chains from 0.
    template <int Sum, int X, int W>
    static void add() {
        F16 even_weights[kSide], odd_weights[kSide];
        for (int k = 0; k < kSide; k++) {
            const I16 words = load_words(at(W, k));
            even_weights[k] = even_halves(words), odd_weights[k] = odd_halves(words);
        }
        for (int row = 0; row < rows_of(Sum); row++) {
            F16 even = zeros(), odd = zeros();
            for (int k = 0; k < kSide; k++) {
                const I16 words = broadcast(at(X, row)[k]);
                even = fma(even_halves(words), even_weights[k], even);
                odd = fma(odd_halves(words), odd_weights[k], odd);
            }
            float* sum = (float*)at(Sum, row);
            pdserve::store(sum, pdserve::load(sum) + (even + odd));
        }
    }

    template <int Sum, int X, int W>
    static void add_bytes() {
        for (int row = 0; row < rows_of(Sum); row++) {
            __m512i sum = _mm512_load_si512(at(Sum, row));
            for (int k = 0; k < kSide; k++)
                sum = _mm512_dpbusd_epi32(sum, _mm512_load_si512(at(W, k)), _mm512_set1_epi32(at(X, row)[k]));
            _mm512_store_si512(at(Sum, row), sum);
        }
    }

  private:
    struct File {
        alignas(64) int32_t tile[8][kSide][kSide];
        int rows;
    };
    static File& file() {
        static thread_local File registers;
        return registers;
    }
    static int rows_of(int tile) { return tile < kWeightTile ? file().rows : kSide; }
    static int32_t* at(int tile, int row) { return file().tile[tile][row]; }
};

inline bool tiles_are_emulated = false;  // set before the first model is made

// Calls f<Tiles>() with the tiles of this process.
template <class F>
inline void with_tiles(const F& f) {
    tiles_are_emulated ? f.template operator()<EmulatedTiles>() : f.template operator()<HardwareTiles>();
}

// Asks the kernel for the tiles, once for all threads of this process, and returns whether it gives them.
inline bool tiles_are_permitted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

// While it lives, its thread may use tiles.
class TileUse {
  public:
    TileUse() {
        with_tiles([]<class Tiles>() { Tiles::forget(); });
    }
    ~TileUse() {
        with_tiles([]<class Tiles>() { Tiles::release(); });
    }
    TileUse(const TileUse&) = delete;
};

}  // namespace pdserve
