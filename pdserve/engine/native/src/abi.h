// The C interface between Python and the kernels. native/library.py declares the same.
#pragma once

#include <cstdint>

extern "C" {

// A mixture of experts; see `MoeSpec` of pdserve/core/model_spec.py. experts 0 means a dense MLP. Flags are 0 or 1.
struct PdMoe {
    int64_t experts, experts_per_token, intermediate;
    int64_t sigmoid;           // scores are sigmoids instead of a softmax
    int64_t renormalise;
    int64_t groups, top_groups;
    int64_t best_two;          // a group counts as the sum of its best two scores instead of its best
    int64_t shared;            // the width of the shared expert, 0 for none
    int64_t shared_gate;
    int64_t first_expert, own_experts;  // the experts of this rank; all of them where the ranks split each expert
    double scale;
};

// Latent attention in its absorbed form; see `MlaSpec` of pdserve/core/model_spec.py. kv_rank 0 means that keys and values are stored.
// The layers of a KV group have equal kv_rank.
struct PdLatent {
    int64_t kv_rank;
    int64_t q_rank;           // 0: queries are projected in one product
    int64_t nope_dim, v_dim;  // of an expanded head
};

// One layer. The layers of a KV group have equal heads, kv_heads and head_dim. With latent attention kv_heads is 1 and head_dim is
// kv_rank + rope_dim, the numbers of an absorbed query and of what a token stores.
struct PdLayer {
    int64_t heads, kv_heads, head_dim, intermediate;
    int64_t group, index;    // the KV group, and the layer's place among those of the group
    int64_t rope_dim;        // the first so many numbers of a head are rotated; with latent attention the last ones
    int64_t activation;      // 0 SiLU, 1 GELU by a tangent hyperbolic
    int64_t first_kv_head, all_kv_heads;  // the place of this rank's KV heads among those that a block stores
    int64_t stores_kv;       // 0: another rank computes and stores these KV heads; qkv then has queries alone
    int64_t shares_kv;       // several ranks read a KV head
    double rms_norm_eps;     // of the layer's norms, except those of heads
    double head_norm_eps;    // of the norms of heads, or of latent vectors
    double scale;            // factor of scores
    double softcap;          // bound of scores; 0 means none
    const float *rope;       // [positions, 2, rope_dim]; must outlive the model
    PdLatent latent;
    PdMoe moe;
};

// The place of a rank in its gang, and the memory that all ranks share: see gang.h.
struct PdGang {
    int64_t rank, ranks;     // of the stage: at most 8
    int64_t stage, stages;   // at most 8
    int64_t rows, sum_rows;  // the most rows of a step, and of a place for sums
    int64_t hidden, vocab;
    int64_t gathered;        // the most numbers of a row that ranks gather; 0: they share sums, and are a power of two
    int64_t step_bytes;      // room for the arrays of a step
    int64_t timeout_ms;      // a rank that waits longer for another one gives the gang up
    void *memory;            // zeroed before the first rank uses it; pdserve_gang_bytes says how much
};

// A model, or a rank's share of it. Its layers are copied.
struct PdShape {
    int64_t hidden, vocab, layers, groups;
    const PdLayer *layer;    // [layers], those of this rank's stage
    const int64_t *windows;  // [groups], the positions that a token sees, its own included; 0 means all
    const int64_t *group_layers;        // [groups], the layers of all stages whose KV a block of the group stores
    int64_t first_token_id, own_vocab;  // the rows of embedding and head that this rank has
    const PdGang *gang;      // null: one rank has everything
    double rms_norm_eps;     // of the norm before the head
    double embedding_scale;  // factor of the embedding's rows
    double softcap;          // bound of logits; 0 means none
    int64_t parts;           // of this rank: sums of parts of k that attention out and down add as a tree: see matmul.h
    int64_t first_column, own_columns;  // the columns of attention out and down that it has; all of them where ranks share sums
};

// The blocks of one KV group in a step.
struct PdGroup {
    const int64_t *span_table;  // [spans + 1], the places in `tables` where the blocks of each span begin and end
    const int32_t *tables;      // block ids; those of blocks that no token of the step sees are not read
    uint8_t *pool;              // [blocks], each [layers of the group, 2, kv_heads, block_size, head_dim] numbers;
                                // a quantised block also has [layers of the group, 2, kv_heads] float32 scales; latent attention
                                // has 1 in place of 2
    int64_t blocks;
    int64_t kv_format;          // 0 bfloat16, 1 float32, 2 int8, 3 fp8 E4M3, 4 int4
};

// One step. A row is a token; the rows of a span follow each other.
struct PdStep {
    int64_t threads;
    int64_t layers;                           // only the first so many are computed; memory is taken for all
    int64_t rows, spans, out_rows;
    const int32_t *token_ids;                 // [rows]
    const int32_t *span_start, *span_count;   // [spans]
    const int32_t *drafted;                   // [spans], 1: the rows after the first are drafts, which pdserve_model_settle may
                                              // take back; 0: none are
    const int32_t *out;                       // [out_rows], the rows whose logits are wanted, ascending
    const PdGroup *groups;                    // [groups]
    int64_t block_size;                       // of all groups
    float *logits;                            // [out_rows, vocab]; null when only `best` is wanted
    int32_t *best;                            // [out_rows], the lowest id of the largest logit; -1 where this logit is not a
                                              // finite number
};

// The way to draw a token from one row of logits. temperature 0 means the largest logit, top_k 0 means all ids. Fields that are
// not used are zero.
struct PdRow {
    int64_t row, top_k;
    double temperature, top_p, min_p;
    uint64_t seed, index;                     // they determine the random number
    const int32_t *bias_ids;                  // [biases]
    const float *bias;
    int64_t biases;
    const int32_t *seen_ids, *output_counts;  // [seen], each id once, and how often it is in the output
    int64_t seen;
    double repetition, presence, frequency;   // penalties of the seen ids
    const int32_t *banned_ids;                // [banned]
    int64_t banned;
    float *logprobs;                          // [1 + tops]: of the drawn token, then of the likeliest ids; null when not wanted
    int32_t *top_ids;                         // [tops], the likeliest ids; tops is at most the vocabulary
    int64_t tops;
    const uint8_t *mask;                      // [vocab] bits, rounded up to 16, the lowest first: the ids that may be drawn; null: all
};

// Only these functions are seen from outside: what two libraries have by the same name would otherwise be shared, if one process
// loads both.
#pragma GCC visibility push(default)

#define PDSERVE_ABI 17  // it changes with this file; library.py has the same number
int pdserve_abi(void);

// Returns an instruction set that the kernels need and this CPU lacks, as /proc/cpuinfo names it; empty when it lacks none.
// When it is not empty, no function that computes may be called.
const char *pdserve_missing(void);

// Makes this library emulate tiles, so that the set with AMX computes its bits on a CPU without AMX. Returns 0 for another set. It
// is called before anything else.
int pdserve_emulate(void);

// Returns the name of the instruction set that the library is for.
const char *pdserve_isa(void);

// Returns the name and version of the compiler.
const char *pdserve_compiler(void);

// Results of a call. After each of them the model is intact and can be called again.
enum {
    PDSERVE_DONE = 1,
    PDSERVE_NO_MEMORY = 0,
    PDSERVE_UNSOUND = -1,    // a token has no block, or a block id or token id does not exist
    PDSERVE_NO_THREAD = -2,  // the system gave no thread
    PDSERVE_FAILED = -3,     // a thread threw something else
    PDSERVE_LOST = -4,       // another rank of the gang is gone; the model cannot be called again
};

// Makes a model; returns null when there is no memory. `embedding` [vocab, hidden] must outlive the model.
void *pdserve_model_new(const PdShape *shape, const uint16_t *embedding);
void pdserve_model_free(void *model);

// Copies and packs a weight [n, k] bfloat16. which: 0 qkv, 1 attention out, 2 gate and up in alternating groups of sixteen
// rows, 3 down, 4 head (for any layer), 5 router with a last row for the gate of the shared expert, 6 gate and up of an expert, 7
// down of an expert. In a mixture of experts 2 and 3 are those of the shared expert. With latent attention 0 is the rows of queries
// or of their latent vector, then those of the latent vector and the key; 8 queries from their latent vector; and of each head
// 9 keys to queries, [kv_rank, nope_dim], and 10 values, [v_dim, kv_rank]. Rotated rows are sorted into two halves. part: the
// expert or the head. bits: 16, 8 (k is a multiple of 64) or 4 (of 32), the same for all but the head, the router, 9 and 10. The
// last three have 16.
// Of each row only the numbers [first, first + count) are taken; a scale is that of the whole row, so that the ranks of a gang have
// one.
int pdserve_model_weight(void *model, int64_t layer, int which, int64_t part, const uint16_t *weight, int64_t n, int64_t k,
                         int64_t first, int64_t count, int bits);

// Copies the weight of a norm, or a bias: [size] float32. which: 0 the norm before attention, 1 that before the MLP, 2 that before
// the head (for any layer), 3 that of attention's result, 4 that of the MLP's result, 5 that of a head of queries, 6 that of a head
// of keys, 7 the bias of qkv, 8 that of attention out, 9 the router's correction of the choice. With latent attention 5 and 6 are
// those of the latent vector of queries and of the other one. All after 2 are optional: what is not given is not computed.
int pdserve_model_vector(void *model, int64_t layer, int which, const float *from, int64_t size);

// Writes how many tokens chose each expert of a layer since the model was made. to: [experts]. Only one caller at a time.
void pdserve_model_expert_counts(void *model, int64_t layer, int64_t *to);

// Computes a step. Only one caller at a time. With a gang, rank 0 of the first stage calls it.
int pdserve_model_forward(void *model, const PdStep *step);

// Says how many rows of each span of the last step count. counts: [spans], those of spans without drafts are not read. Quantised
// blocks then have the bytes of as many steps of one token. Each step with drafts needs one such call at most. With a gang, rank 0
// of the first stage calls it.
int pdserve_model_settle(void *model, const int32_t *counts);

// Computes the steps of rank 0 until the gang is lost. groups: [groups of the model], the KV pools of this rank. Returns
// PDSERVE_LOST, or why this rank ended the gang.
int pdserve_model_follow(void *model, int64_t threads, PdGroup *groups);

// Returns the bytes of memory that a gang shares. Its `memory` is not read.
int64_t pdserve_gang_bytes(const PdGang *gang);

// Returns the place where the ranks of a gang write logits, [rows, vocab].
float *pdserve_gang_logits(const PdGang *gang);

// Ends a gang: all of its ranks leave their calls. Any process that shares its memory may call it.
void pdserve_gang_lose(const PdGang *gang);

// Draws a token for each of `rows`, no two of which name the same row of logits. logits: [rows, vocab]; rows with biases,
// penalties or bans are changed. ids: [count], the tokens; -1 where the largest logit is not a finite number. Only one caller at
// a time.
int pdserve_model_sample(void *model, int64_t threads, float *logits, const PdRow *rows, int64_t count, int32_t *ids);

// Multiplies numbers of 8 or 16 bits that are in registers, by the instruction that weights are multiplied by. Returns the number
// of operations, which is proportional to `rounds`: the caller measures their rate.
int64_t pdserve_products(int bits, int64_t rounds);

#pragma GCC visibility pop
}
