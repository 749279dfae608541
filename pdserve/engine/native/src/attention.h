// Causal grouped-query attention that reads K and V where they lie in the pool's blocks.
//
// A sequence's positions are cut into tiles of kTile and chunks of kChunk, both counted from its beginning. A row goes
// through the tiles of a chunk with an online softmax (Milakov and Gimelshein 2018), and the chunks are merged from
// the first upwards. Products run in the order of matmul.h. So a row's bits depend on its sequence alone: positions
// behind it get weight 0 exactly, and a tile all behind it is passed over. Chunks are also what lets several threads
// share one long decode. Weights are rounded to bfloat16 for the product with V, as V is; sums are float32.
//
// Quantised numbers enter the products as they are stored; the scales of keys multiply scores, those of values multiply
// weights before they are rounded.
#pragma once

#include <algorithm>
#include <limits>

#include "arena.h"
#include "kv_format.h"
#include "matmul.h"

namespace pdserve {

constexpr int kTile = 64;
constexpr int kChunk = 256;
constexpr int kQueryTile = 64;  // tokens of a prompt that share a tile of K and V once it is laid out
constexpr long kMostDim = 512;    // of a head
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Where one sequence's K and V of one layer and one head lie. All in bytes but positions and `dim`.
template <class Kv>
struct Paged {
    uint8_t* pool;
    const int32_t* table;
    long block_size, dim;
    long block_stride;  // from a block to the next
    long key, value;    // from a block's start to this layer's and head's K and V
    long key_scale, value_scale;

    uint8_t* block(long position) const { return pool + table[position / block_size] * block_stride; }

    uint8_t* row(long position, long part) const { return block(position) + part + position % block_size * Kv::bytes(dim); }

    // f(i, n, offset, block): positions [first + i, first + i + n) begin at `offset` of the block that starts there.
    template <class F>
    void each_block(long first, long count, const F& f) const {
        long offset = first % block_size;
        const int32_t* next = table + first / block_size;
        for (long i = 0, n; i < count; i += n, offset = 0) {
            n = std::min(count - i, block_size - offset);
            f(i, n, offset, pool + *next++ * block_stride);
        }
    }

    // f(i, row) for positions [first, first + count), without a division for each; row as `row(first + i, 0)`.
    template <class F>
    void each(long first, long count, const F& f) const {
        const long step = Kv::bytes(dim);
        each_block(first, count, [&](long i, long n, long offset, const uint8_t* block) {
            const uint8_t* row = block + offset * step;
            for (const long end = i + n; i < end; i++, row += step) f(i, row);
        });
    }
};

// One thread's room. rows: at most kQueryTile * group.
struct AttentionScratch {
    long rows = 0, dim = 0;  // dim is padded to whole panels
    Lines<uint32_t> query, keys, values, weights;
    Lines<float> scores, result, merged, top, total, factor, merged_top, merged_total;
    alignas(64) float key_scales[kTile], value_scales[kTile];  // of the tile's positions, where KV is quantised

    void fit(long rows_needed, long dim_padded) {
        if (rows_needed <= rows && dim_padded == dim) return;
        query.assign(rows_needed * dim_padded / 2, 0);
        keys.assign(kTile * dim_padded / 2, 0);
        values.assign(kTile * dim_padded / 2, 0);
        weights.assign(rows_needed * kTile / 2, 0);
        scores.assign(rows_needed * kTile, 0);
        result.assign(rows_needed * dim_padded, 0);
        merged.assign(rows_needed * dim_padded, 0);
        for (auto* one : {&top, &total, &factor, &merged_top, &merged_total}) one->assign(rows_needed, 0);
        rows = rows_needed, dim = dim_padded;  // last: there may have been no memory for all of it
    }
};

inline void transpose16(__m512i (&r)[16]) {
    __m512i t[16];
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
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// The pairs of dimensions from `from` on that a row of `dim` has.
inline __mmask16 pairs_left(long dim, long from) { return first_lanes((dim - from) / 2); }

constexpr int kFewRows = 6;  // a decode's; more of them compute for so long that memory keeps up anyhow

// Lines with each pair of dimensions or positions: a quarter of a tile's in each of its four loops.
template <class Kv>
constexpr int kAtOnce = Kv::bytes(1) > 2 ? 2 : 1;

// The lines of K and V of a tile that comes later, asked for a few at a time while another is computed. All at once would
// fill the core's miss buffers; then it waits, and after that memory does.
template <class Kv>
class Asker {
public:
    Asker() = default;

    // Of positions [first, first + count), at most kTile.
    Asker(const Paged<Kv>& kv, long first, long count) {
        for (const long part : {kv.key, kv.value})
            kv.each_block(first, count, [&](long, long n, long offset, const uint8_t* block) {
                const uint8_t* from = block + part + offset * Kv::bytes(kv.dim);
                runs_[end_++] = {from, from + n * Kv::bytes(kv.dim)};
            });
    }

    // With word k of a product of `Panels` panels at a time.
    template <int Panels>
    void during(long k) {
        if constexpr (Panels == 2)
            if (k % 4 == 0) ask(8 * kAtOnce<Kv>);
    }

    // In pieces of 8 where they are small: with 4, and with 16, decodes at 2,048 tokens took a twentieth longer. Never in
    // line: where gcc did so they took 1.03 times as long.
    [[gnu::noinline]] void ask(long lines) {
        for (; lines > 0; lines--) {
            if (line_ >= stop_) {
                if (run_ == end_) return;
                line_ = runs_[run_].from, stop_ = runs_[run_++].to;
            }
            _mm_prefetch((const char*)line_, _MM_HINT_T0);
            line_ += 64;
        }
    }

private:
    struct Run {
        const uint8_t *from, *to;
    };
    Run runs_[2 * kTile];
    long run_ = 0, end_ = 0;
    const uint8_t *line_ = nullptr, *stop_ = nullptr;
};

// Where the rows of a tile's positions are. From `count` on they are zeros: what a block holds behind a sequence's end is
// never looked at.
template <class Kv>
struct TileRows {
    const uint8_t* row[kTile];

    TileRows(const Paged<Kv>& kv, long part, long first, long count) {
        alignas(64) static const float zeros[kMostDim] = {};
        std::fill(row + count, row + kTile, (const uint8_t*)zeros);
        kv.each(first, count, [&](long i, const uint8_t* at) { row[i] = at + part; });
    }
};

// K as panels of positions.
template <class Kv>
inline void lay_out_keys(const Paged<Kv>& kv, long first, long count, long padded, uint32_t* keys, Asker<Kv>& asker) {
    const TileRows<Kv> rows(kv, kv.key, first, count);
    const long words = padded / 2;
    for (long group = 0; group < kTile; group += kLanes) {
        uint32_t* panel = keys + group / kPanel * words * kPanel + group % kPanel;
        for (long from = 0; from < padded; from += 32) {
            const __mmask16 pairs = pairs_left(kv.dim, from);
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = Kv::load(rows.row[group + i], from, pairs);
            asker.ask(8 * kAtOnce<Kv>);
            transpose16(r);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + (from / 2 + i) * kPanel, r[i]);
        }
    }
}

// V as panels of dimensions.
template <class Kv>
inline void lay_out_values(const Paged<Kv>& kv, long first, long count, long padded, uint32_t* values, Asker<Kv>& asker) {
    const TileRows<Kv> rows(kv, kv.value, first, count);
    const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                          4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
    for (long from = 0; from < padded; from += 32) {
        uint32_t* panel = values + from / kPanel * (kTile / 2) * kPanel;
        const __mmask16 pairs = pairs_left(kv.dim, from);
        for (long i = 0; i < kTile; i += 2) {
            if (i % 16 == 0) asker.ask(8 * kAtOnce<Kv>);
            const __m512i a = Kv::load(rows.row[i], from, pairs), b = Kv::load(rows.row[i + 1], from, pairs);
            _mm512_storeu_si512(panel + i / 2 * kPanel, _mm512_permutex2var_epi16(a, even, b));
            _mm512_storeu_si512(panel + i / 2 * kPanel + kLanes, _mm512_permutex2var_epi16(a, odd, b));
        }
    }
}

// The scales of each of `count` positions, 0 behind them; those of keys times `scale`.
template <class Kv>
inline void take_scales(const Paged<Kv>& kv, long first, long count, float scale, float* keys, float* values) {
    std::fill(keys + count, keys + kTile, 0.0f);
    std::fill(values + count, values + kTile, 0.0f);
    kv.each_block(first, count, [&](long i, long n, long, const uint8_t* block) {
        std::fill_n(keys + i, n, *(const float*)(block + kv.key_scale) * scale);
        std::fill_n(values + i, n, *(const float*)(block + kv.value_scale));
    });
}

// One row of scores to weights. Only the first `visible` positions count, at least one. Where KV is quantised, the key
// scales hold `scale` already.
template <bool Scaled>
inline void soften(const float* scores, long visible, float scale, const float* key_scales, const float* value_scales, float& top,
                   float& total, float& factor, uint32_t* out) {
    bf16* weights = (bf16*)out;
    __m512 value[kTile / kLanes], highest = _mm512_set1_ps(top);
    for (int i = 0; i < kTile / kLanes; i++) {
        const __mmask16 seen = visible > i * kLanes ? first_lanes(visible - i * kLanes) : __mmask16(0);
        const __m512 by = Scaled ? _mm512_load_ps(key_scales + i * kLanes) : _mm512_set1_ps(scale);
        value[i] = _mm512_mask_mul_ps(_mm512_set1_ps(kNone), seen, _mm512_loadu_ps(scores + i * kLanes), by);
        highest = _mm512_max_ps(highest, value[i]);
    }
    const float raised = _mm512_reduce_max_ps(highest);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < kTile / kLanes; i++) {
        const __m512 weight = exp_coarse(_mm512_sub_ps(value[i], _mm512_set1_ps(raised)));
        const __m512 scaled = Scaled ? _mm512_mul_ps(weight, _mm512_load_ps(value_scales + i * kLanes)) : weight;
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(scaled);
        _mm256_storeu_si256((__m256i*)(weights + i * kLanes), rounded);
        sum = _mm512_add_ps(sum, Scaled ? weight : widen(rounded));
    }
    factor = _mm512_cvtss_f32(exp_lanes(_mm512_set1_ps(top - raised)));
    total = total * factor + sum_lanes(sum);
    top = raised;
}

// f<R, Panels>(row, panel): pieces of rows [first, end) and of `panels` panels. With few rows two panels at a time: else the
// multiply-adds would wait for each other.
template <class Function>
inline void pieces(long first, long end, long panels, const Function& f) {
    long panel = 0;
    if (end - first <= kFewRows)
        for (; panel + 2 <= panels; panel += 2)
            row_pieces<kFewRows>(first, end, [&]<int R>(long row) { f.template operator()<R, 2>(row, panel); });
    for (; panel < panels; panel++) row_pieces(first, end, [&]<int R>(long row) { f.template operator()<R, 1>(row, panel); });
}

// Rows [first, end) of the scratch's queries times its keys.
template <class Kv>
inline void score_tile(AttentionScratch& s, long first, long end, Asker<Kv>& asker) {
    const long words = s.dim / 2;
    pieces(first, end, kTile / kPanel, [&]<int R, int Panels>(long row, long panel) {
        __m512 sum[R][2 * Panels];
        for (auto& of_row : sum) std::fill_n(of_row, 2 * Panels, _mm512_setzero_ps());
        tile<Bf16Dot, R, Panels>(&s.query[row * words], words, &s.keys[panel * kPanel * words], kPanel * words, words, sum,
                                 [&](long k) { asker.template during<Panels>(k); });
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++) _mm512_storeu_ps(&s.scores[(row + r) * kTile + panel * kPanel + h * kLanes], sum[r][h]);
    });
}

// And of its weights times its values, added to the result so far.
template <class Kv>
inline void add_values(AttentionScratch& s, long first, long end, Asker<Kv>& asker) {
    constexpr long words = kTile / 2;
    pieces(first, end, s.dim / kPanel, [&]<int R, int Panels>(long row, long panel) {
        __m512 sum[R][2 * Panels];
        float* at = &s.result[row * s.dim + panel * kPanel];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++)
                sum[r][h] = _mm512_mul_ps(_mm512_loadu_ps(at + r * s.dim + h * kLanes), _mm512_set1_ps(s.factor[row + r]));
        tile<Bf16Dot, R, Panels>(&s.weights[row * words], words, &s.values[panel * kPanel * words], kPanel * words, words, sum,
                                 [&](long k) { asker.template during<Panels>(k); });
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++) _mm512_storeu_ps(at + r * s.dim + h * kLanes, sum[r][h]);
    });
}

// Rows of one KV head over one chunk: rows r * group + g is query head g of the token at position + r. Leaves sums
// in scratch.result, their weights' sum in total and the largest score in top. `seen`: where the caller will stop looking;
// following(): the asker of what it looks at after that.
template <class Kv, class Following>
inline void attend_chunk(const Paged<Kv>& kv, AttentionScratch& s, long position, long tokens, long group, long chunk, long seen,
                         float scale, const Following& following) {
    const long rows = tokens * group;
    const long end = std::min<long>((chunk + 1) * kChunk, position + tokens);
    std::fill_n(s.top.begin(), rows, kNone);
    std::fill_n(s.total.begin(), rows, 0.0f);
    std::fill_n(s.result.begin(), rows * s.dim, 0.0f);
    for (long first = chunk * kChunk; first < end; first += kTile) {
        const long count = std::min<long>(kTile, end - first);
        const long ahead = std::min<long>(kTile, seen - first - kTile);
        Asker<Kv> asker = ahead > 0 ? Asker<Kv>(kv, first + kTile, ahead) : following();
        lay_out_keys(kv, first, count, s.dim, s.keys.data(), asker);
        if constexpr (Kv::kScaled) take_scales(kv, first, count, scale, s.key_scales, s.value_scales);
        const long hidden = std::max<long>(0, first - position) * group;  // rows before it see nothing of this tile
        score_tile(s, hidden, rows, asker);
        for (long row = hidden; row < rows; row++)
            soften<Kv::kScaled>(&s.scores[row * kTile], std::min(count, position + row / group + 1 - first), scale, s.key_scales,
                                s.value_scales, s.top[row], s.total[row], s.factor[row], &s.weights[row * kTile / 2]);
        lay_out_values(kv, first, count, s.dim, s.values.data(), asker);
        add_values(s, hidden, rows, asker);
    }
}

// One more chunk into the running result of a row; a chunk of which the row saw nothing changes nothing.
inline void merge(const float* part, float part_top, float part_total, float* sum, float& top, float& total, long dim) {
    if (part_top == kNone) return;
    const float raised = std::max(top, part_top);
    const __m512 keep = exp_lanes(_mm512_set1_ps(top - raised)), take = exp_lanes(_mm512_set1_ps(part_top - raised));
    for (long i = 0; i < dim; i += kLanes) {
        const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(sum + i), keep);
        _mm512_storeu_ps(sum + i, _mm512_fmadd_ps(_mm512_loadu_ps(part + i), take, kept));
    }
    total = total * _mm512_cvtss_f32(keep) + part_total * _mm512_cvtss_f32(take);
    top = raised;
}

inline void finish_row(const float* sum, float total, long dim, bf16* to) {
    const __m512 whole = _mm512_set1_ps(total);
    for (long i = 0; i < dim; i += kLanes) store_bf16(to + i, _mm512_div_ps(_mm512_loadu_ps(sum + i), whole), first_lanes(dim - i));
}

// The rotated queries of one KV head, token after token, into the scratch; `stride` elements from token to token.
inline void take_queries(const bf16* query, long stride, long tokens, long group, long dim, AttentionScratch& s) {
    bf16* to = (bf16*)s.query.data();
    for (long row = 0; row < tokens * group; row++)
        std::memcpy(to + row * s.dim, query + row / group * stride + row % group * dim, dim * sizeof(bf16));
}

}  // namespace pdserve
