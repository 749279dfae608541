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
    const Weight& first = *std::find_if(weights.begin(), weights.end(), [](const Weight& one) { return one.n > 0; });
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
            if (count > 0 && weights[expert].n > 0) multiply(rows_from(rows, begin), count, weights[expert], panel, end, out(begin));
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
    if (splits()) {
        float* sums = gang_->sums(1, gang_->rank());
        if (how.shared > 0) product(thread, part, layer.down, Halves{shared}, Store{sums, hidden});
        float* of_slots = sums + part.rows * hidden;
        product_of_experts(thread, part, slots, layer.expert_down, Halves{gated}, order,
                           [&](long slot) { return Store{of_slots + slot * hidden, hidden}; });
        meet(thread);
        return add_split_experts(thread, index, part, order, to);
    }
    if (how.shared > 0 && how.shared_gate)
        product(thread, part, layer.down, Halves{shared}, AddWeighted{to, hidden, nullptr, &shared_weights_[part.row]});
    else if (how.shared > 0)
        product(thread, part, layer.down, Halves{shared}, AddTo{to, hidden});
    product_of_experts(thread, part, slots, layer.expert_down, Halves{gated}, order, [&](long slot) {
        return AddWeighted{to, hidden, own.slots.row.data() + slot, own.slots.weight.data() + slot};
    });
}

// Adds what the ranks left at place 1, in the order in which one rank adds it: first the results of the shared expert, then those of
// all slots. A slot's result is a sum over ranks, or is that of the rank that has the expert.
template <class Order>
void Model::add_split_experts(int thread, long index, const Part& part, Order& order, float* to) {
    const Layer& layer = layers_[index];
    const PdMoe& how = layer.shape.moe;
    const Own& own = own_[thread];
    const long hidden = shape_.hidden, panels = (hidden + kPanel - 1) / kPanel, ranks = gang_->ranks();
    const bool whole = how.own_experts < how.experts;
    const auto columns_of = [&](long begin, long end, const Weight* scaled, long offset, const auto& add) {
        for (long column = begin; column < end; column += kPanel) {
            F16 both[2];
            for (int half = 0; half < 2 && column + half * kLanes < end; half++) {
                const long at = column + half * kLanes;
                both[half] = gang_->sum(1, offset + at);
                if (scaled->late_scales != nullptr) both[half] = both[half] * load(scaled->late_scales + at);
            }
            add(column, both[0], both[1]);
        }
    };
    const AddTo plain{to, hidden};
    const AddWeighted gated{to, hidden, nullptr, &shared_weights_[part.row]};
    pool_.share(thread, std::min<long>(panels, kPieces * threads_), [&](long i) {
        const long pieces = std::min<long>(panels, kPieces * threads_);
        const long begin = panels * i / pieces * kPanel, end = std::min(hidden, panels * (i + 1) / pieces * kPanel);
        order();
        const AddWeighted weighted{to, hidden, own.slots.row.data(), own.slots.weight.data()};
        for (long row = 0; row < part.rows && how.shared > 0; row++)
            columns_of(begin, end, &layer.down, row * hidden, [&](long column, F16 low, F16 high) {
                how.shared_gate ? gated(row, column, low, high) : plain(row, column, low, high);
            });
        for (long expert = 0; expert < how.experts; expert++)
            for (long slot = own.slots.begin[expert]; slot < own.slots.begin[expert + 1]; slot++) {
                const long offset = (part.rows + slot) * hidden;
                if (!whole) {
                    columns_of(begin, end, &layer.expert_down[expert], offset,
                               [&](long column, F16 low, F16 high) { weighted(slot, column, low, high); });
                    continue;
                }
                const float* from = gang_->sums(1, int(expert * ranks / how.experts)) + offset;
                for (long column = begin; column < end; column += kPanel)
                    weighted(slot, column, load(from + column), column + kLanes < end ? load(from + column + kLanes) : zeros());
            }
    });
}

}  // namespace pdserve
