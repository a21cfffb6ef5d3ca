// Small matrix products that stay in registers: some rows of x times 16 or 32 columns of a packed W.
//
// Layout of W. 16 outputs make a block, and a block is K/2 groups of 64 bytes:
//
//     group k/2:   W[n+0][k] W[n+0][k+1] | W[n+1][k] W[n+1][k+1] | … | W[n+15][k] W[n+15][k+1]
//
// A group serves both kinds of arithmetic:
//
//     dot    one instruction multiplies pairs of bfloat16 and adds to 16 floats (AVX-512 BF16)
//     float  word << 16 and word & 0xffff0000 *are* the floats of k and k+1; then two multiply-adds
//
// Which of them is faster depends on the processor: the dot does twice as much at the same rate on
// AMD's Zen 4, half the rate on some of Intel's. `native.py` times them.
//
// Layout of x. Up to ROWS rows make a tile, in which the values of all rows for one k (float) or
// one pair of k (dot) lie side by side. Each result is a single sum over k in order, however many
// rows there are: a row does not depend on its neighbours.
#pragma once

#include "bf16.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

enum Arithmetic { DOT = 0, FLOAT = 1 };

#ifdef __AVX512F__
constexpr int ROWS = 12;  // 24 of 32 registers are sums
#else
constexpr int ROWS = 3;
#endif
constexpr int64_t GROUP = 2 * LANES;   // elements of W
constexpr int64_t AHEAD = 48 * GROUP;  // how far ahead weights are fetched

#ifdef __AVX512BF16__
template <int R, int B>
inline void dot_tile(
    const uint32_t* x, const bf16* weight, int64_t num_inputs, Floats (&out)[R][B]) {
    __m512 sums[R][B];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) sums[r][b] = _mm512_setzero_ps();
    const int64_t block = LANES * num_inputs;
    for (int64_t k = 0; k < num_inputs / 2; ++k, x += R, weight += GROUP) {
        __m512bh w[B];
        for (int b = 0; b < B; ++b) {
            w[b] = (__m512bh)_mm512_loadu_si512(weight + b * block);
            __builtin_prefetch(weight + b * block + AHEAD);
        }
        for (int r = 0; r < R; ++r) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32(int(x[r]));
            for (int b = 0; b < B; ++b) sums[r][b] = _mm512_dpbf16_ps(sums[r][b], pair, w[b]);
        }
    }
    memcpy(out, sums, sizeof sums);
}
#endif

template <int R, int B>
inline void float_tile(
    const float* x, const bf16* weight, int64_t num_inputs, Floats (&out)[R][B]) {
    Floats sums[R][B] = {};
    const int64_t block = LANES * num_inputs;
    for (int64_t k = 0; k < num_inputs / 2; ++k, x += 2 * R, weight += GROUP) {
        Floats even[B], odd[B];
        for (int b = 0; b < B; ++b) {
            Words w = load<Words>(weight + b * block);
            __builtin_prefetch(weight + b * block + AHEAD);
            even[b] = bits<Floats>(w << 16);
            odd[b] = bits<Floats>(w & 0xffff0000u);
        }
        for (int r = 0; r < R; ++r)
            for (int b = 0; b < B; ++b) sums[r][b] += x[r] * even[b];
        for (int r = 0; r < R; ++r)
            for (int b = 0; b < B; ++b) sums[r][b] += x[R + r] * odd[b];
    }
    memcpy(out, sums, sizeof sums);
}

// sums = x Wᵀ for R rows and B blocks, which are `LANES * num_inputs` elements apart.
template <int ARITHMETIC, int R, int B>
inline void multiply(
    const void* x, const bf16* weight, int64_t num_inputs, Floats (&sums)[R][B]) {
#ifdef __AVX512BF16__
    if constexpr (ARITHMETIC == DOT) {
        dot_tile<R, B>(static_cast<const uint32_t*>(x), weight, num_inputs, sums);
        return;
    }
#endif
    float_tile<R, B>(static_cast<const float*>(x), weight, num_inputs, sums);
}

// Call `body.operator()<R>()` with R = num_rows, at most ROWS.
template <int R = ROWS, typename Body>
inline void with_rows(int num_rows, const Body& body) {
    if (num_rows == R)
        body.template operator()<R>();
    else if constexpr (R > 1)
        with_rows<R - 1>(num_rows, body);
}

// Of one row of x in a tile.
template <int ARITHMETIC>
constexpr int64_t row_bytes(int64_t num_inputs) {
    return num_inputs * int64_t(ARITHMETIC == DOT ? sizeof(bf16) : sizeof(float));
}

// Write row r of a tile of R rows.
template <int ARITHMETIC>
inline void pack_row(const bf16* row, void* tile, int r, int num_rows, int64_t num_inputs) {
    if constexpr (ARITHMETIC == DOT) {
        auto* out = static_cast<uint32_t*>(tile);
        for (int64_t k = 0; k < num_inputs / 2; ++k) memcpy(&out[k * num_rows + r], row + 2 * k, 4);
    } else {
        auto* out = static_cast<float*>(tile);
        for (int64_t k = 0; k < num_inputs; ++k) out[k * num_rows + r] = to_float(row[k]);
    }
}

}  // namespace
