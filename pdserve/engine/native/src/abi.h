// What Python and the kernels tell each other; native/library.py declares the same.
#pragma once

#include <cstdint>

extern "C" {

struct PdShape {
    int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
    double rms_norm_eps;
};

// One step. Rows are tokens, those of a span one after the other.
struct PdStep {
    int64_t threads;
    int64_t rows, spans, out_rows;
    const int32_t *token_ids;                 // [rows]
    const int32_t *span_start, *span_count;   // [spans]
    const int64_t *span_table;                // [spans + 1], where in `tables` the blocks of each begin and end
    const int32_t *tables;                    // block ids
    const int32_t *out;                                      // [out_rows], ascending rows whose logits are wanted
    uint8_t *pool;                                           // [blocks], each [layers, 2, kv_heads, block_size, head_dim] numbers
                                                             // and, where quantised, [layers, 2, kv_heads] float32 scales
    int64_t block_size, blocks;
    int64_t kv_format;                                       // 0 bfloat16, 1 float32, 2 int8, 3 fp8 E4M3, 4 int4
    const float *rope;                                       // [positions, 2, head_dim]
    float *logits;                                           // [out_rows, vocab]
    int32_t *best;                                           // [out_rows], the lowest id of the largest logit; -1 where that is
                                                             // no finite number
};

// How to take a token from one row of logits. temperature 0: the largest; top_k 0: all. What nobody asks for is zero.
struct PdRow {
    int64_t row, top_k;
    double temperature, top_p, min_p;
    uint64_t seed, index;                     // key the randomness
    const int32_t *bias_ids;                  // [biases]
    const float *bias;
    int64_t biases;
    const int32_t *seen_ids, *output_counts;  // [seen], each id once; how often it is in the output
    int64_t seen;
    double repetition, presence, frequency;   // penalties of those
    const int32_t *banned_ids;                // [banned]
    int64_t banned;
    float *logprobs;                          // [1 + tops], of the token taken, then of the likeliest; null: not wanted
    int32_t *top_ids;                         // [tops], at most the vocabulary
    int64_t tops;
};

#define PDSERVE_ABI 5  // changes with this file; library.py knows the same number
int pdserve_abi(void);

// What of the instructions that the kernels need this CPU lacks, as /proc/cpuinfo calls it; empty when nothing. No other
// function may be called unless it is.
const char *pdserve_missing(void);

// By which compiler, in words.
const char *pdserve_compiler(void);

// How a call ended. After any of these the model is as good as before, and can be called again.
enum {
    PDSERVE_DONE = 1,
    PDSERVE_NO_MEMORY = 0,
    PDSERVE_UNSOUND = -1,    // a token has no block, or a block or an id is not there
    PDSERVE_NO_THREAD = -2,  // the system gives none
    PDSERVE_FAILED = -3,     // something else that a thread threw
};

// Null when memory is short. `embedding` [vocab, hidden] must outlive the model.
void *pdserve_model_new(const PdShape *shape, const uint16_t *embedding);
void pdserve_model_free(void *model);

// which: 0 qkv, 1 attention out, 2 gate and up by turns of sixteen rows, 3 down, 4 head (any layer). Weights are
// [n, k] bfloat16 and packed here. bits: 16, 8 (k a multiple of 64) or 4 (of 32), the same for all but the head.
int pdserve_model_weight(void *model, int64_t layer, int which, const uint16_t *weight, int64_t n, int64_t k, int bits);

// which: 0 before attention, 1 before the MLP, 2 before the head. [hidden] float32.
int pdserve_model_norm(void *model, int64_t layer, int which, const float *weight);

// One caller at a time.
int pdserve_model_forward(void *model, const PdStep *step);

// logits: [rows, vocab], changed where a row has biases, penalties or bans; ids: [count], one for each of `rows`, no two of
// which name the same row; -1 where there is no largest finite number to draw from. One caller at a time.
int pdserve_model_sample(void *model, int64_t threads, float *logits, const PdRow *rows, int64_t count, int32_t *ids);
}
