// What a decoder layer is made of, as plain structs that Python fills once (`layer_stack.py`).
//
// Pointers are borrowed: whoever fills a struct keeps the memory.
#pragma once

#include <cstdint>

#include "bf16.h"

extern "C" {

// A packed linear layer of any kind.
struct LinearLayer {
    const void* weight;    // packed, as its kind wants it
    const bf16* bias;      // as long as the packed weight has rows, or null
    int64_t num_inputs;
    int64_t num_outputs;   // with an activation those of gate and up together; the result has half
    int32_t kind;          // a LinearKind
    int32_t activation;    // as raywire_linear has it
};

enum LinearKind { BFLOAT16 = 0, EIGHT_BITS = 1 };

// Attention and a gated MLP around a residual. Norms are factors in float32.
struct DecoderLayer {
    LinearLayer qkv, out, gate_up, down;
    const float *before_attention, *after_attention;  // after: of the result, or null
    const float *before_mlp, *after_mlp;
    const float *query_norm, *key_norm;  // of each head, or null
    const float* sinks;                  // as raywire_attention has them, or null
    bf16 *key_pages, *value_pages;
    int64_t num_heads, num_kv_heads;
    int64_t window;         // 0: none
    int64_t rotary;         // which of the stack's tables
    float scale, softcap;   // softcap 0: none
    float head_eps;         // eps and rounds_first of the heads' norms
    int32_t heads_round_first;
};

// Cosine and sine of each position, `[positions, head_size]`.
struct RotaryTable {
    const bf16 *cosine, *sine;
};

struct LayerStack {
    const DecoderLayer* layers;
    const RotaryTable* tables;
    LinearLayer embedding;   // the head whose rows embed tokens; its weight is null where none does
    const float* last_norm;  // behind the last layer, or null
    int64_t num_layers, num_tables, hidden_size, head_size;
    float embedding_scale;   // 0: none
    float eps;               // of all norms but the heads'
    int32_t rounds_first;
};

// The tokens of a step, as BatchLayout has them.
struct StepLayout {
    const int64_t* ids;  // to be embedded, or null where states are given
    const int64_t *positions, *slots;
    const int32_t *block_table, *query_start, *seq_lens;
    int64_t num_tokens, num_reqs, block_size, table_stride;
};
}
