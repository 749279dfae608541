// Causal grouped-query attention that reads K and V where they lie in the pool's blocks.
//
// A sequence's positions are cut into tiles of kTile and chunks of kChunk, both counted from its beginning. A row goes
// through the tiles of a chunk with an online softmax (Milakov and Gimelshein 2018), and the chunks are merged from
// the first upwards. Products run in the order of matmul.h. So a row's bits depend on its sequence alone: positions
// behind it get weight 0 exactly, and a tile all behind it is passed over. Chunks are also what lets several threads
// share one long decode. Weights are rounded to bfloat16 for the product with V, as V is; sums are float32.
#pragma once

#include <algorithm>
#include <limits>

#include "arena.h"
#include "matmul.h"

namespace pdserve {

constexpr int kTile = 64;
constexpr int kChunk = 256;
constexpr int kQueryTile = 64;  // tokens of a prompt that share a tile of K and V once it is laid out
constexpr long kMostDim = 512;    // of a head
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Where one sequence's K and V of one layer and one head lie.
struct Paged {
    const bf16* pool;
    const int32_t* table;
    long block_size, dim;
    long block_stride;  // elements from a block to the next
    long key, value;    // elements from a block's start to this layer's and head's K and V

    const bf16* row(long position, long part) const {
        return pool + table[position / block_size] * block_stride + part + position % block_size * dim;
    }

    // f(i, row) for positions [first, first + count), without a division for each; row as `row(first + i, 0)`.
    template <class F>
    void each(long first, long count, const F& f) const {
        long block = first / block_size, offset = first % block_size;
        for (long i = 0; i < count; block++, offset = 0) {
            const bf16* row = pool + table[block] * block_stride + offset * dim;
            for (long end = std::min(count, i + block_size - offset); i < end; i++, row += dim) f(i, row);
        }
    }
};

// One thread's room. rows: at most kQueryTile * group.
struct AttentionScratch {
    long rows = 0, dim = 0;  // dim is padded to whole panels
    Lines<uint32_t> query, keys, values, weights;
    Lines<float> scores, result, merged, top, total, factor, merged_top, merged_total;

    void fit(long rows_needed, long dim_padded) {
        if (rows_needed <= rows && dim_padded == dim) return;
        rows = rows_needed, dim = dim_padded;
        query.assign(rows * dim / 2, 0);
        keys.assign(kTile * dim / 2, 0);
        values.assign(kTile * dim / 2, 0);
        weights.assign(rows * kTile / 2, 0);
        scores.assign(rows * kTile, 0);
        result.assign(rows * dim, 0);
        merged.assign(rows * dim, 0);
        for (auto* one : {&top, &total, &factor, &merged_top, &merged_total}) one->assign(rows, 0);
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

// K of `count` positions as panels of positions, V as panels of dimensions. Rows from `count` on are zeros: what a
// block holds behind a sequence's end is never looked at.
inline void lay_out(const Paged& kv, long first, long count, long padded, uint32_t* keys, uint32_t* values) {
    const long words = padded / 2;
    alignas(64) static const bf16 zeros[kMostDim] = {};
    const bf16 *key[kTile], *value[kTile];
    for (long i = count; i < kTile; i++) key[i] = value[i] = zeros;
    kv.each(first, count, [&](long i, const bf16* row) { key[i] = row + kv.key, value[i] = row + kv.value; });
    for (long group = 0; group < kTile; group += kLanes) {
        uint32_t* panel = keys + group / kPanel * words * kPanel + group % kPanel;
        for (long from = 0; from < padded; from += 32) {
            const __mmask16 pairs = pairs_left(kv.dim, from);
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(pairs, key[group + i] + from);
            transpose16(r);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + (from / 2 + i) * kPanel, r[i]);
        }
    }
    const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                          4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
    for (long from = 0; from < padded; from += 32) {
        uint32_t* panel = values + from / kPanel * (kTile / 2) * kPanel;
        const __mmask16 pairs = pairs_left(kv.dim, from);
        for (long i = 0; i < kTile; i += 2) {
            const __m512i a = _mm512_maskz_loadu_epi32(pairs, value[i] + from);
            const __m512i b = _mm512_maskz_loadu_epi32(pairs, value[i + 1] + from);
            _mm512_storeu_si512(panel + i / 2 * kPanel, _mm512_permutex2var_epi16(a, even, b));
            _mm512_storeu_si512(panel + i / 2 * kPanel + kLanes, _mm512_permutex2var_epi16(a, odd, b));
        }
    }
}

inline void ask_for(const Paged& kv, long first, long count) {
    kv.each(first, count, [&](long, const bf16* row) {
        for (long part : {kv.key, kv.value})
            for (long from = 0; from < kv.dim; from += 32) _mm_prefetch((const char*)(row + part + from), _MM_HINT_T1);
    });
}

// One row of scores to weights. Only the first `visible` positions count, at least one.
inline void soften(const float* scores, long visible, float scale, float& top, float& total, float& factor, uint32_t* out) {
    bf16* weights = (bf16*)out;
    __m512 value[kTile / kLanes], highest = _mm512_set1_ps(top);
    for (int i = 0; i < kTile / kLanes; i++) {
        const __mmask16 seen = visible > i * kLanes ? first_lanes(visible - i * kLanes) : __mmask16(0);
        value[i] = _mm512_mask_mul_ps(_mm512_set1_ps(kNone), seen, _mm512_loadu_ps(scores + i * kLanes), _mm512_set1_ps(scale));
        highest = _mm512_max_ps(highest, value[i]);
    }
    const float raised = _mm512_reduce_max_ps(highest);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < kTile / kLanes; i++) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(exp_lanes(_mm512_sub_ps(value[i], _mm512_set1_ps(raised))));
        _mm256_storeu_si256((__m256i*)(weights + i * kLanes), rounded);
        sum = _mm512_add_ps(sum, widen(rounded));
    }
    factor = _mm512_cvtss_f32(exp_lanes(_mm512_set1_ps(top - raised)));
    total = total * factor + _mm512_reduce_add_ps(sum);
    top = raised;
}

// Rows of one KV head over one chunk: rows r * group + g is query head g of the token at position + r. Leaves sums
// in scratch.result, their weights' sum in total and the largest score in top.
inline void attend_chunk(const Paged& kv, AttentionScratch& s, long position, long tokens, long group, long chunk, float scale) {
    const long rows = tokens * group, words = s.dim / 2;
    const long end = std::min<long>((chunk + 1) * kChunk, position + tokens);
    std::fill_n(s.top.begin(), rows, kNone);
    std::fill_n(s.total.begin(), rows, 0.0f);
    std::fill_n(s.result.begin(), rows * s.dim, 0.0f);
    for (long first = chunk * kChunk; first < end; first += kTile) {
        const long count = std::min<long>(kTile, end - first);
        if (first + kTile < end) ask_for(kv, first + kTile, std::min<long>(kTile, end - first - kTile));
        lay_out(kv, first, count, s.dim, s.keys.data(), s.values.data());
        const long hidden = std::max<long>(0, first - position) * group;  // rows before it see nothing of this tile
        for (long panel = 0; panel < kTile; panel += kPanel)
            row_pieces(hidden, rows, [&]<int R>(long row) {
                __m512 sum[R][2];
                for (auto& halves : sum) halves[0] = halves[1] = _mm512_setzero_ps();
                tile<Bf16Dot, R>(&s.query[row * words], words, &s.keys[panel * words], words, sum);
                for (int r = 0; r < R; r++)
                    for (int h = 0; h < 2; h++) _mm512_storeu_ps(&s.scores[(row + r) * kTile + panel + h * kLanes], sum[r][h]);
            });
        for (long row = hidden; row < rows; row++)
            soften(&s.scores[row * kTile], std::min(count, position + row / group + 1 - first), scale, s.top[row], s.total[row],
                   s.factor[row], &s.weights[row * kTile / 2]);
        for (long panel = 0; panel < s.dim; panel += kPanel)
            row_pieces(hidden, rows, [&]<int R>(long row) {
                __m512 sum[R][2];
                float* at = &s.result[row * s.dim + panel];
                for (int r = 0; r < R; r++)
                    for (int h = 0; h < 2; h++)
                        sum[r][h] = _mm512_mul_ps(_mm512_loadu_ps(at + r * s.dim + h * kLanes), _mm512_set1_ps(s.factor[row + r]));
                tile<Bf16Dot, R>(&s.weights[row * kTile / 2], kTile / 2, &s.values[panel * kTile / 2], kTile / 2, sum);
                for (int r = 0; r < R; r++)
                    for (int h = 0; h < 2; h++) _mm512_storeu_ps(at + r * s.dim + h * kLanes, sum[r][h]);
            });
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
