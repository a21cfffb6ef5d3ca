// Small matrix products that stay in registers: some rows of x times 16 or 32 columns of a packed W.
//
// Layout of W, the same on every processor. 16 outputs make a block, and a block is K/2 groups of 64
// bytes, which are one vector or several parts:
//
//     group k/2:   W[n+0][k] W[n+0][k+1] | W[n+1][k] W[n+1][k+1] | … | W[n+15][k] W[n+15][k+1]
//
// A group serves both kinds of arithmetic:
//
//     dot    one instruction multiplies pairs of bfloat16 and adds to 16 floats (AVX-512 BF16)
//     float  word << 16 and word & 0xffff0000 *are* the floats of k and k+1; then two multiply-adds
//
// and those of `matrix.h` and `int8.h` beside them. Which is fastest depends on the processor: the dot
// does twice as much as the floats at the same rate on AMD's Zen 4, at half the rate on some of
// Intel's. `native.py` times them.
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

enum Arithmetic { DOT = 0, FLOAT = 1, INT8 = 2, MATRIX = 3, INT8_MATRIX = 4 };

constexpr bool in_matrix_registers(int arithmetic) {
    return arithmetic == MATRIX || arithmetic == INT8_MATRIX;
}

constexpr int BLOCK = 16;             // outputs
constexpr int PARTS = BLOCK / LANES;  // vectors of sums, for a row and a block

// So many rows that the sums of a tile fill the registers, beside the weights of a k and an element of
// x: each weight that is loaded is used for ROWS rows, each element of x for 16 or 32 outputs.
#if defined(__AVX512F__)
constexpr int REGISTERS = 32, ROWS = 12;
#elif defined(__AVX2__)
constexpr int REGISTERS = 16, ROWS = 6;
#else
constexpr int REGISTERS = 32, ROWS = 6;
#endif
constexpr int64_t GROUP = 2 * BLOCK;   // elements of W
constexpr int64_t AHEAD = 48 * GROUP;  // how far ahead weights are fetched

// out = x Wᵀ for R rows and B blocks, whose sums are all in registers. `out` has `stride` vectors a row.
#ifdef __AVX512BF16__
template <int R, int B>
inline void dot_tile(
    const uint32_t* x, const bf16* weight, int64_t num_inputs, Floats* out, int stride) {
    __m512 sums[R][B];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) sums[r][b] = _mm512_setzero_ps();
    const int64_t block = BLOCK * num_inputs;
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
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) out[r * stride + b] = bits<Floats>(sums[r][b]);
}
#endif

template <int R, int B>
inline void float_tile(
    const float* x, const bf16* weight, int64_t num_inputs, Floats* out, int stride) {
    constexpr int V = B * PARTS;
    Floats sums[R][V] = {}, w[V];
    const int64_t block = BLOCK * num_inputs;
    const auto from = [&](int v) { return weight + v / PARTS * block + v % PARTS * 2 * LANES; };
    const auto add = [&](const float* x) {
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sums[r][v] += x[r] * w[v];
    };
    for (int64_t k = 0; k < num_inputs / 2; ++k, x += 2 * R, weight += GROUP) {
        for (int b = 0; b < B; ++b) __builtin_prefetch(weight + b * block + AHEAD);
        for (int v = 0; v < V; ++v) w[v] = bits<Floats>(load<Words>(from(v)) << 16);
        add(x);
        // Load again: kept from above, the words would push sums out of the registers.
        asm("" : "+r"(weight));
        for (int v = 0; v < V; ++v) w[v] = bits<Floats>(load<Words>(from(v)) & 0xffff0000u);
        add(x + R);
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) out[r * stride + v] = sums[r][v];
}

// sums = x Wᵀ for R rows and B blocks, which are `BLOCK * num_inputs` elements apart.
template <int ARITHMETIC, int R, int B>
inline void multiply(
    const void* x, const bf16* weight, int64_t num_inputs, Floats (&sums)[R][B * PARTS]) {
    constexpr int AT_ONCE = (R + 1) * B * PARTS < REGISTERS ? B : 1;
    for (int b = 0; b < B; b += AT_ONCE, weight += AT_ONCE * BLOCK * num_inputs) {
        Floats* out = &sums[0][b * PARTS];
#ifdef __AVX512BF16__
        if constexpr (ARITHMETIC == DOT) {
            dot_tile<R, AT_ONCE>(
                static_cast<const uint32_t*>(x), weight, num_inputs, out, B * PARTS);
            continue;
        }
#endif
        float_tile<R, AT_ONCE>(static_cast<const float*>(x), weight, num_inputs, out, B * PARTS);
    }
}

// Rows of a tile of x, at most.
template <int ARITHMETIC>
constexpr int MOST_ROWS = ARITHMETIC == MATRIX ? 32 : ARITHMETIC == INT8_MATRIX ? 16 : ROWS;

// So many rows have room in a tile of `num_rows`.
template <int ARITHMETIC>
constexpr int64_t rows_with_room(int64_t num_rows) {
    return in_matrix_registers(ARITHMETIC) ? (num_rows + 15) / 16 * 16 : num_rows;
}

// Call `body.operator()<R>()` with R, at most MOST_ROWS, the rows that the tile has room for.
template <int ARITHMETIC, int R = MOST_ROWS<ARITHMETIC>, typename Body>
inline void with_rows(int num_rows, const Body& body) {
    constexpr int STEP = in_matrix_registers(ARITHMETIC) ? 16 : 1;
    if (num_rows > R - STEP)
        body.template operator()<R>();
    else if constexpr (R > STEP)
        with_rows<ARITHMETIC, R - STEP>(num_rows, body);
}

// Of one row of x in a tile.
template <int ARITHMETIC>
constexpr int64_t row_bytes(int64_t num_inputs) {
    return num_inputs * int64_t(ARITHMETIC == FLOAT ? sizeof(float) : sizeof(bf16));
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
