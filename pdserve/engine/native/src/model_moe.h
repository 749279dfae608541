// A mixture of experts. Its rows are sorted by expert, and a thread multiplies its columns of all experts, one after the other in
// ascending order. So each row sums its experts in one order, and its bits depend on no other row.
#pragma once

#include "model.h"

namespace pdserve {

// Calls f() once, however often it is called. A thread that gets no piece of a phase must read nothing, because others may already
// be in the next one; so it sorts rows only when it has a piece.
template <class F>
class Once {
  public:
    explicit Once(const F& f) : f_(f) {}

    void operator()() {
        if (!done_) f_();
        done_ = true;
    }

  private:
    const F& f_;
    bool done_ = false;
};

// Writes the experts and weights of the part's rows, and counts them.
inline void Model::route(int thread, long index, const Part& part) {
    const Layer& layer = layers_[index];
    const PdMoe& how = layer.shape.moe;
    const long each = how.experts_per_token, columns = layer.router.n;
    each_row(thread, part, [&](long row, long end) {
        for (row += part.row, end += part.row; row < end; row++) {
            const float *products = products_.data() + row * columns, *bias = layer.router_bias.data();
            route_row(products, layer.router_bias.empty() ? nullptr : bias, how, own_[thread].route, &chosen_[row * each],
                      &weights_[row * each]);
            for (long i = 0; i < each; i++) layer.counts[chosen_[row * each + i]].fetch_add(1, std::memory_order_relaxed);
            if (how.shared_gate) shared_weights_[row] = first(sigmoid(broadcast(products[how.experts])));
        }
    });
}

// Multiplies `slots` slots of a part with the weights of their experts. order() sorts the slots of this thread. out(slot) returns
// the use of the product from this slot on.
template <class From, class Order, class Out>
void Model::product_of_experts(int thread, const Part& part, long slots, const std::vector<Weight>& weights, const From& from,
                               Order& order, const Out& out) {
    Own& own = own_[thread];
    const Weight& first = weights[0];
    const long panels = first.count();
    const bool alone = !part.together || part.rows <= kPrivateRows;
    Rows rows = (alone ? own.rows : together_).view(first);
    uint32_t* given = as_it_is(from, first);
    const auto fill = [&](long slot, long end) {
        order();
        for (; slot < end; slot++) prepare(from, slot, own.spare.data(), rows, first);
    };
    if (given != nullptr)
        rows.words = given;
    else if (!alone)
        share_rows(thread, slots, fill);
    const auto prepare_all = [&] {
        order();
        if (given == nullptr && alone) fill(0, slots);
        if (first.bits == 4) prepare4(own, rows, slots, first);
    };
    Once ready(prepare_all);
    const auto work = [&](long panel, long end) {
        ready();
        for (size_t expert = 0; expert < weights.size(); expert++) {
            const long begin = own.slots.begin[expert], count = own.slots.begin[expert + 1] - begin;
            if (count > 0) multiply(rows_from(rows, begin), count, weights[expert], panel, end, out(begin));
        }
    };
    if (!part.together || threads_ == 1) return work(0, panels);
    const long pieces = std::min<long>(panels, kPieces * threads_);
    pool_.share(thread, pieces, [&](long i) { work(panels * i / pieces, panels * (i + 1) / pieces); });
}

// Adds the results of the shared expert and of each row's experts to `to`, which is [rows of the part, hidden]. It may be the rows
// that `normed` reads, because all of them are read before. gated: room for all slots and for the shared expert.
inline void Model::add_experts(int thread, long index, const Part& part, const Normed& normed, bf16* gated, float* to) {
    const Layer& layer = layers_[index];
    const PdMoe& how = layer.shape.moe;
    const long hidden = shape_.hidden, each = how.experts_per_token, slots = part.rows * each;
    bf16* shared = gated + slots * how.intermediate;
    product(thread, part, layer.router, normed, Store{products_.data() + part.row * layer.router.n, layer.router.n});
    route(thread, index, part);
    if (how.shared > 0) product_gated(thread, part, layer, normed, shared, how.shared);
    Own& own = own_[thread];
    const auto sort = [&] { own.slots.sort(&chosen_[part.row * each], &weights_[part.row * each], part.rows, each, how.experts); };
    Once order(sort);
    const Gathered gathered{normed, own.slots.row.data()};
    const auto gate = [&]<class Gate>(const Gate&) {
        product_of_experts(thread, part, slots, layer.expert_gate_up, gathered, order,
                           [&](long slot) { return Gate{gated + slot * how.intermediate, how.intermediate}; });
    };
    layer.shape.activation == 0 ? gate(GateMul<silu>{}) : gate(GateMul<gelu_tanh>{});
    if (how.shared > 0 && how.shared_gate)
        product(thread, part, layer.down, Halves{shared}, AddWeighted{to, hidden, nullptr, &shared_weights_[part.row]});
    else if (how.shared > 0)
        product(thread, part, layer.down, Halves{shared}, AddTo{to, hidden});
    product_of_experts(thread, part, slots, layer.expert_down, Halves{gated}, order, [&](long slot) {
        return AddWeighted{to, hidden, own.slots.row.data() + slot, own.slots.weight.data() + slot};
    });
}

}  // namespace pdserve
