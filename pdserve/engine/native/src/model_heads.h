// The way from the product of a layer to queries, keys and values in the places where attention reads them.
#pragma once

#include "model.h"

namespace pdserve {

template <class Kv>
Paged<Kv> Model::paged(long span, long layer, long head) const {
    const PdLayer& of = layers_[layer].shape;
    const PdGroup& group = step_->groups[of.group];
    const long size = step_->block_size, dim = of.head_dim, heads = of.kv_heads;
    const long each = size * Kv::bytes(dim), all = groups_[of.group].layers * 2 * heads;
    const long key = of.index * 2 * heads + head, value = key + heads;
    const long scale = Kv::kScaled ? long(sizeof(float)) : 0;
    return {group.pool, group.tables + group.span_table[span], size, dim, all * (each + scale),
            key * each, value * each, all * each + key * scale, all * each + value * scale};
}

// Handles heads [head, end) of qkv: rotates queries, and writes rotated keys and values into the pool. Quantised K and V are
// written only when all tokens of a block are there.
template <class Kv>
void Model::put_heads(Own& own, long layer, const Part& part, long head, long end) {
    const Layer& of = layers_[layer];
    const long dim = of.shape.head_dim, heads = of.shape.heads, kv_heads = of.shape.kv_heads;
    const long query_width = of.query_width(), qkv_width = of.qkv_width();
    const long plain_end = Kv::kScaled ? std::min(end, heads) : end, head_bytes = step_->block_size * Kv::bytes(dim);
    const PdGroup& group = step_->groups[of.shape.group];
    float* spare = own.spare.data();
    Paged<Kv> kv = paged<Kv>(0, layer, 0);  // once: a step has many spans, and calls this for each piece of the product
    for (long span = 0; span < step_->spans; span++) {
        const long from = std::max(part.row, span_row_[span]), to = std::min(part.row + part.rows, span_row_[span + 1]);
        kv.table = group.tables + group.span_table[span];
        for (long row = from; row < to; row++) {
            const long position = step_->span_start[span] + row - span_row_[span];
            const float *table = of.shape.rope + position * 2 * dim, *x = qkv_.data() + row * qkv_width;
            uint8_t *keys = kv.row(position, kv.key), *values = kv.row(position, kv.value);
            long i = head;
            for (; i < std::min(plain_end, heads); i++) {
                turn_head(x + i * dim, table, dim, spare);
                put_head<Bf16Kv>(spare, dim, (uint8_t*)(query_.data() + row * query_width + i * dim));
            }
            for (; i < std::min(plain_end, heads + kv_heads); i++) {
                turn_head(x + i * dim, table, dim, spare);
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
    if (kv_head >= kv_heads)
        return quantise_head<Kv>(x, width, offset, count, dim, block + kv.value, (float*)(block + kv.value_scale));
    float* turned = own.turned.data();
    for (long i = 0; i < count; i++) turn_head(x + i * width, of.shape.rope + (position + i) * 2 * dim, dim, turned + i * dim);
    quantise_head<Kv>(turned, dim, offset, count, dim, block + kv.key, (float*)(block + kv.key_scale));
}

// Quantises the heads of all touched blocks. It is used when the tokens of a block may be rows of several tiles.
template <class Kv>
void Model::put_all_scaled(int thread, long layer) {
    const PdLayer& of = layers_[layer].shape;
    const long heads = 2 * of.kv_heads;
    pool_.share(thread, long(touched_.size()) * heads, [&](long i) {
        if constexpr (Kv::kScaled) put_scaled<Kv>(own_[thread], layer, touched_[i / heads], of.heads + i % heads);
    });
}

}  // namespace pdserve
