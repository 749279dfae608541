// The attention of one layer, task by task.
#pragma once

#include "model.h"

namespace pdserve {

template <class Kv>
void Model::attend(int thread, long layer) {
    pool_.queue(thread, long(tasks_.size()), [&](long i) { run<Kv>(thread, tasks_[i], layer); });
}

// Returns the asker for the task that this thread will probably take next. If another thread is faster, some reads are wasted.
template <class Kv>
Asker<Kv> Model::first_of_next(int thread, long layer) const {
    const long index = pool_.next_in_queue(thread);
    if (index >= long(tasks_.size())) return {};
    const Task& task = tasks_[index];
    const long first = task.chunk * kChunk, end = step_->span_start[task.span] + task.begin + task.tokens;
    return {paged<Kv>(task.span, layer, task.head), first, std::min<long>(kTile, end - first)};
}

template <class Kv>
void Model::run(int thread, const Task& task, long layer) {
    AttentionScratch& s = own_[thread].attention;
    const Paged<Kv> kv = paged<Kv>(task.span, layer, task.head);
    const long row = span_row_[task.span] + task.begin, position = step_->span_start[task.span] + task.begin;
    const long dim = shape_.head_dim, rows = task.tokens * group(), at = task.head * group() * dim;
    const float scale = 1.0f / std::sqrt(float(dim));
    const auto following = [&] { return first_of_next<Kv>(thread, layer); };
    take_queries(query_.data() + row * query_width() + at, query_width(), task.tokens, group(), dim, s);
    if (task.part >= 0) {
        const long part = task.part + task.chunk;
        const long seen = std::min(position + task.tokens, task.chunk_end * kChunk);
        attend_chunk(kv, s, position, task.tokens, group(), task.chunk, seen, scale, following);
        std::copy_n(s.result.begin(), rows * s.dim, part_sums_.begin() + part * rows * s.dim);
        std::copy_n(s.top.begin(), rows, part_tops_.begin() + part * rows);
        std::copy_n(s.total.begin(), rows, part_totals_.begin() + part * rows);
        if (missing_[task.part].fetch_sub(1, std::memory_order_acq_rel) == 1) merge_parts(task, own_[thread]);
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

// Merges the chunks of a decode. The thread that finished the last chunk calls it.
void Model::merge_parts(const Task& task, Own& own) {
    AttentionScratch& s = own.attention;
    const long rows = group(), dim = shape_.head_dim;
    missing_[task.part].store(task.parts, std::memory_order_relaxed);  // for the next layer, which is a later phase
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

}  // namespace pdserve
