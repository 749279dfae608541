// A Llama decoder for x86 CPUs with AVX-512 and its bfloat16 and 8-bit dot products. Elsewhere it compiles to a
// library that says so.
#include "abi.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

extern "C" int pdserve_supported(void) {
    const bool all = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    return all ? PDSERVE_ABI : 0;
}

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#include "model.h"

namespace pdserve {

void Model::set(Weight& weight, const bf16* from, long n, long k, int bits) {
    weight.n = n, weight.k = k, weight.bits = bits;
    weight.words = bits == 8 ? k / 4 : k / 2;
    weight.panel_words = bits == 4 ? k / kGroup4 * kGroup4Stride : weight.words * kPanel;
    uint32_t* panels = (uint32_t*)arena_.take(weight.count() * weight.panel_words * 4);
    weight.panels = panels;
    if (bits == 4) return pack_int4(from, n, k, panels);
    if (bits == 16) return pack(from, n, k, panels);
    float* scales = (float*)arena_.take(weight.count() * kPanel * 4);
    pack_int8(from, n, k, panels, scales);
    weight.scales = scales;
}

// What the caller promises: were it not so, another sequence's KV would be read or written.
bool Model::sound(const PdStep& step) const {
    long rows = 0;
    for (long span = 0; span < step.spans; span++) {
        const long blocks = step.span_table[span + 1] - step.span_table[span];
        if (step.span_start[span] + step.span_count[span] > blocks * step.block_size) return false;
        rows += step.span_count[span];
    }
    for (long i = 0; i < step.span_table[step.spans]; i++)
        if (step.tables[i] < 0 || step.tables[i] >= step.blocks) return false;
    for (long row = 0; row < step.rows; row++)
        if (step.token_ids[row] < 0 || step.token_ids[row] >= shape_.vocab) return false;
    return rows == step.rows && with_format(step.kv_format, []<class Kv>() {});
}

bool Model::forward(const PdStep& step) {
    if (!sound(step)) return false;
    step_ = &step;
    threads_ = int(step.threads);
    plan(step);
    fit(step);
    pool_.run(threads_, [this](int thread) { compute(thread); });
    return true;
}

// Attention in pieces, the most expensive first. A decode is cut into its chunks where threads would lack work.
void Model::plan(const PdStep& step) {
    tasks_.clear();
    span_row_.assign(1, 0);
    for (long span = 0; span < step.spans; span++) span_row_.push_back(span_row_.back() + step.span_count[span]);
    plan_touched(step);
    long parts = 0;
    const bool few = threads_ > 1 && step.spans * shape_.kv_heads < 4 * threads_;
    for (long span = 0; span < step.spans; span++)
        for (long head = 0; head < shape_.kv_heads; head++)
            for (long begin = 0; begin < step.span_count[span]; begin += kQueryTile) {
                const long tokens = std::min<long>(kQueryTile, step.span_count[span] - begin);
                const long chunks = (step.span_start[span] + begin + tokens + kChunk - 1) / kChunk;
                if (few && tokens == 1 && chunks > 1) {
                    for (long chunk = 0; chunk < chunks; chunk++)
                        tasks_.push_back({span, head, begin, tokens, chunk, chunk + 1, parts, chunks});
                    parts += chunks;
                } else {
                    tasks_.push_back({span, head, begin, tokens, 0, chunks, -1, 0});
                }
            }
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) {
        return (a.chunk_end - a.chunk) * a.tokens > (b.chunk_end - b.chunk) * b.tokens;
    });
    if (parts > missing_count_) {
        missing_.reset(new std::atomic<long>[parts]);
        missing_count_ = parts;
    }
    for (const Task& task : tasks_)
        if (task.part >= 0) missing_[task.part].store(task.parts);
    if (!next_) next_.reset(new std::atomic<long>[shape_.layers]);
    for (long layer = 0; layer < shape_.layers; layer++) next_[layer].store(0);
    const long padded = round_up(shape_.head_dim, kPanel);
    part_sums_.resize(parts * group() * padded);
    part_tops_.resize(parts * group());
    part_totals_.resize(parts * group());
}

void Model::plan_touched(const PdStep& step) {
    touched_.clear();
    with_format(step.kv_format, [&]<class Kv>() {
        if (!Kv::kScaled) return;
        for (long span = 0; span < step.spans; span++)
            for (long done = 0, count; done < step.span_count[span]; done += count) {
                const long position = step.span_start[span] + done;
                count = std::min<long>(step.block_size - position % step.block_size, step.span_count[span] - done);
                touched_.push_back({span, span_row_[span] + done, position, count});
            }
    });
}

void Model::fit(const PdStep& step) {
    const auto grow = [](auto& room, long size) {
        if (long(room.size()) < size) room.resize(size);
    };
    const long rows = step.rows, hidden = shape_.hidden;
    grow(residual_, rows * hidden);
    grow(wanted_, step.out_rows * hidden);
    grow(qkv_, rows * qkv_width());
    const bool integers = layers_[0].down.integers();
    normed_.fit(rows, hidden / (integers ? 4 : 2), integers);
    if (integers) whole_.fit(rows, widest() / 4, true);
    head_normed_.fit(step.out_rows, hidden / (head_.integers() ? 4 : 2), head_.integers());
    grow(query_, rows * query_width());
    grow(attended_, rows * query_width());
    grow(wanted_attended_, step.out_rows * query_width());
    grow(gated_, rows * shape_.intermediate);
    own_.resize(threads_);
    long most = 1;
    for (const Task& task : tasks_) most = std::max(most, task.tokens);
    for (Own& own : own_) {
        own.attention.fit(most * group(), round_up(shape_.head_dim, kPanel));
        grow(own.spare, widest());
        if (!touched_.empty()) grow(own.turned, step.block_size * shape_.head_dim);
        own.rows.fit(kPrivateRows, widest() / 2, head_.integers());
    }
    x_ = residual_.data();
}

void Model::compute(int thread) {
    const long last = shape_.layers - 1;
    long rows = step_->rows;
    embed(thread);
    meet(rows);
    for (long i = 0; i <= last; i++) {
        const Layer& layer = layers_[i];
        project(thread, normalised(thread, rows, layer.attention_norm, layer.qkv, normed_), rows, layer.qkv, Store{qkv_.data(), qkv_width()});
        meet(rows);
        write(thread, i);
        pool_.barrier();
        if (i == last && step_->out_rows == 0) return;
        with_format(step_->kv_format, [&]<class Kv>() { attend<Kv>(thread, i); });
        pool_.barrier();
        Lines<bf16>* attended = &attended_;
        if (i == last && step_->out_rows < rows) {  // nobody asks for the others any more
            keep_wanted(thread);
            rows = step_->out_rows;
            attended = &wanted_attended_;
            pool_.barrier();
        }
        const AddTo residual{x_, shape_.hidden};
        project(thread, as_input(thread, rows, *attended, layer.attention_out), rows, layer.attention_out, residual);
        meet(rows);
        const Rows normed = normalised(thread, rows, layer.mlp_norm, layer.gate_up, normed_);
        project(thread, normed, rows, layer.gate_up, SiluMul{gated_.data(), shape_.intermediate});
        meet(rows);
        project(thread, as_input(thread, rows, gated_, layer.down), rows, layer.down, residual);
        meet(rows);
    }
    project(thread, normalised(thread, rows, norm_, head_, head_normed_), rows, head_, Store{step_->logits, shape_.vocab});
    pool_.barrier();
    choose(thread);
}

void Model::embed(int thread) {
    for (long row = step_->rows * thread / threads_; row < step_->rows * (thread + 1) / threads_; row++)
        for (long i = 0; i < shape_.hidden; i += kLanes)
            _mm512_storeu_ps(x_ + row * shape_.hidden + i, load_bf16(embedding_ + step_->token_ids[row] * shape_.hidden + i));
}

template <class Kv>
Paged<Kv> Model::paged(long span, long layer, long head) const {
    const long size = step_->block_size, dim = shape_.head_dim, heads = shape_.kv_heads;
    const long each = size * Kv::bytes(dim), all = shape_.layers * 2 * heads;
    const long key = layer * 2 * heads + head, value = key + heads;
    const long scale = Kv::kScaled ? long(sizeof(float)) : 0;
    return {step_->pool, step_->tables + step_->span_table[span], size, dim, all * (each + scale),
            key * each, value * each, all * each + key * scale, all * each + value * scale};
}

// Queries of the thread's rows turned; and keys and values into the pool, those of the same rows where they are plain.
void Model::write(int thread, long layer) {
    with_format(step_->kv_format, [&]<class Kv>() {
        turn_and_put<Kv>(thread, layer);
        if constexpr (Kv::kScaled) {
            if (by_rows(step_->rows)) pool_.barrier();  // a block's tokens may be rows of several threads
            quantise<Kv>(thread, layer);
        }
    });
}

template <class Kv>
void Model::turn_and_put(int thread, long layer) {
    const long dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
    const long first = step_->rows * thread / threads_, end = step_->rows * (thread + 1) / threads_;
    float* spare = own_[thread].spare.data();
    for (long span = 0; span < step_->spans; span++) {
        const long from = std::max<long>(first, span_row_[span]);
        const long to = std::min<long>(end, span_row_[span + 1]);
        for (long row = from; row < to; row++) {
            const long position = step_->span_start[span] + row - span_row_[span];
            const float* table = step_->rope + position * 2 * dim;
            const float* x = qkv_.data() + row * qkv_width();
            for (long head = 0; head < heads; head++) {
                turn_head(x + head * dim, table, dim, spare);
                put_head<Bf16Kv>(spare, dim, (uint8_t*)(query_.data() + row * query_width() + head * dim));
            }
            if constexpr (!Kv::kScaled)
                for (long head = 0; head < kv_heads; head++) {
                    const Paged<Kv> kv = paged<Kv>(span, layer, head);
                    turn_head(x + (heads + head) * dim, table, dim, spare);
                    put_head<Kv>(spare, dim, kv.row(position, kv.key));
                    put_head<Kv>(x + (heads + kv_heads + head) * dim, dim, kv.row(position, kv.value));
                }
        }
    }
}

// A unit of work is one head of one block: its tokens share a scale.
template <class Kv>
void Model::quantise(int thread, long layer) {
    const long dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
    const long units = long(touched_.size()) * kv_heads;
    float* turned = own_[thread].turned.data();
    for (long unit = units * thread / threads_; unit < units * (thread + 1) / threads_; unit++) {
        const auto [span, row, position, count] = touched_[unit / kv_heads];
        const long head = unit % kv_heads, offset = position % step_->block_size;
        const Paged<Kv> kv = paged<Kv>(span, layer, head);
        const float* key = qkv_.data() + row * qkv_width() + (heads + head) * dim;
        for (long i = 0; i < count; i++)
            turn_head(key + i * qkv_width(), step_->rope + (position + i) * 2 * dim, dim, turned + i * dim);
        uint8_t* block = kv.block(position);
        quantise_head<Kv>(turned, dim, offset, count, dim, block + kv.key, (float*)(block + kv.key_scale));
        quantise_head<Kv>(key + kv_heads * dim, qkv_width(), offset, count, dim, block + kv.value, (float*)(block + kv.value_scale));
    }
}

template <class Kv>
void Model::attend(int thread, long layer) {
    for (;;) {
        const long index = next_[layer].fetch_add(1, std::memory_order_relaxed);
        if (index >= long(tasks_.size())) return;
        run<Kv>(tasks_[index], layer, own_[thread]);
    }
}

// Of the task that this thread will probably take next: another may be faster, which costs some reads.
template <class Kv>
Asker<Kv> Model::first_of_next(long layer) const {
    const long index = next_[layer].load(std::memory_order_relaxed);
    if (index >= long(tasks_.size())) return {};
    const Task& task = tasks_[index];
    const long first = task.chunk * kChunk, end = step_->span_start[task.span] + task.begin + task.tokens;
    return {paged<Kv>(task.span, layer, task.head), first, std::min<long>(kTile, end - first)};
}

template <class Kv>
void Model::run(const Task& task, long layer, Own& own) {
    AttentionScratch& s = own.attention;
    const Paged<Kv> kv = paged<Kv>(task.span, layer, task.head);
    const long row = span_row_[task.span] + task.begin, position = step_->span_start[task.span] + task.begin;
    const long dim = shape_.head_dim, rows = task.tokens * group(), at = task.head * group() * dim;
    const float scale = 1.0f / std::sqrt(float(dim));
    const auto following = [&] { return first_of_next<Kv>(layer); };
    take_queries(query_.data() + row * query_width() + at, query_width(), task.tokens, group(), dim, s);
    if (task.part >= 0) {
        const long part = task.part + task.chunk;
        const long seen = std::min(position + task.tokens, task.chunk_end * kChunk);
        attend_chunk(kv, s, position, task.tokens, group(), task.chunk, seen, scale, following);
        std::copy_n(s.result.begin(), rows * s.dim, part_sums_.begin() + part * rows * s.dim);
        std::copy_n(s.top.begin(), rows, part_tops_.begin() + part * rows);
        std::copy_n(s.total.begin(), rows, part_totals_.begin() + part * rows);
        if (missing_[task.part].fetch_sub(1, std::memory_order_acq_rel) == 1) merge_parts(task, own);
        return;
    }
    std::fill_n(s.merged.begin(), rows * s.dim, 0.0f);
    std::fill_n(s.merged_top.begin(), rows, kNone);
    std::fill_n(s.merged_total.begin(), rows, 0.0f);
    for (long chunk = task.chunk; chunk < task.chunk_end; chunk++) {
        attend_chunk(kv, s, position, task.tokens, group(), chunk, position + task.tokens, scale, following);
        for (long r = 0; r < rows; r++)
            merge(&s.result[r * s.dim], s.top[r], s.total[r], &s.merged[r * s.dim], s.merged_top[r], s.merged_total[r], s.dim);
    }
    for (long r = 0; r < rows; r++)
        finish_row(&s.merged[r * s.dim], s.merged_total[r], dim,
                   attended_.data() + (row + r / group()) * query_width() + at + r % group() * dim);
}

// By the thread that brought the last chunk of a decode.
void Model::merge_parts(const Task& task, Own& own) {
    AttentionScratch& s = own.attention;
    const long rows = group(), dim = shape_.head_dim;
    missing_[task.part].store(task.parts, std::memory_order_relaxed);  // for the next layer, behind a barrier
    for (long r = 0; r < rows; r++) {
        float top = kNone, total = 0;
        std::fill_n(s.merged.begin(), s.dim, 0.0f);
        for (long part = task.part; part < task.part + task.parts; part++)
            merge(&part_sums_[(part * rows + r) * s.dim], part_tops_[part * rows + r], part_totals_[part * rows + r], s.merged.data(),
                  top, total, s.dim);
        finish_row(s.merged.data(), total, dim,
                   attended_.data() + (span_row_[task.span] + task.begin) * query_width() + (task.head * rows + r) * dim);
    }
}

// The rows whose logits are wanted become the only ones.
void Model::keep_wanted(int thread) {
    if (thread != 0) return;
    for (long i = 0; i < step_->out_rows; i++) {
        std::copy_n(x_ + step_->out[i] * shape_.hidden, shape_.hidden, wanted_.begin() + i * shape_.hidden);
        std::copy_n(attended_.begin() + step_->out[i] * query_width(), query_width(), wanted_attended_.begin() + i * query_width());
    }
    x_ = wanted_.data();
}

void Model::choose(int thread) {
    for (long row = step_->out_rows * thread / threads_; row < step_->out_rows * (thread + 1) / threads_; row++)
        step_->best[row] = best_of(step_->logits + row * shape_.vocab, shape_.vocab);
}

void Model::sample(int threads, float* logits, const PdRow* rows, long count, int32_t* ids) {
    if (long(own_.size()) < threads) own_.resize(threads);
    int64_t edits = 0, tops = 0;
    for (const PdRow* row = rows; row < rows + count; row++) {
        edits = std::max(edits, row->biases + row->seen + row->banned);
        tops = std::max(tops, row->tops);
    }
    for (Own& own : own_) own.draw.fit(shape_.vocab, edits, tops);
    std::atomic<long> next{0};  // rows differ in what they cost
    pool_.run(threads, [&](int thread) {
        for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            ids[i] = take(logits + rows[i].row * shape_.vocab, shape_.vocab, rows[i], own_[thread].draw);
    });
}

}  // namespace pdserve

using pdserve::Model;

extern "C" {

void* pdserve_model_new(const PdShape* shape, const uint16_t* embedding) try {
    return new Model(*shape, embedding);
} catch (const std::bad_alloc&) {
    return nullptr;
}

void pdserve_model_free(void* model) { delete (Model*)model; }

int pdserve_model_weight(void* model, int64_t layer, int which, const uint16_t* weight, int64_t n, int64_t k, int bits) try {
    Model& to = *(Model*)model;
    to.set(to.weight(layer, which), weight, n, k, bits);
    return 1;
} catch (const std::bad_alloc&) {
    return 0;
}

void pdserve_model_norm(void* model, int64_t layer, int which, const float* weight) {
    Model& to = *(Model*)model;
    to.norm(layer, which).assign(weight, weight + to.shape().hidden);
}

int pdserve_model_forward(void* model, const PdStep* step) try {
    return ((Model*)model)->forward(*step) ? 1 : -1;
} catch (const std::bad_alloc&) {
    return 0;
}

int pdserve_model_sample(void* model, int64_t threads, float* logits, const PdRow* rows, int64_t count, int32_t* ids) try {
    ((Model*)model)->sample(int(threads), logits, rows, count, ids);
    return 1;
} catch (const std::bad_alloc&) {
    return 0;
}
}

#pragma GCC pop_options

#else  // another architecture: nothing but the answer

extern "C" {
int pdserve_supported(void) { return 0; }
void* pdserve_model_new(const PdShape*, const uint16_t*) { return nullptr; }
void pdserve_model_free(void*) {}
int pdserve_model_weight(void*, int64_t, int, const uint16_t*, int64_t, int64_t, int) { return 0; }
void pdserve_model_norm(void*, int64_t, int, const float*) {}
int pdserve_model_forward(void*, const PdStep*) { return 0; }
int pdserve_model_sample(void*, int64_t, float*, const PdRow*, int64_t, int32_t*) { return 0; }
}

#endif
