// The products of matmul.h and int4.h by tiles. Panels and rows are the operands as they are: a tile of weights is sixteen words of
// half a panel, and a tile of x is sixteen words of up to sixteen rows, read where they are.
//
// An element adds up products of 32 bfloat16 at a time, in the order of k. With 8 and 4 bits a tile is as deep as a group, so the sum
// of a group is one product of tiles. As with other sets, bits depend on the row and the column alone: a single row goes through
// tiles as well.
//
// Two tiles of rows share two tiles of weights: four loads for four products. An Intel Xeon then computes 2,120 GFLOP/s with operands
// in its second cache, and 2,520 with operands in its first. So rows are taken in blocks that stay in the second.
#pragma once

#include "int4.h"
#include "matmul.h"
#include "tiles.h"

namespace pdserve {

constexpr long kBlockBytes = 1 << 20;     // of the rows of a block: half of the second cache of CPUs with AMX
constexpr long kPanelBytes = kPanel * 4;  // from a word of k of a panel to the next
constexpr int kGroupTiles = 4;            // sums of groups that are computed before they are scaled, so that none waits for another

static_assert(kGroupWords == kSide && kGroup4Words == kSide && kDepth == kSide);

// Calls f<I>() for 0 <= I < Count.
template <int Count, class F>
inline void each_tile(const F& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (f.template operator()<I>(), ...); }(std::make_integer_sequence<int, Count>());
}

// The first row of each of R tiles, and their rows. Rows of tile r before `done + r * kSide` are computed by others already.
template <int R>
struct RowTiles {
    long row[R];
    int rows;
    long done;

    // Calls f(row, tile, index) for each row that is new.
    template <class F>
    void each_new(const F& f) const {
        for (int r = 0; r < R; r++)
            for (long i = std::max<long>(0, done + r * kSide - row[r]); i < rows; i++) f(row[r] + i, r, i);
    }
};

// Calls f(RowTiles) for rows [first, end), one or two tiles at a time. Where rows do not fill the last tile, it begins earlier. So
// one configuration serves all tiles, unless there are fewer rows than one tile has.
template <class Tiles, int Most = 2, class F>
inline void row_tiles(long first, long end, const F& f) {
    const int rows = int(std::min<long>(kSide, end - first));
    Tiles::hold(rows);
    for (long done = first, left; done < end; done += std::min<long>(left, Most * kSide)) {
        left = end - done;
        const long row = std::min(done, end - rows);
        if constexpr (Most > 1)
            if (left > kSide) {
                f(RowTiles<2>{{row, std::min(row + kSide, end - rows)}, rows, done});
                continue;
            }
        f(RowTiles<1>{{row}, rows, done});
    }
}

// Sixteen words of each row of a tile of x.
class RowWords {
  public:
    // Finds words [k, k + kSide) of rows from `x` on. What is behind the last of `words` words is 0.
    RowWords(const uint32_t* x, long stride, int rows, long k, long words) : from(x + k), stride(stride * 4) {
        if (k + kSide <= words) return;
        for (int row = 0; row < rows; row++) store_words(last_[row], load_words(x + row * stride + k, first_lanes(words - k)));
        from = last_[0], this->stride = kTileBytes;
    }
    RowWords(const RowWords&) = delete;

    const uint32_t* from;
    long stride;  // in bytes

  private:
    alignas(64) uint32_t last_[kSide][kSide];
};

// Adds to tiles 0 to R * C - 1 the products of R tiles of rows with C halves of panels, over words [begin, end) of k. words: those
// of a row. meanwhile(k) is called for each product, for prefetches.
template <class Tiles, int R, int C, class Meanwhile>
inline void add_products(const uint32_t* x, long stride, const RowTiles<R>& at, const uint32_t* panel, long panel_words, long begin,
                         long end, long words, const Meanwhile& meanwhile) {
    for (long k = begin; k < end; k += kSide) {
        each_tile<R>([&]<int Row>() {
            const RowWords of_row(x + at.row[Row] * stride, stride, at.rows, k, words);
            Tiles::template load<kRowTile + Row>(of_row.from, of_row.stride);
        });
        meanwhile(k);
        each_tile<C>([&]<int Half>() {
            constexpr int weights = kWeightTile + Half % 2;
            Tiles::template load<weights>(panel + Half / 2 * panel_words + k * kPanel + Half % 2 * kLanes, kPanelBytes);
            each_tile<R>([&]<int Row>() { Tiles::template add<Row * C + Half, kRowTile + Row, weights>(); });
        });
    }
}

// Multiplies rows [first, end) with panels [panel, panel_end) over words [begin, end_word) of k, and stores the products, or adds them
// to what is there. to: that of row 0 and panel 0; `to_stride` numbers from row to row. meanwhile<Panels>(k) is called for each
// product of that many panels.
template <class Tiles, bool Add, class Meanwhile>
inline void multiply_rows(const uint32_t* x, long stride, long first, long end, const uint32_t* panels, long panel_words, long panel,
                          long panel_end, long begin, long end_word, float* to, long to_stride, const Meanwhile& meanwhile) {
    const auto multiply = [&]<int Panels>() {
        for (long row = first; row < end; row += kSide) {
            const RowTiles<1> at{{row}, int(std::min<long>(kSide, end - row)), row};
            float* sums = to + row * to_stride + panel * kPanel;
            Tiles::hold(at.rows);
            each_tile<2 * Panels>([&]<int I>() {
                if constexpr (Add)
                    Tiles::template load<I>(sums + I * kLanes, to_stride * 4);
                else
                    Tiles::template zero<I>();
            });
            add_products<Tiles, 1, 2 * Panels>(x, stride, at, panels + panel * panel_words, panel_words, begin, end_word, end_word,
                                               [&](long k) { meanwhile.template operator()<Panels>(k); });
            each_tile<2 * Panels>([&]<int I>() { Tiles::template store<I>(sums + I * kLanes, to_stride * 4); });
        }
        panel += Panels;
    };
    while (panel + 2 <= panel_end) multiply.template operator()<2>();
    if (panel < panel_end) multiply.template operator()<1>();
}

// Prefetches sixteen words of k of a panel. A product of few rows does so a little ahead; for more rows, panels stay in a cache.
inline void prefetch_words(const uint32_t* from) {
    for (long line = 0; line < 2 * kSide; line++) _mm_prefetch((const char*)(from + line * kLanes), _MM_HINT_T1);
}

// Sums of one tile of rows and one panel.
struct alignas(64) PanelSums {
    F16 of[kSide][2];
};

// Multiplies R tiles of rows with a panel of bfloat16.
template <class Tiles, int R, class Out>
inline void panel_product(const Rows& x, const RowTiles<R>& at, const Weight& w, long panel, bool prefetch, const Out& out) {
    PanelSums sums[R];
    Tree<R * kSide * 2> tree;
    const uint32_t* from = w.panel(panel);
    const long each = w.words / w.parts;
    for (long part = 0; part < w.parts; part++) {
        each_tile<R * 2>([]<int I>() { Tiles::template zero<I>(); });
        add_products<Tiles, R, 2>(x.words, x.stride, at, from, 0, part * each, (part + 1) * each, w.words, [&](long k) {
            if (prefetch) prefetch_words(from + k * kPanel + kAheadWords);
        });
        each_tile<R * 2>([&]<int I>() { Tiles::template store<I>(&sums[I / 2].of[0][I % 2], kPanelBytes); });
        if (w.parts > 1) tree.add(part, sums[0].of[0], R == 1 ? 2 * at.rows : R * kSide * 2);
    }
    at.each_new([&](long row, int tile, long i) { out(row, panel * kPanel, sums[tile].of[i][0], sums[tile].of[i][1]); });
}

// Computes sums of one tile of rows and half a panel whose groups are scaled. groups: of k. multiply<Sum, X, W>() multiplies the
// tiles of one group. fold(total, sums, group, row) returns the total with the sums of one more group. meanwhile(group) is called
// for each group, for prefetches.
template <class Tiles, class Multiply, class Fold, class Meanwhile>
inline void group_sums(const uint32_t* x, long stride, const RowTiles<1>& at, const uint32_t* half, long groups, long parts,
                       const Multiply& multiply, const Fold& fold, const Meanwhile& meanwhile, F16 (&total)[kSide]) {
    alignas(64) int32_t sums[kGroupTiles][kSide][kSide];
    Tree<kSide> tree;
    const long each = groups / parts;
    for (long part = 0; part < parts; part++) {
        F16 sum[kSide];
        for (auto& one : sum) one = zeros();
        for (long group = part * each, end = (part + 1) * each; group < end; group += kGroupTiles) {
            const long count = std::min<long>(kGroupTiles, end - group);
            each_tile<kGroupTiles>([&]<int I>() {
                if (I >= count) return;
                Tiles::template zero<I>();
                Tiles::template load<kRowTile + I % 2>(x + at.row[0] * stride + (group + I) * kSide, stride * 4);
                Tiles::template load<kWeightTile + I % 2>(half + (group + I) * kSide * kPanel, kPanelBytes);
                multiply.template operator()<I, kRowTile + I % 2, kWeightTile + I % 2>();
                Tiles::template store<I>(sums[I], kTileBytes);
                meanwhile(group + I);
            });
            for (long i = 0; i < count; i++) {
                if (at.rows == kSide) {
                    PDSERVE_UNROLL(16)
                    for (int row = 0; row < kSide; row++) sum[row] = fold(sum[row], sums[i][row], group + i, at.row[0] + row);
                } else {
                    for (int row = 0; row < at.rows; row++) sum[row] = fold(sum[row], sums[i][row], group + i, at.row[0] + row);
                }
            }
        }
        std::copy(sum, sum + kSide, total);
        if (parts > 1) tree.add(part, total, at.rows);
    }
}

// Multiplies one tile of rows with a panel of 8-bit integers. The sums of groups are exact, so the bits are those of other sets.
template <class Tiles, class Out>
inline void panel_product8(const Rows& x, const RowTiles<1>& at, const Weight& w, long panel, bool prefetch, const Out& out) {
    F16 total[2][kSide];
    const uint32_t* from = w.panel(panel);
    const auto multiply = []<int Sum, int X, int W>() { Tiles::template add_bytes<Sum, X, W>(); };
    const auto fold = [&](F16 sum, const int32_t* products, long group, long row) {
        const long place = x.group(row) + group;
        return fma(to_floats(load_words(products) + broadcast(x.offsets[place])), broadcast(x.scales[place]), sum);
    };
    for (int half = 0; half < 2; half++)
        group_sums<Tiles>(x.words, x.stride, at, from + half * kLanes, w.words / kSide, w.parts, multiply, fold, [&](long group) {
            if (prefetch && half == 0) prefetch_words(from + group * kSide * kPanel + kAheadWords);
        }, total[half]);
    const F16 low = load(w.scales + panel * kPanel), high = load(w.scales + panel * kPanel + kLanes);
    at.each_new([&](long row, int, long i) { out(row, panel * kPanel, total[0][i] * low, total[1][i] * high); });
}

// Writes the codes of a panel of 4-bit weights as bfloat16, laid out as other panels. to: [words, kPanel].
inline void unpack4(const Weight& w, const uint32_t* panel, uint32_t* to) {
    const Table table = code_table();
    for (long k = 0; k < w.words; k += 2) {
        const uint32_t* line = panel + k / kGroup4Words * kGroup4Stride + 2 * kLanes + k % kGroup4Words / 2 * kLanes;
        _mm_prefetch((const char*)(line + kAheadWords), _MM_HINT_T1);
        I16 weights[2][2];
        words_of(load_words(line), table, weights);
        for (int next = 0; next < 2; next++)
            for (int half = 0; half < 2; half++) store_words(to + (k + next) * kPanel + half * kLanes, weights[next][half]);
    }
}

// Multiplies one tile of rows with a panel of four bits, whose codes are in x.codes.
template <class Tiles, class Out>
inline void panel_product4(const Rows& x, const RowTiles<1>& at, const Weight& w, long panel, const Out& out) {
    F16 total[2][kSide];
    const long groups = w.words / kGroup4Words;
    const auto multiply = []<int Sum, int X, int W>() { Tiles::template add<Sum, X, W>(); };
    for (int half = 0; half < 2; half++) {
        const auto fold = [&](F16 sum, const int32_t* products, long group, long row) {
            const bf16* scales = (const bf16*)(w.panel(panel) + group * kGroup4Stride) + half * kLanes;
            sum = fma(load((const float*)products), load_bf16(scales), sum);
            return fma(broadcast(x.sums[row * groups + group]), load_bf16(scales + kPanel), sum);
        };
        group_sums<Tiles>(x.words, x.stride, at, x.codes + half * kLanes, groups, w.parts, multiply, fold, [](long) {}, total[half]);
    }
    at.each_new([&](long row, int, long i) { out(row, panel * kPanel, total[0][i], total[1][i]); });
}

// Multiplies as `multiply_by` does. A single tile of rows prefetches the weights that it needs a little later.
template <class Tiles, class Out>
void multiply_tiles(const Rows& x, long rows, const Weight& w, long panel, long panel_end, const Out& out) {
    const long block = std::max<long>(2 * kSide, kBlockBytes / (x.stride * 4) / (2 * kSide) * (2 * kSide));
    const bool prefetch = rows <= 2 * kSide;
    for (long first = 0; first < rows; first += block) {
        const long end = std::min(rows, first + block);
        for (long p = panel; p < panel_end; p++) {
            if (w.bits == 16)
                row_tiles<Tiles>(first, end, [&](const auto& at) { panel_product<Tiles>(x, at, w, p, prefetch, out); });
            if (w.bits == 8)
                row_tiles<Tiles, 1>(first, end, [&](const auto& at) { panel_product8<Tiles>(x, at, w, p, prefetch, out); });
            if (w.bits == 4) {
                unpack4(w, w.panel(p), x.codes);
                row_tiles<Tiles, 1>(first, end, [&](const auto& at) { panel_product4<Tiles>(x, at, w, p, out); });
            }
        }
    }
}

}  // namespace pdserve
