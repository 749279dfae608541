// Causal grouped-query attention that reads K and V in place, in the blocks of the pool.
//
// With latent attention, a token stores one row. It is the key, and its first numbers are the value.
//
// The positions of a sequence are cut into chunks of kChunk, counted from its beginning, and a chunk into tiles of kTile. First a
// row gets its scores of a whole chunk, tile by tile. Then it gets its weights by one softmax over the chunk. Then the values of
// the tiles are added to its sum. The chunks are merged from the first upwards, as in an online softmax (Milakov and Gimelshein
// 2018). Products run in the order of matmul.h. So the bits of a row depend only on its sequence: later positions get weight 0
// exactly, and a tile of only later positions is skipped. Chunks also let several threads share one long decode. Weights are
// rounded to bfloat16 for the product with V, because V is bfloat16; sums are float32.
//
// Quantised numbers enter the products as they are stored. The scales of keys multiply scores. The scales of values multiply
// weights before these are rounded.
//
// With a window, a row begins with the tile that holds the first position that it sees. Earlier positions of this tile get weight
// 0 exactly. Positions that no row of the task sees are not read, and neither are their entries in the table of blocks.
//
// A score that is not finite makes the sum of the row's weights NaN, so that no token is drawn from the row: a NaN in K alone
// would otherwise get weight 0, and nothing would show it.
#pragma once

#include <algorithm>
#include <limits>

#include "arena.h"
#include "kv_format.h"
#include "matmul.h"
#ifdef PDSERVE_AMX
#include "tile_products.h"
#endif

namespace pdserve {

constexpr int kTile = 64;
constexpr int kChunk = 256;
constexpr int kQueryTile = 64;  // tokens of a prompt that share a laid-out tile of K and V
constexpr long kLatentRows = 128;  // rows of a task of latent attention, which are wide: each head of each token is one
constexpr long kLeastQueryTile = 2;  // a task of one token is a decode, which may be cut into parts
constexpr long kMostDim = 640;    // most dimensions of a head; DeepSeek stores 576
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr long kUnlimited = 1L << 40;  // a window that no sequence reaches

// The function from products to scores, and the positions that a row sees.
struct Scoring {
    float scale;
    float softcap;  // 0 means no bound
    long window;    // kUnlimited means no window

    // Returns the first position that a token sees.
    long low(long position) const { return std::max<long>(0, position - window + 1); }
};

// The places of one sequence's K and V of one layer and one head. Sizes are in bytes, except positions and `dim`.
template <class Kv>
struct Paged {
    uint8_t* pool;
    const int32_t* table;
    long block_size, dim;
    long block_stride;  // from the start of a block to the start of the next
    long key, value;    // from the start of a block to K and V of this layer and head; the same place for latent attention
    long key_scale, value_scale;

    // Returns the places of a later head of the same layer.
    Paged later(long heads) const {
        Paged found = *this;
        const long bytes = heads * block_size * Kv::bytes(dim), scales = heads * long(sizeof(float));
        found.key += bytes, found.value += bytes, found.key_scale += scales, found.value_scale += scales;
        return found;
    }

    // Returns the bytes of this head in a block, scales included.
    long head_bytes() const { return (key == value ? 1 : 2) * (block_size * Kv::bytes(dim) + long(sizeof(float))); }

    // Copies this head of a block.
    void keep(const uint8_t* block, uint8_t* to) const {
        each_run([&](long at, long size) { std::memcpy(to, block + at, size), to += size; });
    }

    // Copies what `keep` has kept back into the block.
    void restore(const uint8_t* from, uint8_t* block) const {
        each_run([&](long at, long size) { std::memcpy(block + at, from, size), from += size; });
    }

    // Calls f(at, size) for the bytes [at, at + size) of a block that this head has.
    template <class F>
    void each_run(const F& f) const {
        const long size = block_size * Kv::bytes(dim), scale = long(sizeof(float));
        f(key, size), f(key_scale, scale);
        if (value != key) f(value, size), f(value_scale, scale);
    }

    uint8_t* block(long position) const { return pool + table[position / block_size] * block_stride; }

    uint8_t* row(long position, long part) const { return block(position) + part + position % block_size * Kv::bytes(dim); }

    // Calls f(i, n, offset, block) for each block: positions [first + i, first + i + n) are its tokens from `offset` on.
    template <class F>
    void each_block(long first, long count, const F& f) const {
        long offset = first % block_size;
        const int32_t* next = table + first / block_size;
        for (long i = 0, n; i < count; i += n, offset = 0) {
            n = std::min(count - i, block_size - offset);
            f(i, n, offset, pool + *next++ * block_stride);
        }
    }

    // Calls f(i, row) for positions [first, first + count), without a division for each. row is that of `row(first + i, 0)`.
    template <class F>
    void each(long first, long count, const F& f) const {
        const long step = Kv::bytes(dim);
        each_block(first, count, [&](long i, long n, long offset, const uint8_t* block) {
            const uint8_t* row = block + offset * step;
            for (const long end = i + n; i < end; i++, row += step) f(i, row);
        });
    }
};

// Prefetches what will be read, in the order in which it will be read, a few lines at a time while something else is computed. All
// lines at once would fill the core's miss buffers: then the core waits, and after that memory waits.
class Asker {
public:
    // Makes room for what one chunk adds, and for what the chunk before it has left.
    void fit(long heads) { runs_.reserve(2 * heads * (2 * kChunk + kTile)); }

    void clear() { runs_.clear(), run_ = credit_ = 0, line_ = stop_ = nullptr; }

    // Forgets what was asked for. What was not yet is still asked for first.
    void begin() {
        runs_.erase(runs_.begin(), runs_.begin() + run_);
        run_ = 0;
    }

    // Adds positions [first, first + count) of K or V. part: that of K or V. It never allocates, because threads must not.
    template <class Kv>
    void add(const Paged<Kv>& kv, long part, long first, long count) {
        at_once_ = Kv::bytes(1) > 2 ? 16 : 8;
        kv.each_block(first, count, [&](long, long n, long offset, const uint8_t* block) {
            const uint8_t* from = block + part + offset * Kv::bytes(kv.dim);
            if (runs_.size() < runs_.capacity()) runs_.push_back({from, from + n * Kv::bytes(kv.dim)});
        });
    }

    // Allows to ask for so many bytes more. Callers allow what they are about to read, so the distance stays the same.
    void allow(long bytes) { credit_ += bytes; }

    // Asks for some lines during word k of a product that computes `Panels` panels at a time.
    template <int Panels>
    void during(long k) {
        if constexpr (Panels == 2)
            if (k % 4 == 0 && credit_ > 0) [[unlikely]] ask();
    }

    // Asks for the next lines. Eight at once, twice for float32: with 4 at half the distance and with 16, decodes at 2,048 tokens took
    // longer. A version that did the same in fewer instructions was slower when memory was: eight prefetches at once fill the miss
    // buffers.
    [[gnu::noinline]] void ask() {
        for (long i = 0; i < at_once_ && credit_ > 0; i++) {
            if (line_ >= stop_) {
                if (run_ == long(runs_.size())) return;
                line_ = runs_[run_].from, stop_ = runs_[run_++].to;
            }
            _mm_prefetch((const char*)line_, _MM_HINT_T0);
            line_ += 64, credit_ -= 64;
        }
    }

private:
    struct Run {
        const uint8_t *from, *to;
    };
    std::vector<Run> runs_;
    long run_ = 0, credit_ = 0, at_once_ = 8;
    const uint8_t *line_ = nullptr, *stop_ = nullptr;
};

// The results of rows over the chunks so far. `dim`: numbers of a value, padded to whole panels.
struct Sums {
    Lines<float> sum, top, total;

    void fit(long rows, long dim) {
        sum.assign(rows * dim, 0);
        top.assign(rows, 0), total.assign(rows, 0);
    }

    void clear(long rows, long dim) {
        std::fill_n(sum.begin(), rows * dim, 0.0f);
        std::fill_n(top.begin(), rows, kNone);
        std::fill_n(total.begin(), rows, 0.0f);
    }
};

// Working memory of one thread. rows: at most as many as a task has. heads: at most as many KV heads as a task has.
struct AttentionScratch {
    long rows = 0, heads = 0, early_rows = 0, dim = 0, value_dim = 0;  // numbers of a key and of a value, padded to whole panels
    Lines<uint32_t> query, keys, values;               // keys and values of one tile
    Lines<uint32_t> weights;                           // [rows, kChunk] bfloat16
    Lines<float> scores;                               // [rows, kChunk]
    Lines<float> result, top, total;
    Sums merged;
    Sums early;  // of the rows of drafts, over the chunks that no draft is written to
    Lines<float> key_scales, value_scales;             // [heads, kChunk], only for quantised KV
    Asker asker;

    void fit(long rows_needed, long heads_needed, long early_needed, long dim_padded, long value_padded) {
        const bool same = dim_padded == dim && value_padded == value_dim;
        if (rows_needed <= rows && heads_needed <= heads && early_needed <= early_rows && same) return;
        rows_needed = std::max(rows, rows_needed), heads_needed = std::max(heads, heads_needed);
        early_needed = std::max(early_rows, early_needed);
        early.fit(early_needed, value_padded);
        query.assign(rows_needed * dim_padded / 2, 0);
        keys.assign(kTile * dim_padded / 2, 0);
        values.assign(kTile * value_padded / 2, 0);
        weights.assign(rows_needed * kChunk / 2, 0);
        scores.assign(rows_needed * kChunk, 0);
        result.assign(rows_needed * value_padded, 0);
        merged.fit(rows_needed, value_padded);
        for (auto* one : {&top, &total}) one->assign(rows_needed, 0);
        for (auto* one : {&key_scales, &value_scales}) one->assign(heads_needed * kChunk, 0);
        asker.fit(heads_needed);
        rows = rows_needed, heads = heads_needed, early_rows = early_needed, dim = dim_padded, value_dim = value_padded;  // last: an allocation may have failed
    }
};

// Returns the mask of the sixteen pairs of dimensions from `from` on: those that a row of `dim` has.
inline Mask pairs_left(long dim, long from) { return first_lanes((dim - from) / 2); }

// The positions [first + from, first + end) of the tile that begins at `first`. The task reads no others of this tile.
struct Range {
    long first, from, end;
};

// The rows of a tile's positions. Outside of the range they point to zeros, so memory that the sequence does not hold is never
// read.
template <class Kv>
struct TileRows {
    const uint8_t* row[kTile];

    TileRows(const Paged<Kv>& kv, long part, const Range& range) {
        alignas(64) static const float zeros[kMostDim] = {};
        std::fill(row, row + range.from, (const uint8_t*)zeros);
        std::fill(row + range.end, row + kTile, (const uint8_t*)zeros);
        kv.each(range.first + range.from, range.end - range.from, [&](long i, const uint8_t* at) { row[range.from + i] = at + part; });
    }
};

// Lays K out as panels of positions: the groups of sixteen that hold one of the range.
template <class Kv>
inline void lay_out_keys(const Paged<Kv>& kv, const Range& range, long padded, uint32_t* keys, Asker& asker) {
    const TileRows<Kv> rows(kv, kv.key, range);
    const long words = padded / 2;
    for (long group = range.from / kLanes * kLanes; group < range.end; group += kLanes) {
        uint32_t* panel = keys + group / kPanel * words * kPanel + group % kPanel;
        for (long from = 0; from < padded; from += 32) {
            const Mask pairs = pairs_left(kv.dim, from);
            asker.ask();
            I16 r[16];
            PDSERVE_UNROLL(16)
            for (int i = 0; i < 16; i++) r[i] = Kv::load(rows.row[group + i], from, pairs);
            transpose(r);
            PDSERVE_UNROLL(16)
            for (int i = 0; i < 16; i++) store_words(panel + (from / 2 + i) * kPanel, r[i]);
        }
    }
}

constexpr long kPositions = 2 * kDepth;  // that a product with values takes at once

// Lays V out as panels of dimensions: the positions that are multiplied where one of the range is.
template <class Kv>
inline void lay_out_values(const Paged<Kv>& kv, const Range& range, long padded, uint32_t* values, Asker& asker) {
    const TileRows<Kv> rows(kv, kv.value, range);
    for (long from = 0; from < padded; from += 32) {
        uint32_t* panel = values + from / kPanel * (kTile / 2) * kPanel;
        const Mask pairs = pairs_left(kv.dim, from);
        for (long i = range.from / kPositions * kPositions; i < round_up(range.end, kPositions); i += 2) {
            if (i % 16 == 0) asker.ask();
            const I16 a = Kv::load(rows.row[i], from, pairs), b = Kv::load(rows.row[i + 1], from, pairs);
            I16 low, high;
            interleave(a, b, low, high);
            store_words(panel + i / 2 * kPanel, low);
            store_words(panel + i / 2 * kPanel + kLanes, high);
        }
    }
}

// Writes the scales of each position of the tile's range, and 0 for the others. The scales of keys are multiplied by `scale`.
template <class Kv>
inline void take_scales(const Paged<Kv>& kv, const Range& range, float scale, float* keys, float* values) {
    for (float* scales : {keys, values}) {
        std::fill(scales, scales + range.from, 0.0f);
        std::fill(scales + range.end, scales + kTile, 0.0f);
    }
    kv.each_block(range.first + range.from, range.end - range.from, [&](long i, long n, long, const uint8_t* block) {
        std::fill_n(keys + range.from + i, n, *(const float*)(block + kv.key_scale) * scale);
        std::fill_n(values + range.from + i, n, *(const float*)(block + kv.value_scale));
    });
}

// The positions [from, seen) of a chunk that a row sees, at least one. `from` may be negative.
struct Sight {
    long from, seen;

    bool whole(long i) const { return from <= i * kLanes && (i + 1) * kLanes <= seen; }
    Mask lanes(long i) const { return first_lanes(seen - i * kLanes) & ~first_lanes(std::max<long>(0, from - i * kLanes)); }
    long first_vector() const { return std::max<long>(0, from) / kLanes; }
    long end_vector() const { return (seen + kLanes - 1) / kLanes; }
};

// Turns the products of one row into scores, which are minus infinity where the row sees nothing, and returns the lanes of the
// largest. check: it stays 0 where all seen scores are finite, and becomes NaN elsewhere. With quantised KV, the key scales already
// contain the factor of scores.
template <bool Scaled, bool Capped>
inline F16 score_row(float* scores, Sight sight, const Scoring& how, const float* key_scales, F16& check) {
    const F16 none = broadcast(kNone), scale = broadcast(how.scale);
    F16 largest = none;
    check = zeros();
    for (long i = sight.first_vector(); i < sight.end_vector(); i++) {
        float* at = scores + i * kLanes;
        F16 score = load(at) * (Scaled ? load(key_scales + i * kLanes) : scale);
        const bool whole = sight.whole(i);
        check = fma(whole ? score : keep(sight.lanes(i), score), zeros(), check);
        if constexpr (Capped) score = capped(score, broadcast(how.softcap));
        if (!whole) score = select(sight.lanes(i), score, none);
        store(at, score);
        largest = max(largest, score);
    }
    return largest;
}

// Writes the weights of one row in all tiles that it sees, and returns the lanes of their sum and of `sum`. top: the largest score.
template <bool Scaled>
inline F16 weigh_row(const float* scores, Sight sight, const float* value_scales, float top, F16 sum, bf16* weights) {
    constexpr long each = kTile / kLanes;  // vectors of a tile
    const long first = sight.first_vector(), end = sight.end_vector();
    const auto put = [&](long i, __m256i halves) { _mm256_storeu_si256((__m256i*)(weights + i * kLanes), halves); };
    for (long i = first / each * each; i < first; i++) put(i, _mm256_setzero_si256());
    for (long i = first; i < end; i++) {
        const F16 weight = exp_coarse(load(scores + i * kLanes) - broadcast(top));
        const __m256i rounded = narrow(Scaled ? weight * load(value_scales + i * kLanes) : weight);
        put(i, rounded);
        sum = sum + (Scaled ? weight : widen(rounded));
    }
    for (long i = end; i % each != 0; i++) put(i, _mm256_setzero_si256());
    return sum;
}

// Turns the products of rows [row, row + count), at most sixteen, into weights. Sixteen rows are reduced together. sight(row)
// returns the positions that a row sees. scales_at(row) returns the place of its scales.
template <bool Scaled, bool Capped, class SightOf, class ScalesAt>
inline void soften(AttentionScratch& s, long row, long count, const Scoring& how, const SightOf& sight, const ScalesAt& scales_at) {
    F16 largest[kLanes], sums[kLanes];
    for (auto* lanes : {largest, sums}) std::fill_n(lanes, kLanes, zeros());
    for (long r = 0; r < count; r++)
        largest[r] = score_row<Scaled, Capped>(&s.scores[(row + r) * kChunk], sight(row + r), how, &s.key_scales[scales_at(row + r)],
                                               sums[r]);
    store(&s.top[row], fold_rows(largest, Max()), first_lanes(count));
    for (long r = 0; r < count; r++)
        sums[r] = weigh_row<Scaled>(&s.scores[(row + r) * kChunk], sight(row + r), &s.value_scales[scales_at(row + r)],
                                    s.top[row + r], sums[r], (bf16*)&s.weights[(row + r) * kChunk / 2]);
    store(&s.total[row], fold_rows(sums, Add()), first_lanes(count));
}

// Calls f<R, Panels>(row, panel) for pieces of rows [first, end) and of panels [panel, panels), two panels at a time: few rows of
// one panel would have too few multiply-adds that do not wait for each other.
template <class Function>
inline void pieces(long first, long end, long panel, long panels, const Function& f) {
    for (; panel + 2 <= panels; panel += 2)
            row_pieces<kPairRows>(first, end, [&]<int R>(long row) { f.template operator()<R, 2>(row, panel); });
    for (; panel < panels; panel++) row_pieces(first, end, [&]<int R>(long row) { f.template operator()<R, 1>(row, panel); });
}

#ifdef PDSERVE_AMX
// Returns what asks for lines as often in a product by tiles as `Asker::during` does in others.
inline auto asks_during(Asker& asker) {
    return [&asker]<int Panels>(long k) {
        for (long word = k; word < k + kDepth; word += 4) asker.template during<Panels>(word);
    };
}
#endif

// Multiplies rows [first, end) of the scratch's queries with its keys. tile_at: the first position of the tile in the chunk. Scores
// of panels without a position stay as they were.
inline void score_tile(AttentionScratch& s, long first, long end, const Range& range, long tile_at, Asker& asker) {
    const long words = s.dim / 2, panel = range.from / kPanel, panel_end = (range.end + kPanel - 1) / kPanel;
#ifdef PDSERVE_AMX
    return with_tiles([&]<class Tiles>() {
        multiply_rows<Tiles, false>(s.query.data(), words, first, end, s.keys.data(), kPanel * words, panel, panel_end, 0, words,
                                    &s.scores[tile_at], kChunk, asks_during(asker));
    });
#endif
    pieces(first, end, panel, panel_end, [&]<int R, int Panels>(long row, long panel) {
        F16 sum[R][2 * Panels];
        for (auto& of_row : sum) std::fill_n(of_row, 2 * Panels, zeros());
        tile<Bf16Dot, R, Panels>(&s.query[row * words], words, &s.keys[panel * kPanel * words], kPanel * words, words, sum,
                                 [&](long k) { asker.template during<Panels>(k); });
        float* at = &s.scores[row * kChunk + tile_at + panel * kPanel];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++) store(at + r * kChunk + h * kLanes, sum[r][h]);
    });
}

// Multiplies rows [first, end) of the scratch's weights with its values, and adds the products to the result. tile_at: the first
// position of the tile in the chunk. Weights of positions outside of the range are 0, so it changes nothing that their words are
// left out.
inline void add_values(AttentionScratch& s, long first, long end, const Range& range, long tile_at, Asker& asker) {
    constexpr long tile_words = kTile / 2, stride = kChunk / 2;
    const long from = range.from / kPositions * kDepth, words = round_up(range.end, kPositions) / 2 - from;
#ifdef PDSERVE_AMX
    return with_tiles([&]<class Tiles>() {
        multiply_rows<Tiles, true>(&s.weights[tile_at / 2], stride, first, end, s.values.data(), kPanel * tile_words, 0,
                                   s.value_dim / kPanel, from, from + words, s.result.data(), s.value_dim, asks_during(asker));
    });
#endif
    pieces(first, end, 0, s.value_dim / kPanel, [&]<int R, int Panels>(long row, long panel) {
        F16 sum[R][2 * Panels];
        float* at = &s.result[row * s.value_dim + panel * kPanel];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++) sum[r][h] = load(at + r * s.value_dim + h * kLanes);
        tile<Bf16Dot, R, Panels>(&s.weights[row * stride + tile_at / 2 + from], stride,
                                 &s.values[panel * kPanel * tile_words + from * kPanel], kPanel * tile_words, words, sum,
                                 [&](long k) { asker.template during<Panels>(k); });
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++) store(at + r * s.value_dim + h * kLanes, sum[r][h]);
    });
}

// The rows of a task: row (t * heads + h) * group + g is query head g of KV head h of the token at position + t. Only a task of
// one token has several KV heads.
struct Queries {
    long position, tokens, heads, group;

    long each() const { return heads * group; }  // rows of a token
    long rows() const { return tokens * each(); }
    long end() const { return position + tokens; }
};

// Computes the rows of a task over one chunk. kv: that of the first KV head. The sums end up in scratch.result, the sum of their
// weights in total and the largest score in top. `seen`: the end of the positions that the caller will read. following() adds what
// comes after them to the asker.
template <class Kv, class Following>
inline void attend_chunk(const Paged<Kv>& kv, AttentionScratch& s, const Queries& of, long chunk, long seen, const Scoring& how,
                         const Following& following) {
    const long rows = of.rows(), low = how.low(of.position), start = chunk * kChunk;
    const long begin = std::max(start, low / kTile * kTile), end = std::min<long>(start + kChunk, of.end());
    std::fill_n(s.top.begin(), rows, kNone);
    std::fill_n(s.total.begin(), rows, 0.0f);
    std::fill_n(s.result.begin(), rows * s.value_dim, 0.0f);
    // Rows outside of these see nothing of positions [first, first + count).
    const auto hidden = [&](long first) { return std::max<long>(0, first - of.position) * of.each(); };
    const auto past = [&](long first, long count) { return std::min(rows, (first + count + how.window - 1 - of.position) * of.each()); };
    // The first tile of K was asked for by the chunk or task before. V of latent attention is K, but may have left the cache.
    Asker& asker = s.asker;
    const auto expect = [&](bool values, long first, long until) {
        const long from = std::max(first, low), count = std::min(first + kTile, until) - from;
        for (long head = 0; head < of.heads; head++) {
            const Paged<Kv> next = kv.later(head);
            asker.add(next, values ? next.value : next.key, from, count);
        }
    };
    asker.begin();
    for (long first = begin + kTile; first < end; first += kTile) expect(false, first, end);
    for (long first = begin; first < end; first += kTile) expect(true, first, end);
    if (end < seen)
        expect(false, end, seen);
    else
        following();
    // Calls f(range, kv, head, row, row_end) for each tile and KV head, in the order in which they are read.
    const auto each_tile = [&](bool values, const auto& f) {
        for (long first = begin; first < end; first += kTile)
            for (long head = 0; head < of.heads; head++) {
                const Range range{first, std::max<long>(0, low - first), std::min<long>(kTile, end - first)};
                const long row = of.heads > 1 ? head * of.group : hidden(first);
                asker.allow((range.end - range.from) * Kv::bytes(kv.dim));
                f(range, kv.later(head), head, row, of.heads > 1 ? row + of.group : past(first, range.end));
            }
    };
    each_tile(false, [&](const Range& range, const Paged<Kv>& own, long head, long row, long row_end) {
        const long at = range.first - start, scales_at = head * kChunk + at;
        lay_out_keys(own, range, s.dim, s.keys.data(), asker);
        if constexpr (Kv::kScaled) take_scales(own, range, how.scale, &s.key_scales[scales_at], &s.value_scales[scales_at]);
        score_tile(s, row, row_end, range, at, asker);
    });
    const auto sight = [&](long row) {
        const long position = of.position + row / of.each();
        return Sight{position - how.window + 1 - start, std::min<long>(end, position + 1) - start};
    };
    const auto scales_at = [&](long row) { return of.heads > 1 ? row / of.group * kChunk : 0; };
    const long last = past(start, end - start);
    for (long row = hidden(start); row < last; row += kLanes) {
        const long count = std::min<long>(kLanes, last - row);
        if (how.softcap == 0.0f)
            soften<Kv::kScaled, false>(s, row, count, how, sight, scales_at);
        else
            soften<Kv::kScaled, true>(s, row, count, how, sight, scales_at);
    }
    each_tile(true, [&](const Range& range, const Paged<Kv>& own, long, long row, long row_end) {
        lay_out_values(own, range, s.value_dim, s.values.data(), asker);
        add_values(s, row, row_end, range, range.first - start, asker);
    });
}

// Merges one more chunk into the running result of a row. A chunk of which the row saw nothing changes nothing.
inline void merge(const float* part, float part_top, float part_total, float* sum, float& top, float& total, long dim) {
    if (part_total == 0.0f) return;
    const float raised = std::max(top, part_top);
    const F16 keep = exp_lanes(broadcast(top - raised)), take = exp_lanes(broadcast(part_top - raised));
    for (long i = 0; i < dim; i += kLanes) {
        const F16 kept = load(sum + i) * keep;
        store(sum + i, fma(load(part + i), take, kept));
    }
    total = total * first(keep) + part_total * first(take);
    top = raised;
}

// Computes the rows of a task over chunks [chunk, chunk_end), and merges them into `to`, where row r has the place at(r).
template <class Kv, class At, class Following>
inline void add_chunks(const Paged<Kv>& kv, AttentionScratch& s, const Queries& of, long chunk, long chunk_end, long seen, const Scoring& how,
                       Sums& to, const At& at, const Following& following) {
    for (; chunk < chunk_end; chunk++) {
        attend_chunk(kv, s, of, chunk, seen, how, following);
        for (long r = 0; r < of.rows(); r++)
            merge(&s.result[r * s.value_dim], s.top[r], s.total[r], &to.sum[at(r) * s.value_dim], to.top[at(r)], to.total[at(r)],
                  s.value_dim);
    }
}

inline void finish_row(const float* sum, float total, long dim, bf16* to) {
    const F16 whole = broadcast(total);
    for (long i = 0; i < dim; i += kLanes) store_bf16(to + i, load(sum + i) / whole, first_lanes(dim - i));
}

// Copies the rotated queries of a task into the scratch, token after token. `stride`: elements from token to token.
inline void take_queries(const bf16* query, long stride, const Queries& of, long dim, AttentionScratch& s) {
    bf16* to = (bf16*)s.query.data();
    for (long row = 0; row < of.rows(); row++)
        std::memcpy(to + row * s.dim, query + row / of.each() * stride + row % of.each() * dim, dim * sizeof(bf16));
}

}  // namespace pdserve
