// The attention of one layer: the way from its product to queries, keys and values in the places where attention reads them, and
// then attention, task by task.
#pragma once

#include "model.h"

namespace pdserve {

// Returns the places of a head in blocks of no span: there is no table.
template <class Kv>
Paged<Kv> Model::places(long layer, long head) const {
    const PdLayer& of = layers_[layer].shape;
    const long size = step_->block_size, dim = of.head_dim, heads = of.all_kv_heads;
    const long units = layers_[layer].latent() ? heads : 2 * heads;  // of keys and of values; the rows of latent attention are both
    const long each = size * Kv::bytes(dim), all = groups_[of.group].layers * units;
    const long key = of.index * units + of.first_kv_head + head, value = key + units - heads;
    const long scale = Kv::kScaled ? long(sizeof(float)) : 0;
    return {step_->groups[of.group].pool, nullptr, size, dim, all * (each + scale),
            key * each, value * each, all * each + key * scale, all * each + value * scale};
}

template <class Kv>
Paged<Kv> Model::paged(long span, long layer, long head) const {
    const PdGroup& group = step_->groups[layers_[layer].shape.group];
    Paged<Kv> found = places<Kv>(layer, head);
    found.table = group.tables + group.span_table[span];
    return found;
}

// Returns the place where the block of a row is kept: its keys, their scale, its values and their scale.
template <class Kv>
uint8_t* Model::kept(long row, long layer, long head) {
    const Layer& of = layers_[layer];
    return kept_.data() + row * kept_bytes_ + of.kept_at + head * places<Kv>(layer, head).head_bytes();
}

// Adds the biases of heads [head, end) of qkv, and norms those of queries and keys.
inline void Model::finish_heads(const Layer& of, const Part& part, long head, long end) {
    if (of.qkv_bias.empty() && of.query_norm.empty()) return;
    const long dim = of.shape.head_dim, heads = of.shape.heads, normed = std::min(end, heads + of.made_kv_heads());
    for (long row = part.row; row < part.row + part.rows; row++) {
        float* x = qkv_.data() + row * of.qkv_width();
        if (!of.qkv_bias.empty()) add_to(&of.qkv_bias[head * dim], (end - head) * dim, x + head * dim);
        if (of.query_norm.empty()) continue;
        for (long i = head; i < normed; i++)
            norm_to(x + i * dim, (i < heads ? of.query_norm : of.key_norm).data(), dim, float(of.shape.head_norm_eps), x + i * dim);
    }
}

// Handles heads [head, end) of qkv: rotates queries, and writes rotated keys and values into the pool. Quantised K and V are
// written only when all tokens of a block are there.
template <class Kv>
void Model::put_heads(Own& own, long layer, const Part& part, long head, long end) {
    const Layer& of = layers_[layer];
    const long dim = of.shape.head_dim, heads = of.shape.heads, kv_heads = of.shape.kv_heads;
    const long query_width = of.query_width(), qkv_width = of.qkv_width();
    const long turned = of.shape.rope_dim, plain_end = Kv::kScaled ? std::min(end, heads) : end, head_bytes = step_->block_size * Kv::bytes(dim);
    const PdGroup& group = step_->groups[of.shape.group];
    float* spare = own.spare.data();
    Paged<Kv> kv = paged<Kv>(0, layer, 0);  // once: a step has many spans, and calls this for each piece of the product
    for (long span = 0; span < step_->spans; span++) {
        const long from = std::max(part.row, span_row_[span]), to = std::min(part.row + part.rows, span_row_[span + 1]);
        kv.table = group.tables + group.span_table[span];
        for (long row = from; row < to; row++) {
            const long position = step_->span_start[span] + row - span_row_[span];
            const float *table = of.shape.rope + position * 2 * turned, *x = qkv_.data() + row * qkv_width;
            uint8_t *keys = kv.row(position, kv.key), *values = kv.row(position, kv.value);
            long i = head;
            for (; i < std::min(plain_end, heads); i++) {
                turn_part(x + i * dim, table, turned, dim, spare);
                put_head<Bf16Kv>(spare, dim, (uint8_t*)(query_.data() + row * query_width + i * dim));
            }
            for (; i < std::min(plain_end, heads + kv_heads); i++) {
                turn_part(x + i * dim, table, turned, dim, spare);
                put_head<Kv>(spare, dim, keys + (i - heads) * head_bytes);
            }
            for (; i < plain_end; i++) put_head<Kv>(x + i * dim, dim, values + (i - heads - kv_heads) * head_bytes);
        }
    }
    if constexpr (Kv::kScaled)
        if (part.together)
            for (const Touched& touched : touched_)
                for (long i = std::max(head, heads); i < end; i++) put_scaled<Kv>(own, layer, touched, i);
}

// Quantises one head of one block. Its tokens share a scale.
template <class Kv>
void Model::put_scaled(Own& own, long layer, const Touched& touched, long head) {
    const auto [span, row, position, count] = touched;
    const Layer& of = layers_[layer];
    const long dim = of.shape.head_dim, kv_heads = of.shape.kv_heads, kv_head = head - of.shape.heads, width = of.qkv_width();
    const long offset = position % step_->block_size;
    const Paged<Kv> kv = paged<Kv>(span, layer, kv_head % kv_heads);
    const float* x = qkv_.data() + row * width + head * dim;
    uint8_t* block = kv.block(position);
    if (of.latent()) {  // a row of latent attention is ready, and it follows the queries
        const float* stored = qkv_.data() + (row + 1) * width - dim;
        return quantise_head<Kv>(stored, width, offset, count, dim, block + kv.key, (float*)(block + kv.key_scale));
    }
    if (kv_head >= kv_heads)
        return quantise_head<Kv>(x, width, offset, count, dim, block + kv.value, (float*)(block + kv.value_scale));
    float* turned = own.turned.data();
    const long rope_dim = of.shape.rope_dim;
    for (long i = 0; i < count; i++)
        turn_part(x + i * width, of.shape.rope + (position + i) * 2 * rope_dim, rope_dim, dim, turned + i * dim);
    quantise_head<Kv>(turned, dim, offset, count, dim, block + kv.key, (float*)(block + kv.key_scale));
}

// Quantises the heads of all touched blocks. It is used when the tokens of a block may be rows of several tiles.
template <class Kv>
void Model::put_all_scaled(int thread, long layer) {
    const PdLayer& of = layers_[layer].shape;
    if (!of.stores_kv) return;
    const long heads = layers_[layer].latent() ? 1 : 2 * of.kv_heads;
    pool_.share(thread, long(touched_.size()) * heads, [&](long i) {
        if constexpr (Kv::kScaled) put_scaled<Kv>(own_[thread], layer, touched_[i / heads], of.heads + i % heads);
    });
}

template <class Kv>
void Model::attend(int thread, long layer) {
    const std::vector<Task>& tasks = group_of(layer).tasks;
    own_[thread].attention[layers_[layer].shape.group].asker.clear();
    pool_.queue(thread, long(tasks.size()), [&](long i) {
        if (tasks[i].drafts > 0) return run_drafted<Kv>(thread, tasks[i], layer);
        run<Kv>(thread, tasks[i], layer);
    });
}

// Adds the first tiles of the task that this thread will probably take next. If another thread is faster, some reads are wasted.
template <class Kv>
void Model::ask_for_next(int thread, long layer, Asker& asker) {
    const std::vector<Task>& tasks = group_of(layer).tasks;
    const long index = pool_.next_in_queue(thread);
    if (index >= long(tasks.size())) return;
    const Task& task = tasks[index];
    const long position = step_->span_start[task.span] + task.begin, end = position + task.tokens;
    const long first = std::max(task.chunk * kChunk, scoring(layer).low(position));
    for (long head = 0; head < task.heads; head++) {
        const Paged<Kv> kv = paged<Kv>(task.span, layer, task.head + head);
        asker.add(kv, kv.key, first, std::min<long>(kTile - first % kTile, end - first));
    }
}

// Computes the rows of a span with drafts as steps of one token do: each is written and then looks at the block as it is. What a
// later row changes is kept, because the later row may turn out to be wrong. Chunks that no row is written to are laid out once
// for some rows together.
template <class Kv>
void Model::run_drafted(int thread, const Task& task, long layer) {
    Group& group = group_of(layer);
    AttentionScratch& s = own_[thread].attention[layers_[layer].shape.group];
    const long start = step_->span_start[task.span], sharing = group.sharing(), each = task.heads * sharing;
    const long early_end = start / step_->block_size * step_->block_size / kChunk;
    const Scoring how = scoring(layer);
    for (long begin = 0, tokens; begin <= task.drafts; begin += tokens) {
        tokens = std::min(group.query_tile, task.drafts + 1 - begin);
        const long early = how.low(start + begin) / kChunk;
        s.early.clear(tokens * each, s.value_dim);
        for (long head = 0; head < task.heads && early < early_end; head++) {
            const Queries of{start + begin, tokens, 1, sharing};
            const auto at = [&](long r) { return r / sharing * each + head * sharing + r % sharing; };
            take_queries(task.span, begin, task.head + head, of, layer, s);
            add_chunks(paged<Kv>(task.span, layer, task.head + head), s, of, early, early_end, early_end * kChunk, how, s.early, at, [] {});
        }
        for (long row = begin; row < begin + tokens; row++) {
            if constexpr (Kv::kScaled) put_drafted<Kv>(thread, task, layer, row);
            const long position = start + row, from = (row - begin) * each;
            const Queries of{position, 1, task.heads, sharing};
            take_queries(task.span, row, task.head, of, layer, s);
            std::copy_n(&s.early.sum[from * s.value_dim], each * s.value_dim, s.merged.sum.begin());
            std::copy_n(&s.early.top[from], each, s.merged.top.begin());
            std::copy_n(&s.early.total[from], each, s.merged.total.begin());
            const auto following = [&] {
                if (row == task.drafts) ask_for_next<Kv>(thread, layer, s.asker);
            };
            add_chunks(paged<Kv>(task.span, layer, task.head), s, of, std::max(early_end, how.low(position) / kChunk), position / kChunk + 1,
                       of.end(), how, s.merged, [](long r) { return r; }, following);
            finish_rows(task.span, row, task.head, of, layer, s);
        }
    }
}

// Writes K and V of one row of a span with drafts, and keeps what its block then holds if the next row changes it.
template <class Kv>
void Model::put_drafted(int thread, const Task& task, long layer, long row) {
    const PdLayer& of = layers_[layer].shape;
    const long position = step_->span_start[task.span] + row;
    const Touched alone{task.span, span_row_[task.span] + row, position, 1};
    for (long head = task.head; head < task.head + task.heads; head++) {
        put_scaled<Kv>(own_[thread], layer, alone, of.heads + head);
        if (!layers_[layer].latent()) put_scaled<Kv>(own_[thread], layer, alone, of.heads + of.kv_heads + head);
        if (row == task.drafts || (position + 1) % step_->block_size == 0) continue;
        const Paged<Kv> kv = paged<Kv>(task.span, layer, head);
        kv.keep(kv.block(position), kept<Kv>(kept_first_[task.span] + row, layer, head));
    }
}

// Takes the queries of rows of a span, from row `begin` of the span and KV head `head` on.
inline void Model::take_queries(long span, long begin, long head, const Queries& of, long layer, AttentionScratch& s) {
    const long dim = group_of(layer).head_dim, width = layers_[layer].query_width();
    pdserve::take_queries(query_.data() + (span_row_[span] + begin) * width + head * of.group * dim, width, of, dim, s);
}

// Writes the results of these rows.
inline void Model::finish_rows(long span, long begin, long head, const Queries& of, long layer, AttentionScratch& s) {
    const long dim = group_of(layer).value_dim, width = layers_[layer].attended_width(), row = span_row_[span] + begin, each = of.each();
    for (long r = 0; r < of.rows(); r++)
        finish_row(&s.merged.sum[r * s.value_dim], s.merged.total[r], dim,
                   attended_.data() + (row + r / each) * width + (head * of.group + r % each) * dim);
}

template <class Kv>
void Model::run(int thread, const Task& task, long layer) {
    Group& group = group_of(layer);
    AttentionScratch& s = own_[thread].attention[layers_[layer].shape.group];
    const Paged<Kv> kv = paged<Kv>(task.span, layer, task.head);
    const Queries of{step_->span_start[task.span] + task.begin, task.tokens, task.heads, group.sharing()};
    const long rows = of.rows();
    const Scoring how = scoring(layer);
    const auto following = [&] { ask_for_next<Kv>(thread, layer, s.asker); };
    take_queries(task.span, task.begin, task.head, of, layer, s);
    if (task.part >= 0) {
        const long part = (task.part + task.chunk - task.chunk_first) * rows;
        const long seen = std::min(of.end(), task.chunk_end * kChunk);
        attend_chunk(kv, s, of, task.chunk, seen, how, following);
        std::copy_n(s.result.begin(), rows * s.value_dim, group.part_sums.begin() + part * s.value_dim);
        std::copy_n(s.top.begin(), rows, group.part_tops.begin() + part);
        std::copy_n(s.total.begin(), rows, group.part_totals.begin() + part);
        if (group.missing[task.part].fetch_sub(1, std::memory_order_acq_rel) == 1) merge_parts(task, layer, own_[thread]);
        return;
    }
    s.merged.clear(rows, s.value_dim);
    add_chunks(kv, s, of, task.chunk, task.chunk_end, of.end(), how, s.merged, [](long r) { return r; }, following);
    finish_rows(task.span, task.begin, task.head, of, layer, s);
}

// Merges the chunks of a decode. The thread that finished the last chunk calls it.
void Model::merge_parts(const Task& task, long layer, Own& own) {
    Group& group = group_of(layer);
    AttentionScratch& s = own.attention[layers_[layer].shape.group];
    const long rows = group.sharing(), dim = group.value_dim, width = layers_[layer].attended_width();
    group.missing[task.part].store(task.parts, std::memory_order_relaxed);  // for the next layer, which is a later phase
    for (long r = 0; r < rows; r++) {
        float top = kNone, total = 0;
        std::fill_n(s.merged.sum.begin(), s.value_dim, 0.0f);
        for (long part = task.part; part < task.part + task.parts; part++)
            merge(&group.part_sums[(part * rows + r) * s.value_dim], group.part_tops[part * rows + r],
                  group.part_totals[part * rows + r], s.merged.sum.data(), top, total, s.value_dim);
        finish_row(s.merged.sum.data(), total, dim,
                   attended_.data() + (span_row_[task.span] + task.begin) * width + (task.head * rows + r) * dim);
    }
}

}  // namespace pdserve
