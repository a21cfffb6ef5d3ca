// Small matrix products of 8-bit integers: some rows of x times 16 or 32 columns of a packed W.
//
// A number is a small integer times a scale, which it shares with its neighbours: 64 values of k, a
// span, of an output of W, or of a row of x. So what is large does not make all the others coarse.
//
//     W[n][k] ~ s[n][span] · w[n][k]      w from -63 to 63, when W is packed
//     x[m][k] ~ t[m][span] · a[m][k]      a from -127 to 127, for each row as it comes
//
//     y[m][n] = Σ over spans  s[n][span] · t[m][span] · Σ over k in span  w[n][k] · a[m][k]
//
// The inner sum is exact, in 32-bit integers; the outer one, in floats, is a 64th of the work. A row
// depends on no other row.
//
// Why 63. AVX2 multiplies bytes without a sign by bytes with one, and adds the products in pairs to 16
// bits, where they must fit: 2 · 255 · 63 = 32130 does, with weights up to 127 it would not. In return
// two multiplications and an addition do 32 products; two multiply-adds of floats do 16. Without a
// sign means a + 128; what is too much then is the same for every row:
//
//     Σ w · a = Σ w · (a + 128) - 128 · Σ w
//
// Layout of W, the same on every processor. 16 outputs are a block, and a block is spans:
//
//     scales    16 bfloat16    s[n][span]
//     sums      16 int16       Σ over k in span  w[n][k]
//     quads     64 bytes for every four k:   w[n+0][k…k+3] | w[n+1][k…k+3] | … | w[n+15][k…k+3]
//
// That is 1.06 bytes a weight. Layout of x: a tile of rows is spans as well, of the rows' scales, in
// floats, and then for every four k the four bytes of each row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "bf16.h"
#include "tiles.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int WEIGHT_MAX = 63, INPUT_MAX = 127, OFFSET = 128;
constexpr int SPAN = 64;                  // values of k that share a scale
constexpr int DEPTH = 4;                  // values of k that lie together
constexpr int64_t QUADS = DEPTH * BLOCK;  // bytes of W for as many
constexpr int64_t HEADER = 2 * sizeof(bf16) * BLOCK;  // bytes of scales and sums
constexpr int64_t INT8_AHEAD = 48 * QUADS;            // how far ahead weights are fetched, in bytes

constexpr int64_t num_spans(int64_t num_inputs) { return (num_inputs + SPAN - 1) / SPAN; }
constexpr int64_t num_quads(int64_t num_inputs) { return (num_inputs + DEPTH - 1) / DEPTH; }

// Of a block of weights.
constexpr int64_t int8_block_bytes(int64_t num_inputs) {
    return num_spans(num_inputs) * HEADER + num_quads(num_inputs) * QUADS;
}

using Shorts = int16_t __attribute__((vector_size(2 * LANES)));

// sums + the products of the four bytes of x and of W in every lane.
inline Ints add_products(Ints sums, Ints x, const int8_t* weight) {
#if defined(__AVX512VNNI__)
    return bits<Ints>(_mm512_dpbusd_epi32(
        bits<__m512i>(sums), bits<__m512i>(x), load<__m512i>(weight)));
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16(bits<__m512i>(x), load<__m512i>(weight));
    return sums + bits<Ints>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i pairs = _mm256_maddubs_epi16(bits<__m256i>(x), load<__m256i>(weight));
    const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    // Spelled out: left to itself, GCC keeps some of a tile's sums in memory.
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(quads));
    return sums;
#else
    const Ints w = load<Ints>(weight);
    for (int i = 0; i < DEPTH; ++i)
        sums += ((w << (24 - 8 * i)) >> 24) * ((x >> (8 * i)) & 255);
    return sums;
#endif
}

inline Floats scaled(Ints sums, Floats weight_scales, float row_scale) {
    return __builtin_convertvector(sums, Floats) * (weight_scales * row_scale);
}

// out = x Wᵀ for R rows and B blocks, whose sums are all in registers. `out` has `stride` vectors a row.
template <int R, int B>
inline void int8_tile(
    const int32_t* x, const int8_t* weight, int64_t num_inputs, Floats* out, int stride) {
    constexpr int V = B * PARTS;
    const int64_t block = int8_block_bytes(num_inputs);
    // Where the values of vector v begin, each of which has so many bytes.
    const auto part = [&](int v, int bytes) {
        return weight + v / PARTS * block + v % PARTS * bytes * LANES;
    };
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) out[r * stride + v] = all(0);
    for (int64_t k = 0; k < num_inputs; k += SPAN) {
        const auto* row_scales = reinterpret_cast<const float*>(x);
        Floats scales[V];
        Ints sums[R][V];
        for (int v = 0; v < V; ++v) {
            scales[v] = load_bf16(reinterpret_cast<const bf16*>(part(v, 2)));
            const auto of_weights = load<Shorts>(part(v, 2) + HEADER / 2);
            for (int r = 0; r < R; ++r)
                sums[r][v] = __builtin_convertvector(of_weights, Ints) * -OFFSET;
        }
        x += R;
        weight += HEADER;
        const int64_t count = num_quads(std::min<int64_t>(SPAN, num_inputs - k));
        for (int64_t q = 0; q < count; ++q, x += R, weight += QUADS) {
            for (int b = 0; b < B; ++b) __builtin_prefetch(weight + b * block + INT8_AHEAD);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v)
                    sums[r][v] = add_products(sums[r][v], Ints{} + x[r], part(v, DEPTH));
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v)
                out[r * stride + v] += scaled(sums[r][v], scales[v], row_scales[r]);
    }
}

// sums = x Wᵀ for R rows and B blocks.
template <int R, int B>
inline void int8_multiply(
    const void* x, const int8_t* weight, int64_t num_inputs, Floats (&sums)[R][B * PARTS]) {
    constexpr int AT_ONCE = (R + 1) * B * PARTS < REGISTERS ? B : 1;
    for (int b = 0; b < B; b += AT_ONCE, weight += AT_ONCE * int8_block_bytes(num_inputs))
        int8_tile<R, AT_ONCE>(
            static_cast<const int32_t*>(x), weight, num_inputs, &sums[0][b * PARTS], B * PARTS);
}

// Round to nearest, ties to even: of x below 2^22.
inline Ints nearest(Floats x) {
    const Floats magic = all(12582912.0f);  // 1.5 · 2^23
    return bits<Ints>(x + magic) - bits<Ints>(magic);
}

// By what numbers up to `largest` are multiplied to become integers up to `most`. Of those that are
// as small as this, nothing is left.
inline Floats inverse_of(Floats largest, int most) {
    return largest < 1e-30f ? all(0) : float(most) / largest;
}

template <>
constexpr int64_t row_bytes<INT8>(int64_t num_inputs) {
    return num_spans(num_inputs) * int64_t(sizeof(float)) + num_quads(num_inputs) * DEPTH;
}

// Write a span of a row as integers, plus `offset`, and return their scale.
inline float quantize_inputs(const bf16* span, void* out, int offset) {
    using Bytes = uint8_t __attribute__((vector_size(LANES)));
    bf16 largest = 0;  // of two bfloat16 without a sign, the larger has the larger bits
    for (int i = 0; i < SPAN; ++i) largest = std::max<bf16>(largest, span[i] & 0x7fff);
    const Floats inverse = inverse_of(all(to_float(largest)), INPUT_MAX);
    for (int i = 0; i < SPAN; i += LANES) {
        const Ints a = nearest(load_bf16(span + i) * inverse) + offset;
        const Bytes bytes = __builtin_convertvector(a, Bytes);
        memcpy(static_cast<char*>(out) + i, &bytes, sizeof bytes);
    }
    return to_float(largest) / INPUT_MAX;
}

template <>
inline void pack_row<INT8>(const bf16* row, void* tile, int r, int num_rows, int64_t num_inputs) {
    auto* out = static_cast<uint32_t*>(tile) + r;
    for (int64_t k = 0; k < num_inputs; k += SPAN, row += SPAN) {
        bf16 span[SPAN];
        const int64_t count = std::min<int64_t>(SPAN, num_inputs - k);
        if (count < SPAN) std::fill(span, span + SPAN, 0);
        memcpy(span, row, count * sizeof(bf16));
        uint32_t quads[SPAN / DEPTH];
        const float scale = quantize_inputs(span, quads, OFFSET);
        memcpy(out, &scale, sizeof scale);
        out += num_rows;
        for (int64_t q = 0; q < num_quads(count); ++q, out += num_rows) *out = quads[q];
    }
}

}  // namespace
