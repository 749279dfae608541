// The computation of a step, layer by layer. Every thread of the pool runs `compute`.
#include "model.h"
#include "model_attention.h"
#include "model_latent.h"
#include "model_moe.h"

namespace pdserve {

void Model::compute(int thread) {
    const Flush flush;
#ifdef PDSERVE_AMX
    const TileUse tiles;
#endif
    const long last = layers_now_ - 1;
    const bool to_logits = gang_ == nullptr || gang_->last_stage();
    Batch batch{residual_.data(), attended_.data(), step_->rows};
    take_rows(thread, batch.rows);
    each_part(thread, batch.rows, [&](const Part& part) { begin_layer(thread, 0, batch, part); });
    for (long i = 0; i <= last; i++) {
        with_format(format_of(i), [&]<class Kv>() {
            if (Kv::kScaled && (by_rows(step_->rows) || layers_[i].latent())) put_all_scaled<Kv>(thread, i);
            if (layers_[i].shape.shares_kv) meet(thread);
            if (!to_logits || i < last || step_->out_rows > 0) attend<Kv>(thread, i);
        });
        if (to_logits && i == last && step_->out_rows == 0) return;
        if (to_logits && i == last && step_->out_rows < batch.rows) batch = keep_wanted(thread, batch);
        each_part(thread, batch.rows, [&](const Part& part) {
            finish_layer(thread, i, batch, part);
            if (i < last) begin_layer(thread, i + 1, batch, part);
        });
    }
    if (!to_logits) {
        if (gang_->rank() > 0) return;
        return pool_.share(thread, 1, [&](long) {
            std::copy_n(batch.x, batch.rows * shape_.hidden, gang_->carried());
            gang_->hand_on();
        });
    }
    float* logits = step_->logits != nullptr && gang_ != nullptr ? gang_->logits() : step_->logits;
    product(thread, Part{0, batch.rows, true}, head_, Normed{batch.x, shape_.hidden, norm_, float(shape_.rms_norm_eps)},
            TakeLogits{logits, shape_.vocab, shape_.own_vocab, shape_.first_token_id, float(shape_.softcap), own_[thread].best.data()});
}

// Takes the rows of a step: from the embedding, of which each rank of the first stage has a share, or from the stage before.
void Model::take_rows(int thread, long rows) {
    const long hidden = shape_.hidden;
    const auto copy = [&](const float* from) {
        share_rows(thread, rows, [&](long row, long end) { std::copy(from + row * hidden, from + end * hidden, &residual_[row * hidden]); });
    };
    if (gang_ != nullptr && !gang_->first_stage()) {
        pool_.share(thread, 1, [&](long) { gang_->take_over(); });
        return copy(gang_->carried());
    }
    float* to = splits() ? gang_->sums(1, 0) : residual_.data();  // each row comes from one rank alone
    share_rows(thread, rows, [&](long row, long end) { embed(row, end, to); });
    if (!splits()) return;
    meet(thread);
    copy(to);
}

// Writes the embedding of rows [row, end) whose tokens this rank has.
void Model::embed(long row, long end, float* to) {
    const F16 scale = broadcast(float(shape_.embedding_scale));
    for (; row < end; row++) {
        const long id = step_->token_ids[row] - shape_.first_token_id;
        if (id < 0 || id >= shape_.own_vocab) continue;
        for (long i = 0; i < shape_.hidden; i += kLanes)
            store(to + row * shape_.hidden + i, load_bf16(embedding_ + id * shape_.hidden + i) * scale);
    }
}

// Computes a layer up to the queries, keys and values of a part's rows. A thread that has all columns of a head also rotates
// it and puts it into its place.
void Model::begin_layer(int thread, long index, const Batch& batch, const Part& part) {
    const Layer& layer = layers_[index];
    if (layer.latent()) return begin_latent(thread, index, batch, part);
    const Normed normed{batch.x + part.row * shape_.hidden, shape_.hidden, layer.attention_norm, layer.eps()};
    const Store store{qkv_.data() + part.row * layer.qkv_width(), layer.qkv_width()};
    const long dim = layer.shape.head_dim, all = layer.shape.heads + 2 * layer.made_kv_heads();
    const long unit = std::lcm(dim, long(kPanel)) / kPanel;
    product(thread, part, layer.qkv, normed, store, unit, [&](long panel, long end) {
        const long head = panel * kPanel / dim, head_end = std::min(all, end * kPanel / dim);
        finish_heads(layer, part, head, head_end);
        with_format(format_of(index), [&]<class Kv>() { put_heads<Kv>(own_[thread], index, part, head, head_end); });
    });
}

// Adds the product of `from` and a weight to x [rows of the part, hidden]. A bias and a norm of the product are optional: those
// that are empty are not computed.
template <class From>
void Model::add_branch(int thread, const Part& part, const Weight& w, const From& from, float* x, const std::vector<float>& bias,
                       const std::vector<float>& norm, float eps) {
    const long hidden = shape_.hidden;
    if (bias.empty() && norm.empty()) return product(thread, part, w, from, AddTo{x, hidden});
    float* branch = part.together ? branch_.data() : own_[thread].branch.data();
    float* to = norm.empty() ? x : branch;
    const auto add_bias = [&](long panel, long end) {
        const long column = panel * kPanel, columns = std::min(end * kPanel, hidden) - column;
        for (long row = 0; row < part.rows && !bias.empty(); row++) add_to(&bias[column], columns, to + row * hidden + column);
    };
    if (norm.empty()) return product(thread, part, w, from, AddTo{x, hidden}, 1, add_bias);
    product(thread, part, w, from, Store{branch, hidden}, 1, add_bias);
    add_normed(thread, part, branch, norm, eps, x);
}

// Returns rows of k numbers of which each rank of the stage has an equal part, `own`.
Halves Model::gather(int thread, const Part& part, const Halves& own, long k) {
    const long width = k / gang_->ranks(), column = gang_->rank() * width;
    bf16* all = gang_->gathered();
    each_row(thread, part, [&](long row, long end) {
        for (; row < end; row++) std::copy_n(own.from + row * width, width, all + row * k + column);
    });
    meet(thread);
    return {all};
}

// Does what `add_branch` does where the ranks of a stage share a product. Each rank has parts of each sum, or all of the sums of its
// columns. They leave them at a place for sums.
void Model::add_split(int thread, const Part& part, const Weight& w, const Halves& from, int place, float* x,
                      const std::vector<float>& bias, const std::vector<float>& norm, float eps) {
    const long hidden = shape_.hidden;
    if (gang_->gathers())
        product(thread, part, w, gather(thread, part, from, w.k),
                Store{gang_->sums(place, 0) + shape_.first_column, shape_.own_columns, hidden});
    else
        product(thread, part, w, from, Store{gang_->sums(place, gang_->rank()), hidden});
    meet(thread);
    float* branch = branch_.data();
    each_row(thread, part, [&](long row, long end) {
        for (; row < end; row++) {
            float* to = norm.empty() ? x + row * hidden : branch + row * hidden;
            for (long i = 0; i < hidden; i += kLanes) {
                F16 sum = gang_->sum(place, row * hidden + i);
                if (w.late_scales != nullptr) sum = sum * load(w.late_scales + i);
                store(to + i, norm.empty() ? load(to + i) + sum : sum);
            }
            if (!bias.empty()) add_to(bias.data(), hidden, to);
        }
    });
    if (!norm.empty()) add_normed(thread, part, branch, norm, eps, x);
}

// Norms a branch in place, and adds it to x. Both are [rows of the part, hidden].
void Model::add_normed(int thread, const Part& part, float* branch, const std::vector<float>& norm, float eps, float* x) {
    const long hidden = shape_.hidden;
    each_row(thread, part, [&](long row, long end) {
        for (; row < end; row++) {
            float* own = branch + row * hidden;
            norm_to(own, norm.data(), hidden, eps, own);
            add_to(own, hidden, x + row * hidden);
        }
    });
}

// Multiplies with gate and up, and writes activation(gate) * up: [rows of the part, width].
void Model::product_gated(int thread, const Part& part, const Layer& layer, const Normed& from, bf16* to, long width) {
    if (layer.shape.activation == 0)
        product(thread, part, layer.gate_up, from, GateMul<silu>{to, width});
    else
        product(thread, part, layer.gate_up, from, GateMul<gelu_tanh>{to, width});
}

// Computes the rest of a layer, after attention.
void Model::finish_layer(int thread, long index, const Batch& batch, const Part& part) {
    const Layer& layer = layers_[index];
    const long hidden = shape_.hidden;
    float* x = batch.x + part.row * hidden;
    bf16* gated = part.together ? gated_.data() : own_[thread].gated.data();
    const Halves attended{layer.latent() ? expand_values(thread, layer, batch, part) : batch.attended + part.row * layer.attended_width()};
    const auto add = [&](const Weight& w, const Halves& from, int place, const std::vector<float>& bias, const std::vector<float>& norm) {
        if (splits()) return add_split(thread, part, w, from, place, x, bias, norm, layer.eps());
        add_branch(thread, part, w, from, x, bias, norm, layer.eps());
    };
    add(layer.attention_out, attended, 0, layer.out_bias, layer.post_attention_norm);
    const Normed normed{x, hidden, layer.mlp_norm, layer.eps()};
    if (layer.shape.moe.experts == 0) {
        product_gated(thread, part, layer, normed, gated, layer.shape.intermediate);
        return add(layer.down, Halves{gated}, 1, {}, layer.post_mlp_norm);
    }
    if (layer.post_mlp_norm.empty()) return add_experts(thread, index, part, normed, gated, x);
    float* branch = part.together ? branch_.data() : own_[thread].branch.data();
    each_row(thread, part, [&](long row, long end) { std::fill_n(branch + row * hidden, (end - row) * hidden, 0.0f); });
    add_experts(thread, index, part, normed, gated, branch);
    add_normed(thread, part, branch, layer.post_mlp_norm, layer.eps(), x);
}

// Keeps only the rows whose logits are wanted.
Batch Model::keep_wanted(int thread, const Batch& batch) {
    const long hidden = shape_.hidden, width = layers_.back().attended_width();
    pool_.share(thread, step_->out_rows, [&](long i) {
        std::copy_n(batch.x + step_->out[i] * hidden, hidden, wanted_.begin() + i * hidden);
        std::copy_n(batch.attended + step_->out[i] * width, width, wanted_attended_.begin() + i * width);
    });
    return {wanted_.data(), wanted_attended_.data(), step_->out_rows};
}

void Model::sample(int threads, float* logits, const PdRow* rows, long count, int32_t* ids) {
    if (long(own_.size()) < threads) own_.resize(threads);
    int64_t edits = 0, tops = 0;
    for (const PdRow* row = rows; row < rows + count; row++) {
        edits = std::max(edits, row->biases + row->seen + row->banned);
        tops = std::max(tops, row->tops);
    }
    for (Own& own : own_) own.draw.fit(shape_.vocab, edits, tops);
    pool_.run(threads, [&](int thread) {
        pool_.queue(thread, count, [&](long i) {  // a queue, because rows take different times
            ids[i] = take(logits + rows[i].row * shape_.vocab, shape_.vocab, rows[i], own_[thread].draw);
        });
    });
}

}  // namespace pdserve
