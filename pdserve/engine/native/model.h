// The Llama decoder: one call computes a step of all layers.
//
// A layer is five products and attention with barriers between. Few rows: every thread computes all rows and its share
// of the columns, so that each weight is read once by one core. Many rows: every thread keeps its share of the rows
// through a layer and meets the others at attention only. The bits are the same (matmul.h).
#pragma once

#include <atomic>
#include <memory>

#include "abi.h"
#include "arena.h"
#include "attention.h"
#include "int4.h"
#include "pool.h"
#include "rows.h"
#include "take.h"

namespace pdserve {

constexpr long kRowsEach = 48;    // from so many rows a thread on, threads share out rows instead of columns; not tuned
constexpr long kPrivateRows = 4;  // up to so many rows, every thread computes them itself and spares a barrier; not tuned

// out(row, column, low, high) for rows [row, row_end) and panels [panel, panel_end): sixteen columns from `column`
// and the sixteen after them.
template <class Out>
void multiply(const Rows& x, long row, long row_end, const Weight& w, long panel, long panel_end, const Out& out) {
    if (w.bits == 4)
        multiply_int4(x, row, row_end, w, panel, panel_end, out);
    else if (w.bits == 8)
        multiply_by<Int8Dot>(x, row, row_end, w, panel, panel_end, out);
    else
        multiply_by<Bf16Dot>(x, row, row_end, w, panel, panel_end, out);
}

struct Layer {
    std::vector<float> attention_norm, mlp_norm;
    Weight qkv, attention_out, gate_up, down;
};

// A span's queries of one KV head against chunks [chunk, chunk_end). part: where the chunk's result goes, or -1.
struct Task {
    long span, head, begin, tokens, chunk, chunk_end, part, parts;
};

// Rows of a span whose K and V go to one block, the first to `position`.
struct Touched {
    long span, row, position, count;
};

// Room for rows of at most `words` words each.
struct RowRoom {
    Lines<uint32_t> words;
    Lines<float> scales;
    Lines<int32_t> offsets;

    void fit(size_t rows, size_t words_each, bool integers) {
        if (words.size() < rows * words_each) words.resize(rows * words_each);
        const size_t groups = integers ? rows * words_each / kGroupWords : 0;
        if (scales.size() < groups) scales.resize(groups), offsets.resize(groups);
    }
};

// What one thread needs for itself.
struct Own {
    AttentionScratch attention;
    Lines<float> spare, turned;  // turned: keys of one head and block
    RowRoom rows;
    DrawScratch draw;
};

class Model {
  public:
    Model(const PdShape& shape, const bf16* embedding) : shape_(shape), embedding_(embedding), layers_(shape.layers) {}

    Weight& weight(long layer, int which) {
        Layer& at = layers_[which == 4 ? 0 : layer];
        Weight* all[] = {&at.qkv, &at.attention_out, &at.gate_up, &at.down, &head_};
        return *all[which];
    }

    std::vector<float>& norm(long layer, int which) {
        if (which == 2) return norm_;
        return which == 0 ? layers_[layer].attention_norm : layers_[layer].mlp_norm;
    }

    const PdShape& shape() const { return shape_; }

    void set(Weight& weight, const bf16* from, long n, long k, int bits);
    bool forward(const PdStep& step);
    void sample(int threads, float* logits, const PdRow* rows, long count, int32_t* ids);

  private:
    long group() const { return shape_.heads / shape_.kv_heads; }
    long query_width() const { return shape_.heads * shape_.head_dim; }
    long qkv_width() const { return query_width() + 2 * shape_.kv_heads * shape_.head_dim; }

    long widest() const { return std::max({long(shape_.hidden), long(shape_.intermediate), query_width()}); }

    bool sound(const PdStep& step) const;
    void plan(const PdStep& step);
    void plan_touched(const PdStep& step);
    void fit(const PdStep& step);
    void compute(int thread);
    void embed(int thread);
    void write(int thread, long layer);
    template <class Kv>
    void turn_and_put(int thread, long layer);
    template <class Kv>
    void quantise(int thread, long layer);
    template <class Kv>
    void attend(int thread, long layer);
    template <class Kv>
    void run(const Task& task, long layer, Own& own);
    template <class Kv>
    Asker<Kv> first_of_next(long layer) const;
    void merge_parts(const Task& task, Own& own);
    void choose(int thread);
    void keep_wanted(int thread);
    template <class Kv>
    Paged<Kv> paged(long span, long layer, long head) const;

    bool by_rows(long rows) const { return rows >= kRowsEach * threads_ && threads_ > 1; }

    void meet(long rows) {
        if (!by_rows(rows)) pool_.barrier();
    }

    // f(row, rows) for each row, into `shared` or, for few rows, into the thread's own; returns where they are.
    template <class F>
    Rows each_row(int thread, long rows, long stride, bool integers, RowRoom& shared, const F& f) {
        const bool alone = rows <= kPrivateRows && !by_rows(rows);
        RowRoom& room = alone ? own_[thread].rows : shared;
        Rows out{room.words.data(), stride};
        if (integers) out.scales = room.scales.data(), out.offsets = room.offsets.data();
        const long first = alone ? 0 : rows * thread / threads_, end = alone ? rows : rows * (thread + 1) / threads_;
        for (long row = first; row < end; row++) f(row, out);
        if (!alone) meet(rows);
        return out;
    }

    // A room holds rows of one stride: a thread that is ahead must not write where another still reads.
    Rows normalised(int thread, long rows, const std::vector<float>& weight, const Weight& next, RowRoom& room) {
        return each_row(thread, rows, next.words, next.integers(), room, [&](long row, const Rows& out) {
            norm_row(x_ + row * shape_.hidden, weight.data(), shape_.hidden, float(shape_.rms_norm_eps), own_[thread].spare.data(), out, row);
        });
    }

    // bfloat16 rows as the next weight wants them.
    Rows as_input(int thread, long rows, Lines<bf16>& from, const Weight& next) {
        if (!next.integers()) return {(uint32_t*)from.data(), next.k / 2};
        // Again one stride, of the widest.
        return each_row(thread, rows, widest() / 4, true, whole_, [&](long row, const Rows& out) {
            requantise(from.data() + row * next.k, next.k, own_[thread].spare.data(), out, row);
        });
    }

    template <class Out>
    void project(int thread, const Rows& x, long rows, const Weight& weight, const Out& out) {
        if (by_rows(rows))
            multiply(x, rows * thread / threads_, rows * (thread + 1) / threads_, weight, 0, weight.count(), out);
        else
            multiply(x, 0, rows, weight, weight.count() * thread / threads_, weight.count() * (thread + 1) / threads_, out);
    }

    PdShape shape_;
    const bf16* embedding_;
    Arena arena_;
    std::vector<Layer> layers_;
    std::vector<float> norm_;
    Weight head_;
    Pool pool_;

    // Of the current step.
    const PdStep* step_ = nullptr;
    int threads_ = 1;
    std::vector<Task> tasks_;
    std::vector<Touched> touched_;
    std::vector<long> span_row_;  // the first row of each span
    std::unique_ptr<std::atomic<long>[]> next_, missing_;  // tasks taken in a layer; parts that a task's span still lacks
    long missing_count_ = 0;
    float* x_ = nullptr;
    std::vector<Own> own_;
    Lines<float> residual_, wanted_, qkv_, part_sums_, part_tops_, part_totals_;
    RowRoom normed_, whole_, head_normed_;
    Lines<bf16> query_, attended_, wanted_attended_, gated_;
};

}  // namespace pdserve
