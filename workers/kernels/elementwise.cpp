// What stands between the matrix products of a layer: norms, rotary embedding.
//
// All of it is bound by reading its input once. torch needs a pass over memory, and a dispatch, for
// each operation in the formula; here a row is read, and everything is done while it is in the L1.
// Intermediate results are rounded to bfloat16 where transformers' modules round them.
#include <algorithm>
#include <cmath>

#include "bf16.h"
#include "exports.h"
#include "threads.h"

namespace {

float root_mean_square(const bf16* x, int64_t size, float eps) {
    Floats squares{};
    for (int64_t i = 0; i < size; i += LANES) {
        Floats v = load_bf16(x + i);
        squares += v * v;
    }
    return 1.0f / std::sqrt(sum(squares) / float(size) + eps);
}

// Llama rounds the normed value before the weight is multiplied in, Gemma after.
inline Floats scaled(Floats x, float factor, Floats weight, bool rounds_first) {
    Floats normed = x * factor;
    return rounds_first ? round_bf16(normed) * weight : normed * weight;
}

void norm(const bf16* x, const float* weight, bf16* out, int64_t size, float eps, bool rounds_first) {
    const float factor = root_mean_square(x, size, eps);
    for (int64_t i = 0; i < size; i += LANES)
        store_bf16(out + i, scaled(load_bf16(x + i), factor, load<Floats>(weight + i), rounds_first));
}

// (a, b) -> (a cos - b sin, b cos + a sin) with a the first half of a head and b the second. cos and
// sin have a value per element of the head, the halves alike.
void rotate(bf16* head, const bf16* cosine, const bf16* sine, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        Floats a = load_bf16(head + i), b = load_bf16(head + half + i);
        Floats c1 = load_bf16(cosine + i), s1 = load_bf16(sine + i);
        Floats c2 = load_bf16(cosine + half + i), s2 = load_bf16(sine + half + i);
        store_bf16(head + i, round_bf16(a * c1) - round_bf16(b * s1));
        store_bf16(head + half + i, round_bf16(b * c2) + round_bf16(a * s2));
    }
}

}  // namespace

extern "C" {

// out = x / sqrt(mean(x²) + eps) · weight for each row. The size is a multiple of 16.
void raywire_rms_norm(
    const bf16* x, const float* weight, bf16* out, int64_t num_rows, int64_t size, float eps,
    int rounds_first, int num_threads) {
    raywire::parallel_for((num_rows + 31) / 32, num_threads, [&](int64_t part) {
        for (int64_t row = 32 * part; row < std::min(num_rows, 32 * part + 32); ++row)
            norm(x + row * size, weight, out + row * size, size, eps, rounds_first);
    });
}

// Between attention and MLP, and after the MLP, for each row:
//
//     sum = residual + (post_weight ? norm(x) · post_weight : x)
//     out = norm(sum) · next_weight             if there is one
//
// x is overwritten.
void raywire_add_and_norm(
    bf16* x, const bf16* residual, const float* post_weight, bf16* sum, const float* next_weight,
    bf16* out, int64_t num_rows, int64_t size, float eps, int rounds_first, int num_threads) {
    raywire::parallel_for((num_rows + 31) / 32, num_threads, [&](int64_t part) {
        for (int64_t row = 32 * part; row < std::min(num_rows, 32 * part + 32); ++row) {
            const int64_t at = row * size;
            if (post_weight) norm(x + at, post_weight, x + at, size, eps, rounds_first);
            for (int64_t i = at; i < at + size; i += LANES)
                store_bf16(sum + i, load_bf16(residual + i) + load_bf16(x + i));
            if (next_weight) norm(sum + at, next_weight, out + at, size, eps, rounds_first);
        }
    });
}

// In place on the output of the joint projection, `[num_tokens, num_heads + 2 num_kv_heads, size]`:
// norm of each query and key head (where weights are given), then the rotary embedding. The head
// size is a multiple of 32.
void raywire_norm_and_rotate(
    bf16* qkv, const float* q_weight, const float* k_weight, const bf16* cosine, const bf16* sine,
    int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t size, float eps,
    int rounds_first, int num_threads) {
    const int64_t stride = (num_heads + 2 * num_kv_heads) * size;
    raywire::parallel_for(num_tokens, num_tokens > 16 ? num_threads : 1, [&](int64_t t) {
        for (int64_t h = 0; h < num_heads + num_kv_heads; ++h) {
            bf16* head = qkv + t * stride + h * size;
            const float* weight = h < num_heads ? q_weight : k_weight;
            if (weight) norm(head, weight, head, size, eps, rounds_first);
            rotate(head, cosine + t * size, sine + t * size, size);
        }
    });
}
}
