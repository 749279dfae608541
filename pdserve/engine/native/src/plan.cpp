// The preparation of a step: the check that it is sound, the cut of attention into tasks, and the memory for it.
#include "model.h"

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
    step_ = &step;
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
    for (Group& group : groups_) plan_tasks(step, group);
}

namespace {

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
    for (long span = 0; span < step.spans; span++)
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
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
        return (a.chunk_end - a.chunk) * a.tokens * a.heads > (b.chunk_end - b.chunk) * b.tokens * b.heads;
    });
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

void Model::plan_touched(const PdStep& step) {
    touched_.clear();
    bool scaled = false;
    for (const PdGroup* group = step.groups; group < step.groups + shape_.groups; group++)
        with_format(group->kv_format, [&]<class Kv>() { scaled |= Kv::kScaled; });
    if (!scaled) return;
    for (long span = 0; span < step.spans; span++)
        for (long done = 0, count; done < step.span_count[span]; done += count) {
            const long position = step.span_start[span] + done;
            count = std::min<long>(step.block_size - position % step.block_size, step.span_count[span] - done);
            touched_.push_back({span, span_row_[span] + done, position, count});
        }
}

namespace {

template <class Room>
void grow(Room& room, long size) {
    if (long(room.size()) < size) room.resize(size);
}

}  // namespace

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
            long rows = 1, heads = 1;  // of the largest tasks
            if (group.tasks.empty()) continue;
            for (const Task& task : group.tasks)
                rows = std::max(rows, task.tokens * task.heads * group.sharing()), heads = std::max(heads, task.heads);
            own.attention[i].fit(rows, heads, round_up(group.head_dim, kPanel), round_up(group.value_dim, kPanel));
        }
        grow(own.spare, head_dim);
        grow(own.plain, std::min(rows, kTileRows) * most([](const Layer& of) { return of.shape.latent.nope_dim; }));
        if (!touched_.empty()) grow(own.turned, step.block_size * head_dim);
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
