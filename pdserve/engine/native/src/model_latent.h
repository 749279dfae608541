// Latent attention in its absorbed form, before and after the attention of model_attention.h. The rows of the expansion that
// would make keys are multiplied into queries, and those that would make values into results. So attention is that of one KV head,
// and nothing is expanded for earlier positions. pdserve/engine/layers/latent.py computes the same by torch.
//
// The form is the same for prompts and decodes. Expanded keys and values of a prompt would need fewer operations, but then a
// chunk, which reads the latent vectors of earlier chunks, would have other bits than the whole prompt.
#pragma once

#include "model.h"

namespace pdserve {

// The use of a product as bfloat16 numbers; rows are `stride` numbers apart.
struct StoreHalves {
    bf16* to;
    long stride, columns;
    void operator()(long row, long column, F16 low, F16 high) const {
        bf16* at = to + row * stride + column;
        store_bf16(at, low, first_lanes(columns - column));
        if (columns - column > kLanes) store_bf16(at + kLanes, high, first_lanes(columns - column - kLanes));
    }
};

// Multiplies rows with the matrix of one head, some rows at a time, so that they stay in a cache. Rows of `x` and `out` count from
// the first. take(row, count) returns the rows of x from `row` on.
template <class Take>
void multiply_head(long rows, const Weight& w, const Take& take, const StoreHalves& out) {
    for (long row = 0; row < rows; row += kTileRows) {
        const long count = std::min(kTileRows, rows - row);
        multiply(take(row, count), count, w, 0, w.count(), StoreHalves{out.to + row * out.stride, out.stride, out.columns});
    }
}

// Computes a layer up to the absorbed queries of a part's rows, and to the rows that they store. A thread that has all columns of
// a head of queries also absorbs it.
inline void Model::begin_latent(int thread, long index, const Batch& batch, const Part& part) {
    const Layer& layer = layers_[index];
    const long heads = layer.shape.heads, dim = layer.expanded_width() / heads, width = layer.qkv_width();
    const bool ranked = layer.shape.latent.q_rank > 0;
    const Normed normed{batch.x + part.row * shape_.hidden, shape_.hidden, layer.attention_norm, layer.eps()};
    const Store latents{qkv_.data() + part.row * width, width};
    const Store queries = ranked ? Store{expanded_.data() + part.row * heads * dim, heads * dim} : latents;
    const long unit = std::lcm(dim, long(kPanel)) / kPanel;
    const auto absorb = [&](long panel, long end) {
        for (long head = panel * kPanel / dim; head < std::min(heads, end * kPanel / dim); head++)
            absorb_head(own_[thread], layer, part, queries.to + head * dim, queries.columns, head);
    };
    if (ranked) {
        product(thread, part, layer.qkv, normed, latents);
        const Normed vectors{latents.to, width, layer.query_norm, float(layer.shape.head_norm_eps)};
        product(thread, part, layer.query_up, vectors, queries, unit, absorb);
    } else {
        product(thread, part, layer.qkv, normed, queries, unit, absorb);
    }
    with_format(format_of(index), [&]<class Kv>() {
        each_row(thread, part, [&](long row, long end) { put_latents<Kv>(index, part.row + row, part.row + end); });
    });
}

// Absorbs one head of queries and rotates its other part. x: [rows of the part], `width` numbers apart.
inline void Model::absorb_head(Own& own, const Layer& layer, const Part& part, const float* x, long width, long head) {
    const long kv_rank = layer.shape.latent.kv_rank, plain_dim = layer.shape.latent.nope_dim;
    const long turned = layer.shape.rope_dim, stride = layer.query_width();
    bf16 *plain = own.plain.data(), *to = query_.data() + part.row * stride + head * layer.shape.head_dim;
    const auto take = [&](long first, long count) {
        for (long row = 0; row < count; row++) put_head<Bf16Kv>(x + (first + row) * width, plain_dim, (uint8_t*)(plain + row * plain_dim));
        return Rows{(uint32_t*)plain, plain_dim / 2};
    };
    multiply_head(part.rows, layer.absorb[head], take, StoreHalves{to, stride, kv_rank});
    each_token(part.row, part.row + part.rows, [&](long, long row, long position) {
        row -= part.row;
        turn_head(x + row * width + plain_dim, layer.shape.rope + position * 2 * turned, turned, own.spare.data());
        put_head<Bf16Kv>(own.spare.data(), turned, (uint8_t*)(to + row * stride + kv_rank));
    });
}

// Norms the latent vectors of rows [row, end), rotates their keys, and writes both into the pool. Quantised rows are written only
// when all tokens of a block are there.
template <class Kv>
void Model::put_latents(long index, long row, long end) {
    const Layer& layer = layers_[index];
    const long dim = layer.shape.head_dim, turned = layer.shape.rope_dim, kv_rank = layer.shape.latent.kv_rank, width = layer.qkv_width();
    Paged<Kv> kv = paged<Kv>(0, index, 0);
    const PdGroup& group = step_->groups[layer.shape.group];
    each_token(row, end, [&](long span, long at, long position) {
        float *x = qkv_.data() + (at + 1) * width - dim, *key = x + kv_rank;
        norm_to(x, layer.key_norm.data(), kv_rank, float(layer.shape.head_norm_eps), x);
        turn_head(key, layer.shape.rope + position * 2 * turned, turned, key);
        if constexpr (!Kv::kScaled) {
            if (!layer.shape.stores_kv) return;
            kv.table = group.tables + group.span_table[span];
            put_head<Kv>(x, dim, kv.row(position, kv.key));
        }
    });
}

// Expands the results of attention to values, and returns those of the part's rows, [rows, heads * v_dim].
inline bf16* Model::expand_values(int thread, const Layer& layer, const Batch& batch, const Part& part) {
    const long heads = layer.shape.heads, kv_rank = layer.shape.latent.kv_rank, v_dim = layer.shape.latent.v_dim;
    const bf16* from = batch.attended + part.row * layer.attended_width();
    bf16* values = values_.data() + part.row * layer.out_width();
    const auto expand = [&](long head) {
        const auto take = [&](long row, long) { return Rows{(uint32_t*)(from + (row * heads + head) * kv_rank), heads * kv_rank / 2}; };
        multiply_head(part.rows, layer.expand[head], take, StoreHalves{values + head * v_dim, heads * v_dim, v_dim});
    };
    if (part.together)
        pool_.share(thread, heads, expand);
    else
        for (long head = 0; head < heads; head++) expand(head);
    return values;
}

}  // namespace pdserve
