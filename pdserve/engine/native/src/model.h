// The decoder. One call computes all layers of a step.
//
// With few rows, the threads share the columns of a product, so that each weight is read once by one core. A layer is then four
// products and attention, each a phase of the pool (pool.h). With many rows, the threads share the rows, in tiles that go through
// all products of a layer by themselves, and threads meet only at attention. Both give the same bits (matmul.h).
#pragma once

#include <atomic>
#include <memory>
#include <numeric>

#include "abi.h"
#include "arena.h"
#include "attention.h"
#include "gang.h"
#include "head.h"
#include "int4.h"
#include "pool.h"
#include "route.h"
#include "rows.h"
#include "take.h"
#ifdef PDSERVE_AMX
#include "tile_products.h"
#endif

namespace pdserve {

constexpr long kRowsEach = 48;    // from so many rows a thread on, rows are shared instead of columns; 12 and 24 were as fast
constexpr long kTileRows = 256;   // most rows of a tile; each reads all weights again; with 128 a prompt of 2,048 took 1.01 to 1.07 times as long
constexpr long kPrivateRows = 8;  // up to so many rows, every thread prepares all of them, which saves a phase
constexpr long kRowPieces = 4;    // pieces of a thread's share where rows are prepared; any small number would do
constexpr long kPieces = 32;      // pieces of a thread's share of a product, if it has that many panels

// Calls out(row, column, low, high) for rows [0, rows) and panels [panel, panel_end). low and high are the sixteen columns from
// `column` on and the next sixteen.
template <class Out>
void multiply(const Rows& x, long rows, const Weight& w, long panel, long panel_end, const Out& out) {
#ifdef PDSERVE_AMX
    return with_tiles([&]<class Tiles>() { multiply_tiles<Tiles>(x, rows, w, panel, panel_end, out); });
#endif
    if (w.bits == 4)
        multiply_int4(x, rows, w, panel, panel_end, out);
    else if (w.bits == 8)
        with_int8_dot([&]<class Dot>() { multiply_by<Dot>(x, rows, w, panel, panel_end, out); });
    else
        multiply_by<Bf16Dot>(x, rows, w, panel, panel_end, out);
}

// Packs a weight, or a rank's numbers of each of its rows. See `pdserve_model_weight` for what their count must be.
inline Weight packed(Arena& arena, const Source& from, int bits, long parts) {
    const long n = from.n, k = from.count;
    Weight weight{n, k, bits, parts, bits == 8 ? k / 4 : k / 2};
    weight.panel_words = bits == 4 ? k / kGroup4 * kGroup4Stride : round_up(weight.words, kDepth) * kPanel;
    uint32_t* panels = (uint32_t*)arena.take(weight.count() * weight.panel_words * 4);
    weight.panels = panels;
    if (bits == 16) pack(from, weight.panel_words, panels);
    if (bits == 4) pack_int4(from, panels);
    if (bits != 8) return weight;
    float* scales = (float*)arena.take(weight.count() * kPanel * 4);
    pack_int8(from, panels, scales);
    weight.scales = scales;
    if (k == from.k) return weight;
    float* ones = (float*)arena.take(weight.count() * kPanel * 4);
    std::fill_n(ones, weight.count() * kPanel, 1.0f);
    weight.scales = ones, weight.late_scales = scales;
    return weight;
}

struct Layer {
    PdLayer shape;
    std::vector<float> attention_norm, mlp_norm;
    std::vector<float> post_attention_norm, post_mlp_norm, query_norm, key_norm, qkv_bias, out_bias;  // those that it lacks are empty
    Weight qkv, attention_out, gate_up, down;
    std::vector<float> router_bias;
    Weight router;
    std::vector<Weight> expert_gate_up, expert_down;
    std::unique_ptr<std::atomic<int64_t>[]> counts;  // tokens that chose each expert
    Weight query_up;                     // of latent attention: queries from their latent vector
    std::vector<Weight> absorb, expand;  // of each of its heads: keys to queries, and values
    long kept_at = 0;                    // the place of its heads in the copies of a row (`Model::kept_`)

    // Returns the widest row of activations between the two products of the MLP, for all experts of a token together.
    long gated_width() const {
        const PdMoe& moe = shape.moe;
        return moe.experts == 0 ? shape.intermediate : moe.experts_per_token * moe.intermediate + moe.shared;
    }

    float eps() const { return float(shape.rms_norm_eps); }
    bool latent() const { return shape.latent.kv_rank > 0; }
    long query_width() const { return shape.heads * shape.head_dim; }
    long value_dim() const { return latent() ? shape.latent.kv_rank : shape.head_dim; }
    long attended_width() const { return shape.heads * value_dim(); }
    long out_width() const { return latent() ? shape.heads * shape.latent.v_dim : query_width(); }  // what attention out takes
    long expanded_width() const { return shape.heads * (shape.latent.nope_dim + shape.rope_dim); }  // of queries before they are absorbed
    long made_kv_heads() const { return shape.stores_kv ? shape.kv_heads : 0; }  // those whose keys and values this rank computes
    long qkv_width() const {
        if (latent()) return (shape.latent.q_rank > 0 ? shape.latent.q_rank : expanded_width()) + shape.head_dim;
        return query_width() + 2 * made_kv_heads() * shape.head_dim;
    }
};

// Queries of one span and of KV heads [head, head + heads) against chunks [chunk, chunk_end). Only a decode that is not cut into
// parts has several KV heads. part: the first place for the results of the decode's `parts` chunks from `chunk_first` on, or -1
// when one task computes all chunks. drafts: the rows after `begin` that the same thread computes as decodes, one after the other.
struct Task {
    long span, head, heads, begin, tokens, chunk, chunk_end, part, parts, chunk_first, drafts = 0;
};

// The layers of a KV group, and the attention of a step in each of them.
struct Group {
    long layers = 0, heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0, window = kUnlimited;
    long query_tile = kQueryTile;  // tokens of a task
    std::vector<Task> tasks;
    std::vector<uint8_t*> kept_blocks;  // the block of each row of spans with drafts, where blocks are quantised
    std::unique_ptr<std::atomic<long>[]> missing;  // chunks of a decode that are not finished yet, by the first of its parts
    long missing_count = 0;
    Lines<float> part_sums, part_tops, part_totals;

    long sharing() const { return heads / kv_heads; }  // query heads of a KV head
};

// `count` rows of a span whose K and V go to one block. `position` is that of the first row.
struct Touched {
    long span, row, position, count;
};

// Memory for rows that are multiplied.
struct RowRoom {
    Lines<uint32_t> words;
    Lines<float> scales;
    Lines<int32_t> offsets;

    // Each vector is checked by itself, because an earlier call may have run out of memory half-way.
    void fit(size_t rows, size_t words_each, bool integers) {
        if (words.size() < rows * words_each) words.resize(rows * words_each);
        const size_t groups = integers ? rows * words_each / kGroupWords : 0;
        if (scales.size() < groups) scales.resize(groups);
        if (offsets.size() < groups) offsets.resize(groups);
    }

    Rows view(const Weight& next) {
        if (!next.integers()) return {words.data(), next.words};
        return {words.data(), next.words, scales.data(), offsets.data()};
    }
};

// Working memory of one thread. Two threads share no cache line of it.
struct alignas(64) Own {
    std::vector<AttentionScratch> attention;  // of each KV group
    Lines<float> spare, turned, sums;  // turned: rotated keys of one head and block; sums: sums of groups (int4.h)
    RowRoom rows;
    Lines<bf16> gated;
    Lines<bf16> plain;  // the part of queries of one head that is not rotated
    Lines<float> branch;  // results of attention or of the MLP before they are normed
    Lines<uint32_t> codes;  // of a panel of four bits, as bfloat16
    Lines<Best> best;  // of the columns of the head that the thread computes, by row
    DrawScratch draw;
    RouteScratch route;
    Slots slots;
};

// The rows that are still computed: all rows of a step, or in the last layer those whose logits are wanted.
struct Batch {
    float* x;  // [rows, hidden]
    bf16* attended;
    long rows;
};

// Some rows of a batch. together: all threads compute them; otherwise one thread computes all their columns.
struct Part {
    long row, rows;
    bool together;
};

// The sources of a product's rows: x / rms(x) * weight (`Normed`), the same of the row of each slot (`Gathered`), or bfloat16
// numbers as they are (`Halves`). Rows of x are `stride` numbers apart.

struct Normed {
    const float* x;
    long stride;
    const std::vector<float>& weight;
    float eps;
};

struct Gathered {
    const Normed& normed;
    const int32_t* rows;
};

struct Halves {
    bf16* from;
};

class Model {
  public:
    Model(const PdShape& shape, const bf16* embedding)
        : shape_(shape), embedding_(embedding), layers_(shape.layers), groups_(shape.groups) {
        for (long i = 0; i < shape.layers; i++) {
            const PdLayer& of = layers_[i].shape = shape.layer[i];
            Group& group = groups_[of.group];
            layers_[i].expert_gate_up.resize(of.moe.experts), layers_[i].expert_down.resize(of.moe.experts);
            layers_[i].counts.reset(new std::atomic<int64_t>[of.moe.experts]());
            group.heads = of.heads, group.kv_heads = of.kv_heads, group.head_dim = of.head_dim;
            group.value_dim = layers_[i].value_dim();
            if (!layers_[i].latent()) continue;
            layers_[i].absorb.resize(of.heads), layers_[i].expand.resize(of.heads);
            group.query_tile = std::clamp<long>(kLatentRows / of.heads, kLeastQueryTile, kQueryTile);
        }
        for (long i = 0; i < shape.groups; i++) {
            groups_[i].layers = shape.group_layers[i];
            if (shape.windows[i] > 0) groups_[i].window = shape.windows[i];
        }
        if (shape.gang != nullptr) gang_.reset(new Gang(*shape.gang));
    }

    Weight& weight(long layer, int which, long part) {
        Layer& at = layers_[which == 4 ? 0 : layer];
        if (which == 8) return at.query_up;
        std::vector<Weight>* parts[] = {&at.expert_gate_up, &at.expert_down, nullptr, &at.absorb, &at.expand};
        if (which > 5) return (*parts[which - 6])[part];
        Weight* all[] = {&at.qkv, &at.attention_out, &at.gate_up, &at.down, &head_, &at.router};
        return *all[which];
    }

    // Returns the parts of a weight: those whose k is split where a layer is split among ranks have several. An expert that a rank
    // has whole is a sum of the parts of all ranks.
    long parts(int which, const Source& from) const {
        if (which != 1 && which != 3 && which != 7) return 1;
        return from.count == from.k && splits() && !gang_->gathers() ? shape_.parts * gang_->ranks() : shape_.parts;
    }

    std::vector<float>& vector(long layer, int which) {
        Layer& at = layers_[which == 2 ? 0 : layer];
        std::vector<float>* all[] = {&at.attention_norm, &at.mlp_norm,   &norm_,      &at.post_attention_norm, &at.post_mlp_norm,
                                     &at.query_norm,     &at.key_norm, &at.qkv_bias, &at.out_bias, &at.router_bias};
        return *all[which];
    }

    void expert_counts(long layer, int64_t* to) const {
        for (long i = 0; i < layers_[layer].shape.moe.experts; i++) to[i] = layers_[layer].counts[i].load(std::memory_order_relaxed);
    }

    void set(int64_t layer, int which, int64_t part, const Source& from, int bits) {
        weight(layer, which, part) = packed(arena_, from, bits, parts(which, from));
    }

    bool forward(const PdStep& step);
    void settle(const int32_t* counts);
    void follow(int threads, PdGroup* groups);
    void sample(int threads, float* logits, const PdRow* rows, long count, int32_t* ids);

  private:
    // Returns the largest number that f(layer) returns.
    template <class F>
    long most(const F& f) const {
        long found = 0;
        for (const Layer& layer : layers_) found = std::max<long>(found, f(layer));
        return found;
    }

    long widest() const {
        const long gathered = gang_ == nullptr ? 0 : gang_->gathered_width();
        return std::max<long>(std::max(shape_.hidden, gathered), most([](const Layer& of) {
            return std::max({of.shape.intermediate, of.out_width(), of.shape.latent.q_rank, of.shape.moe.intermediate, of.shape.moe.shared});
        }));
    }

    Group& group_of(long layer) { return groups_[layers_[layer].shape.group]; }
    Scoring scoring(long layer) const {
        const PdLayer& of = layers_[layer].shape;
        return {float(of.scale), float(of.softcap), groups_[of.group].window};
    }

    int64_t format_of(long layer) const { return step_->groups[layers_[layer].shape.group].kv_format; }

    bool integers() const { return layers_[0].attention_out.integers(); }

    // Tells whether a layer norms the results of its attention or of its MLP.
    bool post_norms() const {
        return most([](const Layer& of) { return of.post_attention_norm.size() + of.post_mlp_norm.size(); }) > 0;
    }

    // Tells whether threads share the rows of a step instead of the columns of its products.
    // The ranks of a gang meet after products, so all rows of a step are there.
    bool by_rows(long rows) const { return gang_ == nullptr && rows >= kRowsEach * threads_ && threads_ > 1; }

    // Tells whether the ranks of this stage share sums.
    bool splits() const { return gang_ != nullptr && gang_->ranks() > 1; }

    // Waits for the other ranks of the stage.
    void meet(int thread) {
        pool_.share(thread, 1, [&](long) { gang_->meet(); });
    }

    bool sound(const PdStep& step) const;
    void prepare_step(const PdStep& step, int threads);
    void run_step();
    void take_rows(int thread, long rows);
    void plan(const PdStep& step);
    void plan_tasks(const PdStep& step, Group& group);
    void plan_touched(const PdStep& step);
    void plan_kept(const PdStep& step);
    void take_back(const int32_t* counts);
    void fit(const PdStep& step);
    void fit_attention(const PdStep& step);
    void compute(int thread);
    void embed(long row, long end, float* to);
    void begin_layer(int thread, long layer, const Batch& batch, const Part& part);
    void begin_latent(int thread, long layer, const Batch& batch, const Part& part);
    void absorb_head(Own& own, const Layer& of, const Part& part, const float* x, long width, long head);
    template <class Kv>
    void put_latents(long layer, long row, long end);
    bf16* expand_values(int thread, const Layer& of, const Batch& batch, const Part& part);
    void finish_layer(int thread, long layer, const Batch& batch, const Part& part);
    Batch keep_wanted(int thread, const Batch& batch);
    void finish_heads(const Layer& of, const Part& part, long head, long end);
    template <class From>
    void add_branch(int thread, const Part& part, const Weight& w, const From& from, float* x, const std::vector<float>& bias,
                    const std::vector<float>& norm, float eps);
    Halves gather(int thread, const Part& part, const Halves& own, long k);
    void add_split(int thread, const Part& part, const Weight& w, const Halves& from, int place, float* x,
                   const std::vector<float>& bias, const std::vector<float>& norm, float eps);
    template <class Order>
    void add_split_experts(int thread, long layer, const Part& part, Order& order, float* to);
    void add_normed(int thread, const Part& part, float* branch, const std::vector<float>& norm, float eps, float* x);
    void product_gated(int thread, const Part& part, const Layer& layer, const Normed& from, bf16* to, long width);
    void route(int thread, long layer, const Part& part);
    template <class From, class Order, class Out>
    void product_of_experts(int thread, const Part& part, long slots, const std::vector<Weight>& weights, const From& from,
                            Order& order, const Out& out);
    void add_experts(int thread, long layer, const Part& part, const Normed& normed, bf16* gated, float* to);
    template <class Kv>
    void put_heads(Own& own, long layer, const Part& part, long head, long end);
    template <class Kv>
    void put_scaled(Own& own, long layer, const Touched& touched, long head);
    template <class Kv>
    void put_all_scaled(int thread, long layer);
    template <class Kv>
    void attend(int thread, long layer);
    template <class Kv>
    void run(int thread, const Task& task, long layer);
    template <class Kv>
    void run_drafted(int thread, const Task& task, long layer);
    template <class Kv>
    void put_drafted(int thread, const Task& task, long layer, long row);
    void take_queries(long span, long begin, long head, const Queries& of, long layer, AttentionScratch& s);
    void finish_rows(long span, long begin, long head, const Queries& of, long layer, AttentionScratch& s);
    template <class Kv>
    void ask_for_next(int thread, long layer, Asker& asker);
    void merge_parts(const Task& task, long layer, Own& own);
    template <class Kv>
    Paged<Kv> places(long layer, long head) const;
    template <class Kv>
    Paged<Kv> paged(long span, long layer, long head) const;
    template <class Kv>
    uint8_t* kept(long row, long layer, long head);

    void prepare(const Normed& from, long row, float* spare, const Rows& to, const Weight&) const {
        norm_row(from.x + row * from.stride, from.weight.data(), long(from.weight.size()), from.eps, spare, to, row);
    }

    void prepare(const Gathered& from, long row, float* spare, const Rows& to, const Weight&) const {
        const Normed& of = from.normed;
        norm_row(of.x + from.rows[row] * of.stride, of.weight.data(), long(of.weight.size()), of.eps, spare, to, row);
    }

    void prepare(const Halves& from, long row, float* spare, const Rows& to, const Weight& next) const {
        requantise(from.from + row * next.k, next.k, spare, to, row);
    }

    // Prepares rows for weights of four bits.
    static void prepare4(Own& own, Rows& rows, long count, const Weight& w) {
        sum_groups(rows, count, w.words, own.sums.data());
        rows.sums = own.sums.data(), rows.codes = own.codes.data();
    }

    // Returns the rows if they can be multiplied as they are; null when they have to be prepared.
    static uint32_t* as_it_is(const Normed&, const Weight&) { return nullptr; }
    static uint32_t* as_it_is(const Gathered&, const Weight&) { return nullptr; }
    static uint32_t* as_it_is(const Halves& from, const Weight& next) { return next.integers() ? nullptr : (uint32_t*)from.from; }

    // Calls f(row, end) for all rows, in a few pieces for each thread.
    template <class F>
    void share_rows(int thread, long rows, const F& f) {
        const long pieces = std::min<long>(rows, kRowPieces * threads_);
        pool_.share(thread, pieces, [&](long i) { f(rows * i / pieces, rows * (i + 1) / pieces); });
    }

    // Calls f(span, row, position) for rows [row, end).
    template <class F>
    void each_token(long row, long end, const F& f) const {
        for (long span = 0; span < step_->spans; span++)
            for (long at = std::max(row, span_row_[span]); at < std::min(end, span_row_[span + 1]); at++)
                f(span, at, step_->span_start[span] + at - span_row_[span]);
    }

    // Calls f(row, end) for all rows of a part. Its threads share them.
    template <class F>
    void each_row(int thread, const Part& part, const F& f) {
        if (part.together) return share_rows(thread, part.rows, f);
        f(0, part.rows);
    }

    // Calls f(part) for the whole batch: for each of its tiles, or once for all rows together.
    template <class F>
    void each_part(int thread, long rows, const F& f) {
        if (!by_rows(rows)) return f(Part{0, rows, true});
        const long tiles = (rows + kTileRows * threads_ - 1) / (kTileRows * threads_) * threads_;
        pool_.share(thread, tiles, [&](long i) {
            const long row = rows * i / tiles;
            f(Part{row, rows * (i + 1) / tiles - row, false});
        });
    }

    // Multiplies the rows of a part with a weight. It calls out(row, column, low, high) as `multiply` does, and then(panel,
    // panel_end) after each piece, which is a multiple of `unit` panels. Rows of `from` and `out` count from the part's first.
    template <class From, class Out, class Then>
    void product(int thread, const Part& part, const Weight& w, const From& from, const Out& out, long unit, const Then& then) {
        Own& own = own_[thread];
        const bool alone = !part.together || part.rows <= kPrivateRows;
        Rows rows = (alone ? own.rows : together_).view(w);
        uint32_t* given = as_it_is(from, w);
        const auto fill = [&](long row, long end) {
            for (; row < end; row++) prepare(from, row, own.spare.data(), rows, w);
        };
        if (given != nullptr)
            rows.words = given;
        else if (!alone)
            share_rows(thread, part.rows, fill);
        bool ready = false;  // a thread that gets no piece must read nothing, because others may already be in the next phase
        const auto work = [&](long panel, long end) {
            if (!ready && given == nullptr && alone) fill(0, part.rows);
            if (!ready && w.bits == 4) prepare4(own, rows, part.rows, w);
            ready = true;
            multiply(rows, part.rows, w, panel, end, out);
            then(panel, end);
        };
        if (!part.together || threads_ == 1) return work(0, w.count());
        unit *= std::max<long>(1, w.count() / (kPieces * threads_ * unit));
        pool_.share(thread, (w.count() + unit - 1) / unit, [&](long i) { work(i * unit, std::min(w.count(), (i + 1) * unit)); });
    }

    template <class From, class Out>
    void product(int thread, const Part& part, const Weight& w, const From& from, const Out& out) {
        product(thread, part, w, from, out, 1, [](long, long) {});
    }

    PdShape shape_;
    const bf16* embedding_;
    Arena arena_;
    std::vector<Layer> layers_;
    std::vector<Group> groups_;
    std::vector<float> norm_;
    Weight head_;
    Pool pool_;
    std::unique_ptr<Gang> gang_;  // null: this process computes the whole model
    long layers_now_ = 0;         // the layers that this step computes

    // State of the current step. `settle` reads it after the step, but none of the arrays to which `now_` points.
    PdStep now_{};
    const PdStep* step_ = &now_;
    int threads_ = 1;
    std::vector<Touched> touched_;
    std::vector<long> span_row_;    // the first row of each span
    std::vector<long> kept_first_;  // of each span: the place of its first row in `kept_`, or -1
    long kept_bytes_ = 0;           // of a row
    // [rows of spans with drafts, kept_bytes_]: the heads of a row's block, in all layers, as they were after the row
    Lines<uint8_t> kept_;
    std::vector<Own> own_;
    Lines<float> residual_, wanted_, qkv_, branch_, expanded_;
    std::vector<float> products_, weights_, shared_weights_;  // of routers: their products, and the weights of experts
    std::vector<int32_t> chosen_;                             // [rows, experts per token], ascending
    RowRoom together_;  // rows that all threads multiply
    Lines<bf16> query_, attended_, wanted_attended_, gated_, values_;
};

}  // namespace pdserve
