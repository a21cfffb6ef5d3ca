// The exported functions that files of this folder call of each other; each is explained where it is
// defined. Its file includes this one, so that the compiler compares the two.
#pragma once

#include <cstdint>

#include "bf16.h"

extern "C" {
void raywire_linear(
    const bf16* x, const void* weight, const bf16* bias, void* out, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t x_stride, int64_t out_stride, int arithmetic,
    int activation, int is_float, int num_threads);

void raywire_rows(
    const bf16* weight, const int64_t* ids, bf16* out, int64_t num_ids, int64_t num_inputs,
    int num_threads);

void raywire_int8_rows(
    const int8_t* weight, const int64_t* ids, bf16* out, int64_t num_ids, int64_t num_inputs,
    int num_threads);

void raywire_rms_norm(
    const bf16* x, const float* weight, bf16* out, int64_t num_rows, int64_t size, float eps,
    int rounds_first, int num_threads);

void raywire_add_and_norm(
    bf16* x, const bf16* residual, const float* post_weight, bf16* sum, const float* next_weight,
    bf16* out, int64_t num_rows, int64_t size, float eps, int rounds_first, int num_threads);

void raywire_norm_and_rotate(
    bf16* qkv, const float* q_weight, const float* k_weight, const bf16* cosine, const bf16* sine,
    int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t size, float eps,
    int rounds_first, int num_threads);

void raywire_write_kv(
    const bf16* key, const bf16* value, int64_t stride, const int64_t* slots, bf16* key_pages,
    bf16* value_pages, int64_t num_tokens, int64_t width);

void raywire_attention(
    const bf16* query, bf16* out, const bf16* key, const bf16* value, const int32_t* block_table,
    const int32_t* query_start, const int32_t* seq_lens, const float* sinks, int64_t num_reqs,
    int64_t num_heads, int64_t num_kv_heads, int64_t size, int64_t query_stride,
    int64_t block_size, int64_t table_stride, int64_t window, float scale, float softcap,
    int arithmetic, int num_threads);
}
