// Matrix products with weights that are packed once. An element of the result is one chain of multiply-adds in the order of k, in
// one accumulator. Its bits depend on its row of x and its column of the weight, never on the number of rows that are multiplied
// together, on the tile that computes it, or on the thread. With AMX, products of bfloat16 are added up otherwise: see tile_products.h.
//
// A weight whose rows could be split among several ranks has parts: a chain for each of them, added as a balanced tree (`Tree`). So
// a rank that computes some neighbouring parts adds them up as one rank with all of them does.
//
// Operands are words of 32 bits: two bfloat16 or four 8-bit integers that are neighbours in k, as the CPU's dot-product
// instructions take them. A panel holds kPanel columns. For each word of k it has kPanel words, so the innermost loop reads it
// from front to end. With AVX-512, a tile of kRows x kPanel accumulators fills 24 of the 32 registers. For 12 multiply-adds of both
// halves it needs 14 loads, which the two load ports give in half the time of the products.
#pragma once

#include <cpuid.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vector.h"

namespace pdserve {

constexpr int kPanel = 2 * kLanes;
#ifdef PDSERVE_AMX
constexpr long kDepth = 16;  // words of k that a product takes at once
#else
constexpr long kDepth = 1;
#endif
constexpr long kGroup = 64;               // 8-bit integers of a row that share a scale
constexpr long kGroupWords = kGroup / 4;
// The distance at which a product of few rows prefetches its weights: 8 KiB.
constexpr long kAheadWords = 64 * kPanel;

// Rows of a tile of one panel and of a tile of two panels, and the halves of panels that are multiplied at once.
#if defined(__AVX512BF16__)
constexpr int kRows = 12, kPairRows = 6;
template <int R, int Panels>
constexpr int kHalves = 2 * Panels;
#elif defined(__AVX512F__)
constexpr int kRows = 12, kPairRows = 5;  // a sixth row would leave no register for the floats of x
template <int R, int Panels>
constexpr int kHalves = 2 * Panels;
#else
constexpr int kRows = 5, kPairRows = 5;  // sixteen registers hold them for half a panel, beside its weights and a number of x
template <int R, int Panels>
constexpr int kHalves = R == 1 ? 2 : 1;  // one row of half a panel has too few multiply-adds that do not wait for each other
#endif

// Adds products of two bfloat16. The instruction is, bit for bit, a chain of two multiply-adds, the odd number first; subnormal
// numbers are zero in both (see `Flush`).
struct Bf16Dot {
    static constexpr int kMostRows = kRows, kAloneRows = kRows;  // of a piece, and of one without others
#ifdef __AVX512BF16__
    static constexpr bool kByFloats = false;
#else
    static constexpr bool kByFloats = true;
#endif
    using Sum = F16;
    static Sum add(Sum sum, I16 x, I16 w) {
#ifdef __AVX512BF16__
        return _mm512_dpbf16_ps(sum, (__m512bh)(__m512i)x, (__m512bh)(__m512i)w);
#else
        return fma(even_halves(x), even_halves(w), fma(odd_halves(x), odd_halves(w), sum));
#endif
    }
};

// Adds products of four 8-bit integers, x signed, w unsigned; the sum is exact. `start` takes -128 times the sum of x.
struct Int8Dot {
    static constexpr bool kByFloats = false;
#ifdef __AVX512F__
    static constexpr int kMostRows = kRows / 2;   // registers also hold the float sums of whole rows beside the integer sums of a group
    static constexpr int kAloneRows = kRows - 2;  // in memory, these cost less than a second pass over weights; 12 rows took 1.14 times as long
#else
    static constexpr int kMostRows = kRows, kAloneRows = kRows;  // two rows took 1.1 times as long, and 1.4 times with AVX-VNNI
#endif
    using Sum = I16;
#ifdef __AVX512VNNI__
    static Sum start(int32_t offset) { return broadcast(offset); }
    // gcc 12 copies the sum before and after the intrinsic, so the instruction is written out.
    static Sum add(Sum sum, I16 x, I16 w) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
        return sum;
    }
#else
    // Signed weights, at most 127: then no sum of two products leaves 16 bits, and no offset is needed.
    static Sum start(int32_t) { return broadcast(0); }
    static Sum add(Sum sum, I16 x, I16 w) { return {add(sum.low, x.low, w.low), add(sum.high, x.high, w.high)}; }
    static __m256i add(__m256i sum, __m256i x, __m256i w) {
        const __m256i whole = _mm256_xor_si256(w, _mm256_set1_epi8(int8_t(0x80)));
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(whole, x));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
#endif
};

// clang assembles the instruction only in a file that may use it everywhere, and then not all CPUs with AVX2 could load the library.
#if !defined(__AVX512VNNI__) && !defined(__clang__) && !defined(PDSERVE_NO_AVX_VNNI)
#define PDSERVE_AVX_VNNI

// Does what Int8Dot does by one instruction, AVX-VNNI, which newer CPUs without AVX-512 have.
struct VnniDot : Int8Dot {
    static Sum start(int32_t offset) { return broadcast(offset); }
    static Sum add(Sum sum, I16 x, I16 w) {
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.low) : "x"(w.low), "x"(x.low));
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.high) : "x"(w.high), "x"(x.high));
        return sum;
    }
};

inline bool has_avx_vnni() {
    unsigned a, b, c, d;
    static const bool found = __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
    return found;
}
#endif

// Calls f<Dot>() with the product of 8-bit integers that this CPU computes fastest.
template <class F>
inline auto with_int8_dot(const F& f) {
#ifdef PDSERVE_AVX_VNNI
    if (has_avx_vnni()) return f.template operator()<VnniDot>();
#endif
    return f.template operator()<Int8Dot>();
}

constexpr long kFloatWords = 64;  // words of a row that are floats at once: a few KiB for all rows of a tile

// Does what `tile` does, for CPUs that multiply floats only. The words of x become floats before the loop: in it, each of them
// would take two instructions that compete with the multiply-adds.
template <int R, int Panels, class Meanwhile>
inline void float_tile(const uint32_t* x, long x_stride, const uint32_t* panel, long panel_words, long words, F16 (&sum)[R][2 * Panels],
                       const Meanwhile& meanwhile) {
    constexpr int halves = kHalves<R, Panels>;
    alignas(64) float even[R][kFloatWords], odd[R][kFloatWords];
    for (long begin = 0; begin < words; begin += kFloatWords) {
        const long count = std::min(kFloatWords, words - begin);
        for (int r = 0; r < R; r++)
            for (long k = 0; k < count; k += kLanes) {
                const I16 pairs = load_words(x + r * x_stride + begin + k, first_lanes(count - k));
                store(&even[r][k], even_halves(pairs)), store(&odd[r][k], odd_halves(pairs));
            }
        for (int first = 0; first < 2 * Panels; first += halves) {
            F16 at[R][halves];
            PDSERVE_UNROLL(12)
            for (int r = 0; r < R; r++)
                for (int h = 0; h < halves; h++) at[r][h] = sum[r][first + h];
            for (long k = 0; k < count; k++) {
                F16 even_weights[halves], odd_weights[halves];
                for (int h = 0; h < halves; h++) {
                    const I16 half = load_words(panel + (first + h) / 2 * panel_words + (begin + k) * kPanel + (first + h) % 2 * kLanes);
                    even_weights[h] = even_halves(half), odd_weights[h] = odd_halves(half);
                }
                if (first == 0) meanwhile(begin + k);
                PDSERVE_UNROLL(12)
                for (int r = 0; r < R; r++) {
                    const F16 one = broadcast(even[r][k]), other = broadcast(odd[r][k]);
                    for (int h = 0; h < halves; h++) at[r][h] = fma(one, even_weights[h], fma(other, odd_weights[h], at[r][h]));
                }
            }
            PDSERVE_UNROLL(12)
            for (int r = 0; r < R; r++)
                for (int h = 0; h < halves; h++) sum[r][first + h] = at[r][h];
        }
    }
}

// Adds to sum[r] the product of row r of x with `Panels` panels. The first panel is at `panel`, and each next one `panel_words`
// later. x_stride is in words. meanwhile(k) is called with each word, for prefetches.
template <class Dot, int R, int Panels, class Meanwhile>
inline void tile(const uint32_t* x, long x_stride, const uint32_t* panel, long panel_words, long words,
                 typename Dot::Sum (&sum)[R][2 * Panels], const Meanwhile& meanwhile) {
    constexpr int halves = kHalves<R, Panels>;
    if constexpr (Dot::kByFloats && R > 1)
        return float_tile<R, Panels>(x, x_stride, panel, panel_words, words, sum, meanwhile);
    for (int first = 0; first < 2 * Panels; first += halves) {
        typename Dot::Sum at[R][halves];  // gcc 12 keeps these in registers, but not values behind a reference
        PDSERVE_UNROLL(12)
        for (int r = 0; r < R; r++)
            for (int h = 0; h < halves; h++) at[r][h] = sum[r][first + h];
        for (long k = 0; k < words; k++) {
            I16 half[halves];
            for (int h = 0; h < halves; h++)
                half[h] = load_words(panel + (first + h) / 2 * panel_words + k * kPanel + (first + h) % 2 * kLanes);
            if (first == 0) meanwhile(k);
            PDSERVE_UNROLL(12)
            for (int r = 0; r < R; r++) {
                const I16 spread = broadcast(int32_t(x[r * x_stride + k]));
                for (int h = 0; h < halves; h++) at[r][h] = Dot::add(at[r][h], spread, half[h]);
            }
        }
        PDSERVE_UNROLL(12)
        for (int r = 0; r < R; r++)
            for (int h = 0; h < halves; h++) sum[r][first + h] = at[r][h];
    }
}

// Calls f<R>(row) for pieces of nearly equal size of rows [first, end), at most `Most` rows each.
template <int Most = kRows, class Function>
inline void row_pieces(long first, long end, const Function& f) {
    long pieces = (end - first + Most - 1) / Most;
    for (long row = first; row < end; pieces--) {
        const long count = (end - row + pieces - 1) / pieces;
        switch (count) {
#define PDSERVE_CASE(R)                                             \
    case R:                                                         \
        if constexpr (R <= Most) f.template operator()<R>(row); \
        break;
            PDSERVE_CASE(1) PDSERVE_CASE(2) PDSERVE_CASE(3) PDSERVE_CASE(4) PDSERVE_CASE(5) PDSERVE_CASE(6)
            PDSERVE_CASE(7) PDSERVE_CASE(8) PDSERVE_CASE(9) PDSERVE_CASE(10) PDSERVE_CASE(11) PDSERVE_CASE(12)
#undef PDSERVE_CASE
        }
        row += count;
    }
}

constexpr int kMostPartLevels = 3;  // levels of the tree of parts, which are at most 8

// Adds up sums of parts, each of N vectors: neighbours first, then neighbours of these sums.
template <int N>
class Tree {
  public:
    // Takes the sums of parts 0, 1, 2, ... in this order: the first `count` vectors. After the last one, they are those of all parts.
    [[gnu::noinline]] void add(long part, F16* sums, int count = N) {
        int level = 0;
        for (; part >> level & 1; level++)
            for (int i = 0; i < count; i++) sums[i] = waiting_[level][i] + sums[i];
        for (int i = 0; i < count && level < kMostPartLevels; i++) waiting_[level][i] = sums[i];
    }

  private:
    F16 waiting_[kMostPartLevels][N];
};

// A packed weight [n, k]. Columns beyond n are never used. With 8 bits, each column has one scale, and 128 is added to the
// integers. For 4 bits see int4.h.
struct Weight {
    long n = 0, k = 0;
    int bits = 16;
    long parts = 1;         // a power of two; each part is a whole number of groups
    long words = 0;         // words of a row that it is multiplied with
    long panel_words = 0;
    const uint32_t* panels = nullptr;
    const float* scales = nullptr;  // [panels * kPanel], 8 bits only
    const float* late_scales = nullptr;  // the same, where other ranks have parts of each sum: their sum is scaled, and `scales` are 1

    bool integers() const { return bits == 8; }  // the rows are then integers, too
    long count() const { return (n + kPanel - 1) / kPanel; }
    const uint32_t* panel(long index) const { return panels + index * panel_words; }
};

// Rows that are multiplied: bfloat16, or 8-bit integers with a scale for each kGroup of them. One scale for a whole row is not
// enough: single activations of a Llama are a thousand times as large as the others, which would all become 0.
struct Rows {
    uint32_t* words = nullptr;
    long stride = 0;             // in words
    float* scales = nullptr;     // [rows, stride / kGroupWords]
    int32_t* offsets = nullptr;  // one beside each scale: -128 times the sum of the group
    const float* sums = nullptr;  // for weights of four bits: the sum of each group, see int4.h
    uint32_t* codes = nullptr;    // and room for the codes of a panel where tiles multiply them

    long group(long row) const { return row * stride / kGroupWords; }
};

// Computes the sums of R rows with one panel. With each word, it prefetches `Lines` cache lines from `ahead` on. It is never
// inlined: all uses of products share it, so that it is compiled once for all of them.
template <class Dot, int R, int Lines>
[[gnu::noinline]] void sums(const Rows& x, long row, const Weight& w, long panel, const uint32_t* ahead, F16 (&sum)[R][2]) {
    const uint32_t *from = x.words + row * x.stride, *weights = w.panel(panel);
    const auto ask = [&](long k) {
        for (int line = 0; line < Lines; line++) _mm_prefetch((const char*)(ahead + (k * Lines + line) * kLanes), _MM_HINT_T1);
    };
    const long each = w.words / w.parts;
    Tree<R * 2> tree;
    for (long part = 0; part < w.parts; part++) {
        const long begin = part * each;
        PDSERVE_UNROLL(12)
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zeros();
        if constexpr (std::is_same_v<Dot, Bf16Dot>) {
            tile<Dot, R, 1>(from + begin, x.stride, weights + begin * kPanel, 0, each, sum, [&](long k) { ask(begin + k); });
        } else {
            F16 total[R][2];
            PDSERVE_UNROLL(12)
            for (int r = 0; r < R; r++) total[r][0] = total[r][1] = zeros();
            for (long at = begin; at < begin + each; at += kGroupWords) {
                I16 group[R][2];
                const long index = at / kGroupWords;
                PDSERVE_UNROLL(12)
                for (int r = 0; r < R; r++) group[r][0] = group[r][1] = Dot::start(x.offsets[x.group(row + r) + index]);
                tile<Dot, R, 1>(from + at, x.stride, weights + at * kPanel, 0, kGroupWords, group, [&](long k) { ask(at + k); });
                PDSERVE_UNROLL(12)
                for (int r = 0; r < R; r++) {
                    const F16 scale = broadcast(x.scales[x.group(row + r) + index]);
                    total[r][0] = fma(to_floats(group[r][0]), scale, total[r][0]);
                    total[r][1] = fma(to_floats(group[r][1]), scale, total[r][1]);
                }
            }
            PDSERVE_UNROLL(12)
            for (int r = 0; r < R; r++) sum[r][0] = total[r][0], sum[r][1] = total[r][1];
        }
        if (w.parts > 1) tree.add(part, sum[0]);
    }
    if constexpr (!std::is_same_v<Dot, Bf16Dot>) {
        const F16 low = load(w.scales + panel * kPanel), high = load(w.scales + panel * kPanel + kLanes);
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][0] * low, sum[r][1] = sum[r][1] * high;
    }
}

// Hands the sums of R rows with `panel`, and with the next one where there are four halves, to the use of a product.
template <int R, int Halves, class Out>
[[gnu::noinline]] void use(const F16 (&sum)[R][Halves], long row, long panel, const Out& out) {
    PDSERVE_UNROLL(12)
    for (int r = 0; r < R; r++)
        for (int h = 0; h < Halves; h += 2) out(row + r, panel * kPanel + h * kLanes, sum[r][h], sum[r][h + 1]);
}

template <class Dot, int R, int Lines, class Out>
void piece(const Rows& x, long row, const Weight& w, long panel, const uint32_t* ahead, const Out& out) {
    F16 sum[R][2];
    sums<Dot, R, Lines>(x, row, w, panel, ahead, sum);
    use(sum, row, panel, out);
}

// Does what `sums` does for two panels in bfloat16. It loads less than two calls of `sums` do: a row's word serves both.
template <int R, int Lines>
[[gnu::noinline]] void pair_sums(const Rows& x, long row, const Weight& w, long panel, const uint32_t* ahead, F16 (&sum)[R][4]) {
    const long each = w.words / w.parts;
    Tree<R * 4> tree;
    for (long part = 0; part < w.parts; part++) {
        const long begin = part * each;
        PDSERVE_UNROLL(6)
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 4; h++) sum[r][h] = zeros();
        tile<Bf16Dot, R, 2>(x.words + row * x.stride + begin, x.stride, w.panel(panel) + begin * kPanel, w.panel_words, each, sum,
                            [&](long k) {
                                if constexpr (Lines > 0) _mm_prefetch((const char*)(ahead + (begin + k) * kLanes), _MM_HINT_T1);
                            });
        if (w.parts > 1) tree.add(part, sum[0]);
    }
}

template <int R, int Lines, class Out>
void pair_piece(const Rows& x, long row, const Weight& w, long panel, const uint32_t* ahead, const Out& out) {
    F16 sum[R][4];
    pair_sums<R, Lines>(x, row, w, panel, ahead, sum);
    use(sum, row, panel, out);
}

// Multiplies pairs of panels, as many as there are, and returns the first panel that is left. The first four pieces prefetch the
// quarters of the next pair.
template <class Out>
long multiply_pairs(const Rows& x, long rows, const Weight& w, long panel, long panel_end, const Out& out) {
    for (; panel + 2 <= panel_end; panel += 2) {
        const uint32_t* next = w.panel(panel + 2);
        row_pieces<kPairRows>(0, rows, [&]<int R>(long first) {
            if (next < w.panel(panel + 4))
                pair_piece<R, 1>(x, first, w, panel, next, out), next += w.words * kLanes;
            else
                pair_piece<R, 0>(x, first, w, panel, nullptr, out);
        });
    }
    return panel;
}

// Weights come from memory, rows from caches. A single piece of rows prefetches the weights that it needs a little later. With
// several pieces, the first two prefetch the halves of the next panel, so that memory works while the others compute.
template <class Dot, class Out>
void multiply_by(const Rows& x, long rows, const Weight& w, long panel, long panel_end, const Out& out) {
    if (rows <= Dot::kAloneRows)
        return row_pieces<Dot::kAloneRows>(0, rows, [&]<int R>(long first) {
            for (long p = panel; p < panel_end; p++) piece<Dot, R, 2>(x, first, w, p, w.panel(p) + kAheadWords, out);
        });
    if constexpr (std::is_same_v<Dot, Bf16Dot>)
        if (rows > 3 * kPairRows) panel = multiply_pairs(x, rows, w, panel, panel_end, out);
    for (long p = panel; p < panel_end; p++) {
        const uint32_t* next = w.panel(p + 1);
        row_pieces<Dot::kMostRows>(0, rows, [&]<int R>(long first) {
            if (next < w.panel(p + 2))
                piece<Dot, R, 1>(x, first, w, p, next, out), next += w.words * kLanes;
            else
                piece<Dot, R, 0>(x, first, w, p, nullptr, out);
        });
    }
}

// The uses of a product: it is stored, added, or combined to activation(gate) * up, which has half the columns.

struct Store {
    float* to;
    long columns, stride = columns;
    void operator()(long row, long column, F16 low, F16 high) const {
        float* at = to + row * stride + column;
        store(at, low, first_lanes(columns - column));
        if (columns - column > kLanes) store(at + kLanes, high, first_lanes(columns - column - kLanes));
    }
};

struct AddTo {
    float* to;
    long columns;
    void operator()(long row, long column, F16 low, F16 high) const {
        float* at = to + row * columns + column;
        add(at, first_lanes(columns - column), low);
        if (columns - column > kLanes) add(at + kLanes, first_lanes(columns - column - kLanes), high);
    }
    static void add(float* at, Mask lanes, F16 value) {
        store(at, load(at, lanes) + value, lanes);
    }
};

template <F16 (&Activation)(F16)>
struct GateMul {  // panels hold sixteen columns of the gate, then the same sixteen of up
    bf16* to;
    long columns;
    void operator()(long row, long column, F16 gate, F16 up) const {
        store_bf16(to + row * columns + column / 2, Activation(gate) * up);
    }
};

// A weight [n, k] as a checkpoint has it, in bfloat16, and the numbers [first, first + count) of each row, which are packed.
struct Source {
    const bf16* weight;
    long n, k, first, count;
    const bf16* row(long index) const { return weight + index * k + first; }
};

// Packs a weight into zeroed panels of `panel_words` words each; `count` is even.
inline void pack(const Source& from, long panel_words, uint32_t* to) {
    for (long row = 0; row < from.n; row++) {
        uint32_t* column = to + row / kPanel * panel_words + row % kPanel;
        for (long i = 0; i < from.count / 2; i++) std::memcpy(column + i * kPanel, from.row(row) + 2 * i, 4);
    }
}

// Packs a weight into panels of integers, with each column scaled to 127; `count` is a multiple of kGroup.
inline void pack_int8(const Source& from, uint32_t* to, float* scales) {
    const long words = from.count / 4;
    std::vector<float> wide(from.k);
    for (long row = 0; row < from.n; row++) {
        float largest = 0;
        for (long i = 0; i < from.k; i++) {
            const uint32_t bits = uint32_t(from.weight[row * from.k + i]) << 16;
            std::memcpy(&wide[i], &bits, 4);
            largest = std::max(largest, std::fabs(wide[i]));
        }
        const float scale = largest > 0 ? largest / 127.0f : 1.0f;
        uint8_t* column = (uint8_t*)(to + row / kPanel * words * kPanel + row % kPanel);
        for (long i = 0; i < from.count; i++)
            column[i / 4 * kPanel * 4 + i % 4] = uint8_t(std::nearbyintf(wide[from.first + i] / scale) + 128.0f);
        scales[row] = scale;
    }
}

}  // namespace pdserve
