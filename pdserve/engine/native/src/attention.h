// Causal grouped-query attention that reads K and V in place, in the blocks of the pool.
//
// With latent attention, a token stores one row. It is the key, and its first numbers are the value.
//
// The positions of a sequence are cut into tiles of kTile and chunks of kChunk, both counted from its beginning. A row goes
// through the tiles of a chunk with an online softmax (Milakov and Gimelshein 2018), and the chunks are merged from the first
// upwards. Products run in the order of matmul.h. So the bits of a row depend only on its sequence: later positions get weight
// 0 exactly, and a tile of only later positions is skipped. Chunks also let several threads share one long decode. Weights are
// rounded to bfloat16 for the product with V, because V is bfloat16; sums are float32.
//
// Quantised numbers enter the products as they are stored. The scales of keys multiply scores. The scales of values multiply
// weights before these are rounded.
//
// With a window, a row begins with the tile that holds the first position that it sees. Earlier positions of this tile get weight
// 0 exactly. Positions that no row of the task sees are not read, and neither are their entries in the table of blocks.
#pragma once

#include <algorithm>
#include <limits>

#include "arena.h"
#include "kv_format.h"
#include "matmul.h"

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

    bool plain() const { return softcap == 0.0f && window == kUnlimited; }

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

// Working memory of one thread. rows: at most as many as a task has.
struct AttentionScratch {
    long rows = 0, dim = 0, value_dim = 0;  // numbers of a key and of a value, padded to whole panels
    Lines<uint32_t> query, keys, values, weights;
    Lines<float> scores, result, merged, top, total, factor, merged_top, merged_total;
    alignas(64) float key_scales[kTile], value_scales[kTile];  // scales of the tile's positions, only for quantised KV

    void fit(long rows_needed, long dim_padded, long value_padded) {
        if (rows_needed <= rows && dim_padded == dim && value_padded == value_dim) return;
        query.assign(rows_needed * dim_padded / 2, 0);
        keys.assign(kTile * dim_padded / 2, 0);
        values.assign(kTile * value_padded / 2, 0);
        weights.assign(rows_needed * kTile / 2, 0);
        scores.assign(rows_needed * kTile, 0);
        result.assign(rows_needed * value_padded, 0);
        merged.assign(rows_needed * value_padded, 0);
        for (auto* one : {&top, &total, &factor, &merged_top, &merged_total}) one->assign(rows_needed, 0);
        rows = rows_needed, dim = dim_padded, value_dim = value_padded;  // set last, because an allocation may have failed before
    }
};

// Returns the mask of the sixteen pairs of dimensions from `from` on: those that a row of `dim` has.
inline Mask pairs_left(long dim, long from) { return first_lanes((dim - from) / 2); }

// Number of lines to prefetch with each pair of dimensions or positions: each of the four loops over a tile asks for a quarter
// of the lines of the next tile.
template <class Kv>
constexpr int kAtOnce = Kv::bytes(1) > 2 ? 2 : 1;

// Prefetches the lines of K and V of a later tile, a few at a time, while another tile is computed. All lines at once would fill
// the core's miss buffers: then the core waits, and after that memory waits.
template <class Kv>
class Asker {
public:
    Asker() = default;

    // Prepares to ask for positions [first, first + count), at most kTile.
    Asker(const Paged<Kv>& kv, long first, long count) {
        for (const long part : {kv.key, kv.value}) {
            if (end_ > 0 && kv.value == kv.key) break;
            kv.each_block(first, count, [&](long, long n, long offset, const uint8_t* block) {
                const uint8_t* from = block + part + offset * Kv::bytes(kv.dim);
                runs_[end_++] = {from, from + n * Kv::bytes(kv.dim)};
            });
        }
    }

    // Asks for some lines during word k of a product that computes `Panels` panels at a time.
    template <int Panels>
    void during(long k) {
        if constexpr (Panels == 2)
            if (k % 4 == 0) ask(8 * kAtOnce<Kv>);
    }

    // Asks for the next lines. Callers ask for 8 at once in small formats: with 4 or 16, decodes at 2,048 tokens took a twentieth
    // longer. The function is never inlined: when gcc inlined it, decodes took 1.03 times as long.
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
inline void lay_out_keys(const Paged<Kv>& kv, const Range& range, long padded, uint32_t* keys, Asker<Kv>& asker) {
    const TileRows<Kv> rows(kv, kv.key, range);
    const long words = padded / 2;
    for (long group = range.from / kLanes * kLanes; group < range.end; group += kLanes) {
        uint32_t* panel = keys + group / kPanel * words * kPanel + group % kPanel;
        for (long from = 0; from < padded; from += 32) {
            const Mask pairs = pairs_left(kv.dim, from);
            asker.ask(8 * kAtOnce<Kv>);
            I16 r[16];
            PDSERVE_UNROLL(16)
            for (int i = 0; i < 16; i++) r[i] = Kv::load(rows.row[group + i], from, pairs);
            transpose(r);
            PDSERVE_UNROLL(16)
            for (int i = 0; i < 16; i++) store_words(panel + (from / 2 + i) * kPanel, r[i]);
        }
    }
}

// Lays V out as panels of dimensions: the pairs of positions that hold one of the range.
template <class Kv>
inline void lay_out_values(const Paged<Kv>& kv, const Range& range, long padded, uint32_t* values, Asker<Kv>& asker) {
    const TileRows<Kv> rows(kv, kv.value, range);
    for (long from = 0; from < padded; from += 32) {
        uint32_t* panel = values + from / kPanel * (kTile / 2) * kPanel;
        const Mask pairs = pairs_left(kv.dim, from);
        for (long i = range.from / 2 * 2; i < range.end; i += 2) {
            if (i % 16 == 0) asker.ask(8 * kAtOnce<Kv>);
            const I16 a = Kv::load(rows.row[i], from, pairs), b = Kv::load(rows.row[i + 1], from, pairs);
            I16 low, high;
            interleave(a, b, low, high);
            store_words(panel + i / 2 * kPanel, low);
            store_words(panel + i / 2 * kPanel + kLanes, high);
        }
    }
}

// Writes the scales of each position of the range, and 0 for the others. The scales of keys are multiplied by `scale`.
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

// Returns the lanes of sixteen positions from `i * 16` on that are among the first `seen`.
inline Mask seen_lanes(long seen, int i) { return seen > i * kLanes ? first_lanes(seen - i * kLanes) : lanes_of(0); }

// The positions of a tile that a row sees: the first `seen`.
struct Until {
    long seen;
    Mask lanes(int i) const { return seen_lanes(seen, i); }
};

// The positions of a tile that a row sees: those from `from` on of the first `seen`.
struct Between {
    long from, seen;
    Mask lanes(int i) const { return seen_lanes(seen, i) & ~seen_lanes(from, i); }
};

// Returns sixteen products of a row and keys as scores. With quantised KV, the key scales already contain `scale`.
template <bool Scaled>
inline F16 factor_of(int i, float scale, const float* key_scales) {
    return Scaled ? load(key_scales + i * kLanes) : broadcast(scale);
}

// Returns sixteen scores of a row as they are compared: minus infinity where the row sees nothing. Ready scores are not
// multiplied.
template <bool Scaled, bool Ready, class Sight>
inline F16 scaled_scores(const float* scores, int i, Sight sight, float scale, const float* key_scales) {
    const F16 none = broadcast(kNone), found = load(scores + i * kLanes);
    if constexpr (Ready) return select(sight.lanes(i), found, none);
    return select(sight.lanes(i), found * factor_of<Scaled>(i, scale, key_scales), none);
}

// Turns the products of rows [first, end) into bounded scores; see `capped`.
template <bool Scaled>
inline void cap_scores(AttentionScratch& s, long first, long end, const Scoring& how) {
    const F16 bound = broadcast(how.softcap);
    for (long row = first; row < end; row++)
        for (int i = 0; i < kTile / kLanes; i++) {
            float* at = &s.scores[row * kTile + i * kLanes];
            store(at, capped(load(at) * factor_of<Scaled>(i, how.scale, s.key_scales), bound));
        }
}

// Writes the weights of one row, and returns the lanes of their sum. raised: the largest score so far.
template <bool Scaled, bool Ready, class Sight>
inline F16 weigh_row(const float* scores, Sight sight, float scale, const float* key_scales, const float* value_scales,
                        float raised, bf16* weights) {
    F16 sum = zeros();
    for (int i = 0; i < kTile / kLanes; i++) {
        const F16 value = scaled_scores<Scaled, Ready>(scores, i, sight, scale, key_scales);
        const F16 weight = exp_coarse(value - broadcast(raised));
        const F16 scaled = Scaled ? weight * load(value_scales + i * kLanes) : weight;
        const __m256i rounded = narrow(scaled);
        _mm256_storeu_si256((__m256i*)(weights + i * kLanes), rounded);
        sum = sum + (Scaled ? weight : widen(rounded));
    }
    return sum;
}

// Turns the scores of rows [row, row + count), at most sixteen, into weights. sight(row) returns the positions that a row sees,
// at least one. Sixteen rows are reduced together, and need one exponential for their factors.
template <bool Scaled, bool Ready, class SightOf>
inline void soften(AttentionScratch& s, long row, long count, float scale, const SightOf& sight) {
    const Mask rows = first_lanes(count);
    F16 lanes[kLanes];
    for (auto& lane : lanes) lane = zeros();
    for (long r = 0; r < count; r++) {
        lanes[r] = broadcast(kNone);
        for (int i = 0; i < kTile / kLanes; i++)
            lanes[r] = max(lanes[r], scaled_scores<Scaled, Ready>(&s.scores[(row + r) * kTile], i, sight(row + r), scale,
                                                                            s.key_scales));
    }
    const F16 before = load(&s.top[row], rows);
    const F16 raised = max(before, fold_rows(lanes, [](F16 a, F16 b) { return max(a, b); }));
    const F16 factor = exp_lanes(before - raised);
    store(&s.top[row], raised, rows);
    store(&s.factor[row], factor, rows);
    for (long r = 0; r < count; r++)
        lanes[r] = weigh_row<Scaled, Ready>(&s.scores[(row + r) * kTile], sight(row + r), scale, s.key_scales, s.value_scales,
                                            s.top[row + r], (bf16*)&s.weights[(row + r) * kTile / 2]);
    const F16 sums = fold_rows(lanes, [](F16 a, F16 b) { return a + b; });
    const F16 total = load(&s.total[row], rows) * factor + sums;
    store(&s.total[row], total, rows);
}

// Turns the scores of rows [begin, end) into weights. `offset`: position of the first row's token in the tile. `group`: rows of a
// token.
template <bool Scaled>
inline void soften_tile(AttentionScratch& s, long begin, long end, const Range& range, long offset, long group, const Scoring& how) {
    const auto until = [&](long row) { return std::min(range.end, offset + row / group + 1); };
    const auto each = [&]<bool Ready>(const auto& sight) {
        for (long row = begin; row < end; row += kLanes)
            soften<Scaled, Ready>(s, row, std::min<long>(kLanes, end - row), how.scale, sight);
    };
    if (how.plain()) return each.template operator()<false>([&](long row) { return Until{until(row)}; });
    const auto between = [&](long row) { return Between{offset + row / group + 1 - how.window, until(row)}; };
    if (how.softcap == 0.0f) return each.template operator()<false>(between);
    cap_scores<Scaled>(s, begin, end, how);
    each.template operator()<true>(between);
}

// Calls f<R, Panels>(row, panel) for pieces of rows [first, end) and of panels [panel, panels), two panels at a time: few rows of
// one panel would have too few multiply-adds that do not wait for each other.
template <class Function>
inline void pieces(long first, long end, long panel, long panels, const Function& f) {
    for (; panel + 2 <= panels; panel += 2)
            row_pieces<kPairRows>(first, end, [&]<int R>(long row) { f.template operator()<R, 2>(row, panel); });
    for (; panel < panels; panel++) row_pieces(first, end, [&]<int R>(long row) { f.template operator()<R, 1>(row, panel); });
}

// Multiplies rows [first, end) of the scratch's queries with its keys. Scores of panels without a position stay as they were.
template <class Kv>
inline void score_tile(AttentionScratch& s, long first, long end, const Range& range, Asker<Kv>& asker) {
    const long words = s.dim / 2;
    pieces(first, end, range.from / kPanel, (range.end + kPanel - 1) / kPanel, [&]<int R, int Panels>(long row, long panel) {
        F16 sum[R][2 * Panels];
        for (auto& of_row : sum) std::fill_n(of_row, 2 * Panels, zeros());
        tile<Bf16Dot, R, Panels>(&s.query[row * words], words, &s.keys[panel * kPanel * words], kPanel * words, words, sum,
                                 [&](long k) { asker.template during<Panels>(k); });
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++) store(&s.scores[(row + r) * kTile + panel * kPanel + h * kLanes], sum[r][h]);
    });
}

// Multiplies rows [first, end) of the scratch's weights with its values, and adds the products to the rescaled result. Weights
// of positions outside of the range are 0, so it changes nothing that their words are left out.
template <class Kv>
inline void add_values(AttentionScratch& s, long first, long end, const Range& range, Asker<Kv>& asker) {
    constexpr long tile_words = kTile / 2;
    const long from = range.from / 2, words = (range.end + 1) / 2 - from;
    pieces(first, end, 0, s.value_dim / kPanel, [&]<int R, int Panels>(long row, long panel) {
        F16 sum[R][2 * Panels];
        float* at = &s.result[row * s.value_dim + panel * kPanel];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++)
                sum[r][h] = load(at + r * s.value_dim + h * kLanes) * broadcast(s.factor[row + r]);
        tile<Bf16Dot, R, Panels>(&s.weights[row * tile_words + from], tile_words, &s.values[panel * kPanel * tile_words + from * kPanel],
                                 kPanel * tile_words, words, sum,
                                 [&](long k) { asker.template during<Panels>(k); });
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2 * Panels; h++) store(at + r * s.value_dim + h * kLanes, sum[r][h]);
    });
}

// Computes the rows of one KV head over one chunk. Row r * group + g is query head g of the token at position + r. The sums end
// up in scratch.result, the sum of their weights in total and the largest score in top. `seen`: the end of the positions that
// the caller will read. following() returns the asker for what comes after them.
template <class Kv, class Following>
inline void attend_chunk(const Paged<Kv>& kv, AttentionScratch& s, long position, long tokens, long group, long chunk, long seen,
                         const Scoring& how, const Following& following) {
    const long rows = tokens * group, low = how.low(position);
    const long end = std::min<long>((chunk + 1) * kChunk, position + tokens);
    std::fill_n(s.top.begin(), rows, kNone);
    std::fill_n(s.total.begin(), rows, 0.0f);
    std::fill_n(s.result.begin(), rows * s.value_dim, 0.0f);
    for (long first = std::max(chunk * kChunk, low / kTile * kTile); first < end; first += kTile) {
        const Range range{first, std::max<long>(0, low - first), std::min<long>(kTile, end - first)};
        const long ahead = std::min<long>(kTile, seen - first - kTile);
        Asker<Kv> asker = ahead > 0 ? Asker<Kv>(kv, first + kTile, ahead) : following();
        lay_out_keys(kv, range, s.dim, s.keys.data(), asker);
        if constexpr (Kv::kScaled) take_scales(kv, range, how.scale, s.key_scales, s.value_scales);
        const long hidden = std::max<long>(0, first - position) * group;  // earlier rows see nothing of this tile
        const long past = std::min(rows, (first + range.end + how.window - 1 - position) * group);  // and neither do rows from here on
        score_tile(s, hidden, past, range, asker);
        soften_tile<Kv::kScaled>(s, hidden, past, range, position - first, group, how);
        lay_out_values(kv, range, s.value_dim, s.values.data(), asker);
        add_values(s, hidden, past, range, asker);
    }
}

// Merges one more chunk into the running result of a row. A chunk of which the row saw nothing changes nothing.
inline void merge(const float* part, float part_top, float part_total, float* sum, float& top, float& total, long dim) {
    if (part_top == kNone) return;
    const float raised = std::max(top, part_top);
    const F16 keep = exp_lanes(broadcast(top - raised)), take = exp_lanes(broadcast(part_top - raised));
    for (long i = 0; i < dim; i += kLanes) {
        const F16 kept = load(sum + i) * keep;
        store(sum + i, fma(load(part + i), take, kept));
    }
    total = total * first(keep) + part_total * first(take);
    top = raised;
}

inline void finish_row(const float* sum, float total, long dim, bf16* to) {
    const F16 whole = broadcast(total);
    for (long i = 0; i < dim; i += kLanes) store_bf16(to + i, load(sum + i) / whole, first_lanes(dim - i));
}

// Copies the rotated queries of one KV head into the scratch, token after token. `stride`: elements from token to token.
inline void take_queries(const bf16* query, long stride, long tokens, long group, long dim, AttentionScratch& s) {
    bf16* to = (bf16*)s.query.data();
    for (long row = 0; row < tokens * group; row++)
        std::memcpy(to + row * s.dim, query + row / group * stride + row % group * dim, dim * sizeof(bf16));
}

}  // namespace pdserve
