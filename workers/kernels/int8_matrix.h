// Small matrix products of 8-bit integers (`int8.h`) in matrix registers (`matrix.h`), for many rows.
//
// A span of a block, 64 values of k of 16 outputs, is a register of W as it lies. So is that of 16
// rows of x, each of which lies in one piece here, its scales behind all of them:
//
//     values    16 x K bytes       a[m][k], with a sign: nothing is too much then
//     scales    16 x spans floats  t[m][span]
//
// One instruction makes the inner sums of 16 rows and 16 outputs; what takes the time is to scale and
// add them, so these 16 x 16 floats stay in the vector registers. Both are the sums of `int8.h`, bit by
// bit: a row is the same in whatever company.
#pragma once

#include "int8.h"
#include "matrix.h"

namespace {

#ifdef RAYWIRE_MATRIX

constexpr bool has_whole_spans(int64_t num_inputs) { return num_inputs % SPAN == 0; }

template <>
constexpr int64_t row_bytes<INT8_MATRIX>(int64_t num_inputs) {
    return num_inputs + num_spans(num_inputs) * int64_t(sizeof(float));
}

template <>
inline void pack_row<INT8_MATRIX>(const bf16* row, void* tile, int r, int, int64_t num_inputs) {
    auto* values = static_cast<int8_t*>(tile) + r * num_inputs;
    auto* scales = reinterpret_cast<float*>(static_cast<int8_t*>(tile) + SIDE * num_inputs);
    for (int64_t span = 0; span < num_spans(num_inputs); ++span, row += SPAN, values += SPAN)
        scales[r * num_spans(num_inputs) + span] = quantize_inputs(row, values, 0);
}

// out = x Wᵀ for 16 rows and a block. `out` has `stride` vectors a row.
inline void int8_matrix_tile(
    const int8_t* x, const int8_t* weight, int64_t num_inputs, Floats* out, int stride) {
    const int64_t spans = num_spans(num_inputs);
    const auto* row_scales = reinterpret_cast<const float*>(x + SIDE * num_inputs);
    Floats totals[SIDE] = {};
    alignas(64) Ints sums[2][SIDE];  // in turns, so that one is filled while the other is read
    asm volatile("" ::: "memory");  // as in `matrix_multiply`
    for (int64_t span = 0; span < spans; ++span, weight += HEADER + SPAN / DEPTH * QUADS) {
        _tile_zero(0);
        _tile_loadd(4, x + span * SPAN, num_inputs);
        _tile_loadd(6, weight + HEADER, QUADS);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums[span % 2], sizeof(Ints));
        const Floats scales = load_bf16(reinterpret_cast<const bf16*>(weight));
        for (int r = 0; r < SIDE; ++r)
            totals[r] += scaled(sums[span % 2][r], scales, row_scales[r * spans + span]);
    }
    for (int r = 0; r < SIDE; ++r) out[r * stride] = totals[r];
}

template <int R, int B>
inline void int8_matrix_multiply(
    const void* x, const int8_t* weight, int64_t num_inputs, Floats (&sums)[R][B * PARTS]) {
    static_assert(R == SIDE && PARTS == 1);
    for (int b = 0; b < B; ++b)
        int8_matrix_tile(
            static_cast<const int8_t*>(x), weight + b * int8_block_bytes(num_inputs), num_inputs,
            &sums[0][b], B);
}

#endif

}  // namespace
