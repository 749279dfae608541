// The C interface; no exception leaves it.
#include <new>
#include <stdexcept>
#include <system_error>

#include "abi.h"
#include "model.h"
#include "rate.h"

using pdserve::Model;

namespace {

template <class F>
int guarded(const F& f) noexcept {
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return PDSERVE_NO_MEMORY;
    } catch (const std::length_error&) {
        return PDSERVE_NO_MEMORY;
    } catch (const std::system_error&) {
        return PDSERVE_NO_THREAD;
    } catch (const pdserve::GangLost&) {
        return PDSERVE_LOST;
    } catch (...) {
        return PDSERVE_FAILED;
    }
}

}  // namespace

extern "C" {

void* pdserve_model_new(const PdShape* shape, const uint16_t* embedding) {
    Model* made = nullptr;
    guarded([&] { return made = new Model(*shape, embedding), PDSERVE_DONE; });
    return made;
}

void pdserve_model_free(void* model) { delete (Model*)model; }

int pdserve_model_weight(void* model, int64_t layer, int which, int64_t part, const uint16_t* weight, int64_t n, int64_t k,
                         int64_t first, int64_t count, int bits) {
    return guarded([&] {
        return ((Model*)model)->set(layer, which, part, {weight, n, k, first, count}, bits), PDSERVE_DONE;
    });
}

int pdserve_model_vector(void* model, int64_t layer, int which, const float* from, int64_t size) {
    return guarded([&] { return ((Model*)model)->vector(layer, which).assign(from, from + size), PDSERVE_DONE; });
}

void pdserve_model_expert_counts(void* model, int64_t layer, int64_t* to) { ((Model*)model)->expert_counts(layer, to); }

int pdserve_model_forward(void* model, const PdStep* step) {
    return guarded([&] { return ((Model*)model)->forward(*step) ? PDSERVE_DONE : PDSERVE_UNSOUND; });
}

int pdserve_model_settle(void* model, const int32_t* counts) {
    return guarded([&] { return ((Model*)model)->settle(counts), PDSERVE_DONE; });
}

int pdserve_model_follow(void* model, int64_t threads, PdGroup* groups) {
    return guarded([&] { return ((Model*)model)->follow(int(threads), groups), PDSERVE_LOST; });
}

int64_t pdserve_gang_bytes(const PdGang* gang) { return pdserve::Gang::bytes(*gang); }

float* pdserve_gang_logits(const PdGang* gang) { return pdserve::Gang(*gang).logits(); }

void pdserve_gang_lose(const PdGang* gang) { pdserve::Gang(*gang).lose(); }

int64_t pdserve_products(int bits, int64_t rounds) {
#ifdef PDSERVE_AMX
    return bits == 8 ? pdserve::multiply_tile_registers<true>(rounds) : pdserve::multiply_tile_registers<false>(rounds);
#endif
    if (bits == 8) return pdserve::with_int8_dot([&]<class Dot>() { return pdserve::multiply_registers<Dot>(rounds); });
    return pdserve::multiply_registers<pdserve::Bf16Dot>(rounds);
}

int pdserve_model_sample(void* model, int64_t threads, float* logits, const PdRow* rows, int64_t count, int32_t* ids) {
    return guarded([&] { return ((Model*)model)->sample(int(threads), logits, rows, count, ids), PDSERVE_DONE; });
}
}
