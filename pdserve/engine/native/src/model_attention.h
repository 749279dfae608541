// The attention of one layer, task by task.
#pragma once

#include "model.h"

namespace pdserve {

template <class Kv>
void Model::attend(int thread, long layer) {
    const std::vector<Task>& tasks = group_of(layer).tasks;
    pool_.queue(thread, long(tasks.size()), [&](long i) { run<Kv>(thread, tasks[i], layer); });
}

// Returns the asker for the task that this thread will probably take next. If another thread is faster, some reads are wasted.
template <class Kv>
Asker<Kv> Model::first_of_next(int thread, long layer) {
    const std::vector<Task>& tasks = group_of(layer).tasks;
    const long index = pool_.next_in_queue(thread);
    if (index >= long(tasks.size())) return {};
    const Task& task = tasks[index];
    const long first = task.chunk * kChunk, end = step_->span_start[task.span] + task.begin + task.tokens;
    return {paged<Kv>(task.span, layer, task.head), first, std::min<long>(kTile, end - first)};
}

template <class Kv>
void Model::run(int thread, const Task& task, long layer) {
    Group& group = group_of(layer);
    AttentionScratch& s = own_[thread].attention[layers_[layer].shape.group];
    const Paged<Kv> kv = paged<Kv>(task.span, layer, task.head);
    const long row = span_row_[task.span] + task.begin, position = step_->span_start[task.span] + task.begin;
    const long dim = group.head_dim, sharing = group.sharing(), width = layers_[layer].query_width();
    const long rows = task.tokens * sharing, at = task.head * sharing * dim;
    const float scale = 1.0f / std::sqrt(float(dim));
    const auto following = [&] { return first_of_next<Kv>(thread, layer); };
    take_queries(query_.data() + row * width + at, width, task.tokens, sharing, dim, s);
    if (task.part >= 0) {
        const long part = task.part + task.chunk;
        const long seen = std::min(position + task.tokens, task.chunk_end * kChunk);
        attend_chunk(kv, s, position, task.tokens, sharing, task.chunk, seen, scale, following);
        std::copy_n(s.result.begin(), rows * s.dim, group.part_sums.begin() + part * rows * s.dim);
        std::copy_n(s.top.begin(), rows, group.part_tops.begin() + part * rows);
        std::copy_n(s.total.begin(), rows, group.part_totals.begin() + part * rows);
        if (group.missing[task.part].fetch_sub(1, std::memory_order_acq_rel) == 1) merge_parts(task, layer, own_[thread]);
        return;
    }
    std::fill_n(s.merged.begin(), rows * s.dim, 0.0f);
    std::fill_n(s.merged_top.begin(), rows, kNone);
    std::fill_n(s.merged_total.begin(), rows, 0.0f);
    for (long chunk = task.chunk; chunk < task.chunk_end; chunk++) {
        attend_chunk(kv, s, position, task.tokens, sharing, chunk, position + task.tokens, scale, following);
        for (long r = 0; r < rows; r++)
            merge(&s.result[r * s.dim], s.top[r], s.total[r], &s.merged[r * s.dim], s.merged_top[r], s.merged_total[r], s.dim);
    }
    for (long r = 0; r < rows; r++)
        finish_row(&s.merged[r * s.dim], s.merged_total[r], dim,
                   attended_.data() + (row + r / sharing) * width + at + r % sharing * dim);
}

// Merges the chunks of a decode. The thread that finished the last chunk calls it.
void Model::merge_parts(const Task& task, long layer, Own& own) {
    Group& group = group_of(layer);
    AttentionScratch& s = own.attention[layers_[layer].shape.group];
    const long rows = group.sharing(), dim = group.head_dim, width = layers_[layer].query_width();
    group.missing[task.part].store(task.parts, std::memory_order_relaxed);  // for the next layer, which is a later phase
    for (long r = 0; r < rows; r++) {
        float top = kNone, total = 0;
        std::fill_n(s.merged.begin(), s.dim, 0.0f);
        for (long part = task.part; part < task.part + task.parts; part++)
            merge(&group.part_sums[(part * rows + r) * s.dim], group.part_tops[part * rows + r], group.part_totals[part * rows + r],
                  s.merged.data(), top, total, s.dim);
        finish_row(s.merged.data(), total, dim,
                   attended_.data() + (span_row_[task.span] + task.begin) * width + (task.head * rows + r) * dim);
    }
}

}  // namespace pdserve
