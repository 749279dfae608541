// Products with weights of four bits. Activations stay bfloat16.
//
// A weight is scale * code + least. Neighbouring kGroup4 weights of a column share scale and least, which are bfloat16, so a
// weight takes 0.625 bytes. One instruction looks up 32 codes in a table of bfloat16. Then come the dot products of matmul.h, and
// `least` is multiplied with the sum of the group's activations, which is the same for all columns. So a step of few rows reads a
// third of the bytes of bfloat16, and x is not rounded further. Activations of eight bits would multiply at twice the rate and
// add their own error: int8 weights offer that where products are the bottleneck.
//
// An element is a chain of multiply-adds over the groups in the order of k, and each group is a chain of its own from 0. So its
// bits depend only on the row and the column.
#pragma once

#include "arena.h"
#include "matmul.h"

namespace pdserve {

constexpr long kGroup4 = 32;
constexpr long kGroup4Words = kGroup4 / 2;             // words of x in a group
constexpr long kGroup4Lines = 2 + kGroup4Words / 2;    // one line of scales, one of leasts, then lines of codes for two words of k each
constexpr long kGroup4Stride = kGroup4Lines * kLanes;  // in words
#ifdef __AVX512F__
constexpr int kMostRows4 = kRows / 2;  // registers hold the sums of a group beside those of whole rows
#else
constexpr int kMostRows4 = kRows;      // with two rows, codes are looked up so often that a prompt takes 1.4 times as long
#endif

inline Table code_table() {
    return Table({0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170});
}

// Looks up a line of codes: the weights of both halves of a panel, [word, half].
inline void words_of(I16 codes, const Table& table, I16 (&weights)[2][2]) {
    weights[0][0] = table[codes], weights[0][1] = table[shift_right_halves(codes, 4)];
    weights[1][0] = table[shift_right_halves(codes, 8)], weights[1][1] = table[shift_right_halves(codes, 12)];
}

// Writes the sum of the activations of each group of each row. to: [rows, k / kGroup4].
inline void sum_groups(const Rows& x, long rows, long words, float* to) {
    const I16 ones = broadcast(0x3F803F80);
    for (long row = 0; row < rows; row++)
        for (long k = 0; k < words; k += kGroup4Words) {
            const I16 group = load_words(x.words + row * x.stride + k);
            *to++ = sum_lanes(Bf16Dot::add(zeros(), group, ones));
        }
}

// Returns the rows from `row` on.
inline Rows rows_from(Rows x, long row) {
    if (x.scales != nullptr) x.scales += x.group(row), x.offsets += x.group(row);
    if (x.sums != nullptr) x.sums += row * (x.stride / kGroup4Words);
    x.words += row * x.stride;
    return x;
}

// Computes the sums of R rows with one panel. x_sums: the sums of the first row's groups. `ahead`: the panel to prefetch
// meanwhile, or null.
template <int R>
inline void sums4(const Rows& x, long row, const float* x_sums, const Weight& w, const uint32_t* panel, const uint32_t* ahead,
                  F16 (&sum)[R][2]) {
    const uint32_t* from = x.words + row * x.stride;
    const Table table = code_table();
    const long groups = w.words / kGroup4Words, each = groups / w.parts;
    Tree<R * 2> tree;
    for (long part = 0; part < w.parts; part++) {
        F16 total[R][2];
        PDSERVE_UNROLL(6)
        for (int r = 0; r < R; r++) total[r][0] = total[r][1] = zeros();
        for (long group = part * each; group < (part + 1) * each; group++, panel += kGroup4Stride, from += kGroup4Words) {
            if (ahead != nullptr) {
                for (long line = 0; line < kGroup4Lines; line++) _mm_prefetch((const char*)(ahead + line * kLanes), _MM_HINT_T1);
                ahead += kGroup4Stride;
            }
            F16 sums[R][2];
            PDSERVE_UNROLL(6)
            for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zeros();
            for (long i = 0; i < kGroup4Words; i += 2) {
                I16 weights[2][2];
                words_of(load_words(panel + 2 * kLanes + i / 2 * kLanes), table, weights);
                for (int next = 0; next < 2; next++) {
                    PDSERVE_UNROLL(6)
                    for (int r = 0; r < R; r++) {
                        const I16 spread = broadcast(int32_t(from[r * x.stride + i + next]));
                        sums[r][0] = Bf16Dot::add(sums[r][0], spread, weights[next][0]);
                        sums[r][1] = Bf16Dot::add(sums[r][1], spread, weights[next][1]);
                    }
                }
            }
            for (int half = 0; half < 2; half++) {
                const F16 scale = load_bf16((const bf16*)panel + half * kLanes);
                const F16 least = load_bf16((const bf16*)(panel + kLanes) + half * kLanes);
                PDSERVE_UNROLL(6)
                for (int r = 0; r < R; r++) {
                    total[r][half] = fma(sums[r][half], scale, total[r][half]);
                    total[r][half] = fma(broadcast(x_sums[r * groups + group]), least, total[r][half]);
                }
            }
        }
        PDSERVE_UNROLL(6)
        for (int r = 0; r < R; r++) sum[r][0] = total[r][0], sum[r][1] = total[r][1];
        if (w.parts > 1) tree.add(part, sum[0]);
    }
}

// Multiplies as `multiply_by` does. A single piece of rows prefetches the weights that it needs a little later; of several
// pieces, the first prefetches the next panel.
template <class Out>
void multiply_int4(const Rows& x, long rows, const Weight& w, long panel, long panel_end, const Out& out) {
    const long groups = w.words / kGroup4Words;
    const bool single = rows <= kMostRows4;
    for (long p = panel; p < panel_end; p++) {
        const uint32_t* ahead = single ? w.panel(p) + kAheadWords : w.panel(p + 1);
        row_pieces<kMostRows4>(0, rows, [&]<int R>(long first) {
            F16 sum[R][2];
            sums4<R>(x, first, x.sums + first * groups, w, w.panel(p), ahead, sum);
            if (!single) ahead = nullptr;
            for (int r = 0; r < R; r++) out(first + r, p * kPanel, sum[r][0], sum[r][1]);
        });
    }
}

inline float widened(bf16 half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline bf16 narrowed(float value) {  // of a finite value; it rounds to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bf16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Packs a weight into panels of codes; the codes of each group of a column span its least to its largest weight. `count` is a
// multiple of kGroup4.
inline void pack_int4(const Source& source, uint32_t* to) {
    const long groups = source.count / kGroup4;
    for (long row = 0; row < source.n; row++)
        for (long group = 0; group < groups; group++) {
            const bf16* from = source.row(row) + group * kGroup4;
            bf16* block = (bf16*)(to + (row / kPanel * groups + group) * kGroup4Stride);
            const long column = row % kPanel;
            float wide[kGroup4];
            for (long i = 0; i < kGroup4; i++) wide[i] = widened(from[i]);
            const auto [least, largest] = std::minmax_element(wide, wide + kGroup4);
            const bf16 scale = narrowed((*largest - *least) / 15.0f);
            block[column] = scale, block[kPanel + column] = narrowed(*least);
            const float inverse = widened(scale) > 0 ? 1.0f / widened(scale) : 0.0f;
            // A line holds two words of k. A lane of 16 bits has the codes of a low and a high column for the first word, then
            // those for the second.
            bf16* codes = block + 2 * kPanel;
            for (long i = 0; i < kGroup4; i++) {
                const float code = std::min(15.0f, std::max(0.0f, std::nearbyintf((wide[i] - *least) * inverse)));
                const long lane = column % kLanes * 2 + i % 2, nibble = column / kLanes + i / 2 % 2 * 2;
                codes[i / 4 * kPanel + lane] |= bf16(uint32_t(code) << 4 * nibble);
            }
        }
}

}  // namespace pdserve
