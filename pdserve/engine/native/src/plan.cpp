// The preparation of a step: the check that it is sound, the cut of attention into tasks, and the memory for it.
#include "model.h"
#include "model_attention.h"

namespace pdserve {

// Checks what the caller promises. If it were wrong, the step could read or write another sequence's KV.
bool Model::sound(const PdStep& step) const {
    long rows = 0;
    for (long span = 0; span < step.spans; span++) rows += step.span_count[span];
    if (rows != step.rows || step.layers < 1 || step.layers > shape_.layers) return false;
    for (const PdGroup* group = step.groups; group < step.groups + shape_.groups; group++) {
        for (long span = 0; span < step.spans; span++) {
            const long blocks = group->span_table[span + 1] - group->span_table[span];
            if (step.span_start[span] + step.span_count[span] > blocks * step.block_size) return false;
            const Scoring sees{0, 0, groups_[group - step.groups].window};
            for (long i = sees.low(step.span_start[span]) / step.block_size; i < blocks; i++) {
                const int32_t block = group->tables[group->span_table[span] + i];
                if (block < 0 || block >= group->blocks) return false;
            }
        }
        if (!with_format(group->kv_format, []<class Kv>() {})) return false;
    }
    for (long row = 0; row < step.rows; row++)
        if (step.token_ids[row] < 0 || step.token_ids[row] >= shape_.vocab) return false;
    return true;
}

// Takes all memory for a step.
void Model::prepare_step(const PdStep& step, int threads) {
    now_ = step;
    threads_ = threads;
    plan(step);
    fit(step);
}

bool Model::forward(const PdStep& step) {
    if (gang_ != nullptr && gang_->lost()) throw GangLost();
    if (!sound(step)) return false;
    layers_now_ = step.layers;
    prepare_step(step, int(step.threads));
    if (gang_ != nullptr && !gang_->publish(step, shape_.groups, step.layers == shape_.layers)) throw std::bad_alloc();
    run_step();
    const auto best_of = [&](long row) {
        Best best;
        for (const Own& own : own_) best.add(own.best[row]);
        for (int rank = 0; gang_ != nullptr && rank < gang_->ranks(); rank++) best.add(((const Best*)gang_->bests(rank))[row]);
        return best.token();
    };
    for (long row = 0; row < step.out_rows; row++) step.best[row] = best_of(row);
    return true;
}

// Computes a step that is prepared. What fails here ends the gang: the other ranks are in the same step.
void Model::run_step() {
    if (gang_ == nullptr) return pool_.run(threads_, [this](int thread) { compute(thread); });
    try {
        pool_.run(threads_, [this](int thread) { compute(thread); });
        for (long row = 0; gang_->last_stage() && row < step_->out_rows; row++) {
            Best& best = ((Best*)gang_->bests(gang_->rank()))[row] = {};
            for (const Own& own : own_) best.add(own.best[row]);
        }
        gang_->end_step();
    } catch (...) {
        gang_->lose();
        throw;
    }
}

// Computes the steps of rank 0 until the gang is lost, which ends this call by an exception.
void Model::follow(int threads, PdGroup* groups) {
    for (;;) {
        bool all_layers;
        const PdStep step = gang_->next_step(groups, shape_.groups, all_layers);
        try {
            if (step.rows == 0) {
                take_back(step.span_count);
                gang_->end_step();
                continue;
            }
            layers_now_ = all_layers ? shape_.layers : 1;
            prepare_step(step, threads);
        } catch (...) {
            gang_->lose();
            throw;
        }
        run_step();
    }
}

void Model::plan(const PdStep& step) {
    span_row_.assign(1, 0);
    for (long span = 0; span < step.spans; span++) span_row_.push_back(span_row_.back() + step.span_count[span]);
    plan_touched(step);
    plan_kept(step);
    for (Group& group : groups_) plan_tasks(step, group);
}

namespace {

template <class Room>
void grow(Room& room, long size) {
    if (long(room.size()) < size) room.resize(size);
}

// Returns the number of KV heads of a decode that one task takes, so that its rows fill a softmax of sixteen (attention.h). Threads
// share a step of few spans by heads.
long decode_heads(const Group& group, long spans, int threads) {
    const long most = std::max<long>(1, kLanes / group.sharing()), tasks = (group.kv_heads + most - 1) / most;
    return threads > 1 && spans * tasks < 4 * threads ? 1 : (group.kv_heads + tasks - 1) / tasks;
}

}  // namespace

// Cuts the attention of a group into tasks, the most expensive first. A decode is cut into its chunks when threads would lack
// work.
void Model::plan_tasks(const PdStep& step, Group& group) {
    std::vector<Task>& tasks = group.tasks;
    tasks.clear();
    if (group.kv_heads == 0) return;  // another stage has all layers of the group
    long parts = 0;
    const bool few = threads_ > 1 && step.spans * group.kv_heads < 4 * threads_;
    const long heads_each = decode_heads(group, step.spans, threads_);
    for (long span = 0; span < step.spans; span++) {
        if (kept_first_[span] >= 0) {
            const long drafts = step.span_count[span] - 1, end = (step.span_start[span] + drafts) / kChunk + 1;
            for (long head = 0; head < group.kv_heads; head += heads_each)
                tasks.push_back({span, head, std::min(heads_each, group.kv_heads - head), 0, 1, 0, end, -1, 0, 0, drafts});
            continue;
        }
        for (long begin = 0; begin < step.span_count[span]; begin += group.query_tile) {
            const long tokens = std::min<long>(group.query_tile, step.span_count[span] - begin);
            const long position = step.span_start[span] + begin;
            const long end = (position + tokens + kChunk - 1) / kChunk;
            const long first = Scoring{0, 0, group.window}.low(position) / kChunk, chunks = end - first;
            const long each = tokens == 1 ? heads_each : 1;
            for (long head = 0; head < group.kv_heads; head += each) {
                const long heads = std::min(each, group.kv_heads - head);
                if (few && tokens == 1 && chunks > 1) {
                    for (long chunk = first; chunk < end; chunk++)
                        tasks.push_back({span, head, heads, begin, tokens, chunk, chunk + 1, parts, chunks, first});
                    parts += chunks;
                } else {
                    tasks.push_back({span, head, heads, begin, tokens, first, end, -1, 0, first});
                }
            }
        }
    }
    const auto cost = [](const Task& of) { return (of.chunk_end - of.chunk) * (of.tokens + of.drafts) * of.heads; };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    if (parts > group.missing_count) {
        group.missing.reset(new std::atomic<long>[parts]);
        group.missing_count = parts;
    }
    for (const Task& task : tasks)
        if (task.part >= 0) group.missing[task.part].store(task.parts);
    const long padded = round_up(group.value_dim, kPanel);
    group.part_sums.resize(parts * group.sharing() * padded);
    group.part_tops.resize(parts * group.sharing());
    group.part_totals.resize(parts * group.sharing());
}

// Finds the blocks that are written at once, and the rows of spans with drafts, which are written one by one.
void Model::plan_touched(const PdStep& step) {
    touched_.clear();
    kept_first_.assign(step.spans, -1);
    bool scaled = false;
    for (const PdGroup* group = step.groups; group < step.groups + shape_.groups; group++)
        with_format(group->kv_format, [&]<class Kv>() { scaled |= Kv::kScaled; });
    if (!scaled) return;
    long kept = 0;
    for (long span = 0; span < step.spans; span++) {
        if (step.drafted[span] && step.span_count[span] > 1) {
            kept_first_[span] = kept;
            kept += step.span_count[span];
            continue;
        }
        for (long done = 0, count; done < step.span_count[span]; done += count) {
            const long position = step.span_start[span] + done;
            count = std::min<long>(step.block_size - position % step.block_size, step.span_count[span] - done);
            touched_.push_back({span, span_row_[span] + done, position, count});
        }
    }
}

// Makes room for copies of the blocks that rows of spans with drafts are written to, and notes the blocks.
void Model::plan_kept(const PdStep& step) {
    kept_bytes_ = 0;
    for (Group& group : groups_) group.kept_blocks.clear();
    if (std::all_of(kept_first_.begin(), kept_first_.end(), [](long first) { return first < 0; })) return;
    for (long i = 0; i < shape_.layers; i++)
        with_format(format_of(i), [&]<class Kv>() {
            if constexpr (Kv::kScaled) {
                const Paged<Kv> kv = places<Kv>(i, 0);
                layers_[i].kept_at = kept_bytes_;
                kept_bytes_ += layers_[i].shape.kv_heads * kv.head_bytes();
                std::vector<uint8_t*>& blocks = group_of(i).kept_blocks;
                if (!blocks.empty()) return;
                for (long span = 0; span < step.spans; span++)
                    for (long row = 0; kept_first_[span] >= 0 && row < step.span_count[span]; row++)
                        blocks.push_back(paged<Kv>(span, i, 0).block(step.span_start[span] + row));
            }
        });
    long rows = 0;
    for (const Group& group : groups_) rows = std::max(rows, long(group.kept_blocks.size()));
    grow(kept_, rows * kept_bytes_);
}

// Gives blocks back what they held after the last row that counts.
void Model::take_back(const int32_t* counts) {
    for (long span = 0; span < long(kept_first_.size()); span++) {
        const long rows = span_row_[span + 1] - span_row_[span], last = kept_first_[span] + counts[span] - 1;
        if (kept_first_[span] < 0 || counts[span] < 1 || counts[span] >= rows) continue;
        for (long i = 0; i < layers_now_; i++)
            with_format(format_of(i), [&]<class Kv>() {
                if constexpr (Kv::kScaled) {
                    uint8_t* block = group_of(i).kept_blocks[last];
                    if (block != group_of(i).kept_blocks[last + 1]) return;  // rows in another block have changed nothing here
                    for (long head = 0; head < layers_[i].shape.kv_heads; head++)
                        places<Kv>(i, head).restore(kept<Kv>(last, i, head), block);
                }
            });
    }
    kept_first_.clear();
}

void Model::settle(const int32_t* counts) {
    if (gang_ == nullptr) return take_back(counts);
    if (gang_->lost()) throw GangLost();
    gang_->publish_counts(counts, long(kept_first_.size()));
    take_back(counts);
    gang_->end_step();
}

// Makes room for queries, keys, values and attention.
void Model::fit_attention(const PdStep& step) {
    const long rows = step.rows, attended_width = most([](const Layer& of) { return of.attended_width(); });
    const long head_dim = most([](const Layer& of) { return of.shape.head_dim; });
    grow(qkv_, rows * most([](const Layer& of) { return of.qkv_width(); }));
    grow(query_, rows * most([](const Layer& of) { return of.query_width(); }));
    grow(attended_, rows * attended_width);
    grow(wanted_attended_, step.out_rows * attended_width);
    grow(expanded_, rows * most([](const Layer& of) { return of.shape.latent.q_rank > 0 ? of.expanded_width() : 0; }));
    grow(values_, rows * most([](const Layer& of) { return of.latent() ? of.out_width() : 0; }));
    for (Own& own : own_) {
        own.attention.resize(groups_.size());
        for (size_t i = 0; i < groups_.size(); i++) {
            const Group& group = groups_[i];
            long rows = 1, heads = 1, early = 0;  // of the largest tasks
            if (group.tasks.empty()) continue;
            for (const Task& task : group.tasks)
                rows = std::max(rows, task.tokens * task.heads * group.sharing()), heads = std::max(heads, task.heads);
            for (const Task& task : group.tasks)
                if (task.drafts > 0) early = std::max(early, std::min(group.query_tile, task.drafts + 1) * task.heads * group.sharing());
            own.attention[i].fit(std::max(rows, early), heads, early, round_up(group.head_dim, kPanel), round_up(group.value_dim, kPanel));
        }
        grow(own.spare, head_dim);
        grow(own.plain, std::min(rows, kTileRows) * most([](const Layer& of) { return of.shape.latent.nope_dim; }));
        if (!touched_.empty() || kept_bytes_ > 0) grow(own.turned, step.block_size * head_dim);
    }
}

void Model::fit(const PdStep& step) {
    const long rows = step.rows, hidden = shape_.hidden;
    grow(residual_, rows * hidden);
    grow(wanted_, step.out_rows * hidden);
    const long gated_width = most([](const Layer& of) { return of.gated_width(); });
    const long each = std::max<long>(1, most([](const Layer& of) { return of.shape.moe.experts_per_token; }));  // slots of a row
    const long experts = most([](const Layer& of) { return of.shape.moe.experts; });
    // A step that shares rows out also has the memory for all smaller steps, so the largest step decides how much there is.
    const long together = by_rows(rows) ? std::max<long>(step.out_rows, kRowsEach * threads_) : rows;
    const long own_rows = by_rows(rows) ? kTileRows : kPrivateRows;
    const long normed = std::max(hidden, most([](const Layer& of) { return of.shape.latent.q_rank; }));
    const long words = std::max(normed / 2, integers() ? widest() / 4 : 0);
    together_.fit(together * each, words, head_.integers() || integers());
    grow(gated_, together * gated_width);
    const bool branches = post_norms();
    if (branches) grow(branch_, together * hidden);
    if (long(own_.size()) < threads_) own_.resize(threads_);
    fit_attention(step);
    for (Own& own : own_) {
        grow(own.spare, widest());
        own.best.assign(step.out_rows, Best{});
        own.rows.fit(own_rows * each, words, head_.integers() || integers());
        if (by_rows(rows)) grow(own.gated, kTileRows * gated_width);
        if (by_rows(rows) && branches) grow(own.branch, kTileRows * hidden);
        if (layers_[0].attention_out.bits == 4) {
            grow(own.sums, std::max(together, own_rows) * each * widest() / kGroup4);
            if (kDepth > 1) grow(own.codes, widest() / 2 * kPanel);
        }
        if (experts == 0) continue;
        own.route.fit(experts, most([](const Layer& of) { return of.shape.moe.groups; }));
        own.slots.fit(std::max(together, own_rows) * each, experts);
    }
    if (experts == 0) return;
    grow(products_, rows * most([](const Layer& of) { return of.router.n; }));
    grow(weights_, rows * each);
    grow(chosen_, rows * each);
    grow(shared_weights_, rows);
}

}  // namespace pdserve
