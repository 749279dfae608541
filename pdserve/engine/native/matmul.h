// Matrix products with weights packed once. An element of the result is one chain of multiply-adds in the order of k,
// in one accumulator: its bits depend on its row of x and its column of the weight, never on how many rows are
// multiplied together, on the tile that computes it, or on the thread.
//
// Operands are words of 32 bits, two bfloat16 or four 8-bit integers that lie beside each other in k, as the CPU's
// dot-product instructions take them. A panel holds PANEL columns: for each word of k, PANEL words, so that the
// innermost loop reads it from front to end. A tile of ROWS x PANEL accumulators fills 24 of the 32 registers; at 12
// multiply-adds of both halves it needs 14 loads, which the two load ports give in half the time of the products.
#pragma once

#include <cstring>

#include "vector.h"

namespace pdserve {

constexpr int kPanel = 2 * kLanes;
constexpr int kRows = 12;
// How far ahead few rows ask for the weights that they stream through: 8 KiB.
constexpr long kAheadWords = 64 * kPanel;

struct Bf16Dot {
    using Sum = __m512;
    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum add(Sum sum, __m512i x, __m512i w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
};

struct Int8Dot {  // x unsigned, w signed; the sum is exact
    using Sum = __m512i;
    static Sum zero() { return _mm512_setzero_si512(); }
    static Sum add(Sum sum, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sum, x, w); }
};

// sum[r] += rows r of x times one panel. x_stride in words. With each word, `Lines` cache lines from `ahead` on are
// asked for.
template <class Dot, int R, int Lines = 0>
inline void tile(const uint32_t* x, long x_stride, const uint32_t* panel, long words, typename Dot::Sum (&sum)[R][2],
                 const uint32_t* ahead = nullptr) {
    for (long k = 0; k < words; k++) {
        const __m512i low = _mm512_loadu_si512(panel + k * kPanel);
        const __m512i high = _mm512_loadu_si512(panel + k * kPanel + kLanes);
        for (int line = 0; line < Lines; line++) _mm_prefetch((const char*)(ahead + (k * Lines + line) * kLanes), _MM_HINT_T1);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const __m512i spread = _mm512_set1_epi32(int(x[r * x_stride + k]));
            sum[r][0] = Dot::add(sum[r][0], spread, low);
            sum[r][1] = Dot::add(sum[r][1], spread, high);
        }
    }
}

// Calls f<R>(row) for pieces of nearly equal size, at most kRows rows each.
template <class Function>
inline void row_pieces(long first, long end, const Function& f) {
    long pieces = (end - first + kRows - 1) / kRows;
    for (long row = first; row < end; pieces--) {
        const long count = (end - row + pieces - 1) / pieces;
        switch (count) {
#define PDSERVE_CASE(R) \
    case R:             \
        f.template operator()<R>(row); \
        break;
            PDSERVE_CASE(1) PDSERVE_CASE(2) PDSERVE_CASE(3) PDSERVE_CASE(4) PDSERVE_CASE(5) PDSERVE_CASE(6)
            PDSERVE_CASE(7) PDSERVE_CASE(8) PDSERVE_CASE(9) PDSERVE_CASE(10) PDSERVE_CASE(11) PDSERVE_CASE(12)
#undef PDSERVE_CASE
        }
        row += count;
    }
}

// A weight [n, k], packed. Columns beyond n are zeros. Integers: one scale a column, symmetric.
struct Weight {
    long n = 0, k = 0, words = 0;
    bool integers = false;
    const uint32_t* panels = nullptr;
    const float* scales = nullptr;   // [panels * kPanel], integers only
    const int32_t* offsets = nullptr;  // 128 * the sum of a column: x is stored with 128 added

    long count() const { return (n + kPanel - 1) / kPanel; }
    const uint32_t* panel(long index) const { return panels + index * words * kPanel; }
};

// Rows that are multiplied: bfloat16, or unsigned 8-bit integers around 128 with one scale a row.
struct Rows {
    uint32_t* words = nullptr;
    float* scales = nullptr;
    long stride = 0;  // in words
};

template <class Out>
inline void hand_out(const __m512i (&sum)[2], const Rows& x, const Weight& w, long row, long panel, const Out& out) {
    const __m512 row_scale = _mm512_set1_ps(x.scales[row]);
    __m512 value[2];
    for (int half = 0; half < 2; half++) {
        const long column = panel * kPanel + half * kLanes;
        const __m512i exact = _mm512_sub_epi32(sum[half], _mm512_loadu_si512(w.offsets + column));
        value[half] = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(w.scales + column)), row_scale);
    }
    out(row, panel * kPanel, value[0], value[1]);
}

template <class Out>
inline void hand_out(const __m512 (&sum)[2], const Rows&, const Weight&, long row, long panel, const Out& out) {
    out(row, panel * kPanel, sum[0], sum[1]);
}

template <class Dot, int R, int Lines, class Out>
void piece(const Rows& x, long row, const Weight& w, long panel, const uint32_t* ahead, const Out& out) {
    typename Dot::Sum sum[R][2];
    for (auto& halves : sum) halves[0] = halves[1] = Dot::zero();
    tile<Dot, R, Lines>(x.words + row * x.stride, x.stride, w.panel(panel), w.words, sum, ahead);
    for (int r = 0; r < R; r++) hand_out(sum[r], x, w, row + r, panel, out);
}

// Weights come from memory, rows from caches. One piece of rows asks for what it needs itself a little later; of
// several, the first two ask for the halves of the next panel, so that memory works while the others compute.
template <class Dot, class Out>
void multiply_by(const Rows& x, long row, long row_end, const Weight& w, long panel, long panel_end, const Out& out) {
    const bool single = row_end - row <= kRows;
    for (long p = panel; p < panel_end; p++) {
        const uint32_t* next = w.panel(p + 1);
        row_pieces(row, row_end, [&]<int R>(long first) {
            if (single)
                piece<Dot, R, 2>(x, first, w, p, w.panel(p) + kAheadWords, out);
            else if (next < w.panel(p + 2))
                piece<Dot, R, 1>(x, first, w, p, next, out), next += w.words * kLanes;
            else
                piece<Dot, R, 0>(x, first, w, p, nullptr, out);
        });
    }
}

// out(row, column, low, high) for rows [row, row_end) and panels [panel, panel_end): sixteen columns from `column`
// and the sixteen after them.
template <class Out>
void multiply(const Rows& x, long row, long row_end, const Weight& w, long panel, long panel_end, const Out& out) {
    if (w.integers)
        multiply_by<Int8Dot>(x, row, row_end, w, panel, panel_end, out);
    else
        multiply_by<Bf16Dot>(x, row, row_end, w, panel, panel_end, out);
}

// What becomes of a product: stored, added, or halved by silu(gate) * up.

struct Store {
    float* to;
    long columns;
    void operator()(long row, long column, __m512 low, __m512 high) const {
        float* at = to + row * columns + column;
        _mm512_mask_storeu_ps(at, first_lanes(columns - column), low);
        if (columns - column > kLanes) _mm512_mask_storeu_ps(at + kLanes, first_lanes(columns - column - kLanes), high);
    }
};

struct AddTo {
    float* to;
    long columns;
    void operator()(long row, long column, __m512 low, __m512 high) const {
        float* at = to + row * columns + column;
        add(at, first_lanes(columns - column), low);
        if (columns - column > kLanes) add(at + kLanes, first_lanes(columns - column - kLanes), high);
    }
    static void add(float* at, __mmask16 lanes, __m512 value) {
        _mm512_mask_storeu_ps(at, lanes, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, at), value));
    }
};

struct SiluMul {  // panels hold sixteen columns of the gate, then the same sixteen of up
    bf16* to;
    long columns;
    void operator()(long row, long column, __m512 gate, __m512 up) const {
        store_bf16(to + row * columns + column / 2, _mm512_mul_ps(silu(gate), up));
    }
};

// [n, k] bfloat16 to panels; k even.
inline void pack(const bf16* weight, long n, long k, uint32_t* to) {
    const long words = k / 2;
    for (long row = 0; row < n; row++) {
        uint32_t* column = to + row / kPanel * words * kPanel + row % kPanel;
        for (long i = 0; i < words; i++) std::memcpy(column + i * kPanel, weight + row * k + 2 * i, 4);
    }
}

// [n, k] bfloat16 to panels of integers, each column scaled to 127; k a multiple of 4.
inline void pack_int8(const bf16* weight, long n, long k, uint32_t* to, float* scales, int32_t* offsets) {
    const long words = k / 4;
    for (long row = 0; row < n; row++) {
        float largest = 0;
        for (long i = 0; i < k; i++) {
            const uint32_t bits = uint32_t(weight[row * k + i]) << 16;
            float value;
            std::memcpy(&value, &bits, 4);
            largest = std::max(largest, std::fabs(value));
        }
        const float scale = largest > 0 ? largest / 127.0f : 1.0f;
        int32_t sum = 0;
        uint32_t* column = to + row / kPanel * words * kPanel + row % kPanel;
        for (long i = 0; i < k; i++) {
            const uint32_t bits = uint32_t(weight[row * k + i]) << 16;
            float value;
            std::memcpy(&value, &bits, 4);
            const int8_t whole = int8_t(std::nearbyintf(value / scale));
            sum += whole;
            std::memcpy((char*)(column + i / 4 * kPanel) + i % 4, &whole, 1);
        }
        scales[row] = scale;
        offsets[row] = 128 * sum;
    }
}

}  // namespace pdserve
