// Small matrix products in the matrix registers that some of Intel's processors have (AMX).
//
// One instruction multiplies 16 rows by 16 columns, 32 deep: 256 times the work of a `dot`, in 16
// cycles. On an Emerald Rapids that is 2.7 TFLOP/s out of registers, and linear layers of many rows
// reach 1.0 in one thread, where floats have 0.28 in two. A register holds 16 rows of 64 bytes. There
// are eight: up to four sums of 16 x 16 floats, two of x, two of W, so that whatever is loaded is
// used twice.
//
// Layout of W: that of `tiles.h`, of which 16 groups, 32 values of k, are a register in one piece.
//
// Layout of x. None: up to 32 rows make a tile, as they are. Where rows are missing from the last 16,
// a tile is a copy with room for them; what comes of them is nobody's.
//
// The system is asked once for leave to use these registers (`raywire_has_matrix`). A thread divides
// them before it uses them, and gives them back: while it has them, a switch to another thread saves
// 8 KiB more.
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define RAYWIRE_MATRIX 1
#endif

namespace {

constexpr int SIDE = 16;           // rows and columns of a register of sums
constexpr int64_t DEEP = 32;       // values of k in a register
constexpr int64_t PIECE = SIDE * DEEP;  // elements of a register of x or W

#ifdef RAYWIRE_MATRIX

// While it lives, this thread has the registers.
class MatrixRegisters {
  public:
    MatrixRegisters() {
        static const struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t num_rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
        } division;
        // Not `_tile_loadconfig`: in GCC 12 it reads no more than eight bytes, as it says.
        asm volatile("ldtilecfg %0" ::"m"(division));
    }
    ~MatrixRegisters() { _tile_release(); }
    MatrixRegisters(const MatrixRegisters&) = delete;
    MatrixRegisters& operator=(const MatrixRegisters&) = delete;
};

// sums = x Wᵀ for 16 or 32 rows and B blocks.
template <int R, int B>
inline void matrix_multiply(
    const bf16* x, int64_t x_stride, const bf16* weight, int64_t num_inputs,
    Floats (&sums)[R][B * PARTS]) {
    static_assert((R == SIDE || R == 2 * SIDE) && (B == 1 || B == 2) && PARTS == 1);
    const bf16 *lower = x + SIDE * x_stride, *second = weight + BLOCK * num_inputs;
    const int64_t stride = x_stride * int64_t(sizeof(bf16));
    asm volatile("" ::: "memory");  // what the loads read is written by now; GCC sees no reads
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < num_inputs; k += DEEP, weight += PIECE, second += PIECE) {
        for (int64_t i = 0; R == SIDE && i < PIECE; i += GROUP) {
            __builtin_prefetch(weight + AHEAD + i);
            if constexpr (B == 2) __builtin_prefetch(second + AHEAD + i);
        }
        _tile_loadd(4, x + k, stride);
        _tile_loadd(6, weight, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (B == 2) {
            _tile_loadd(7, second, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (R > SIDE) {
            _tile_loadd(5, lower + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (B == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], sizeof sums[0]);
    if constexpr (B == 2) _tile_stored(1, &sums[0][1], sizeof sums[0]);
    if constexpr (R > SIDE) {
        _tile_stored(2, sums[SIDE], sizeof sums[0]);
        if constexpr (B == 2) _tile_stored(3, &sums[SIDE][1], sizeof sums[0]);
    }
}

template <>
inline void pack_row<MATRIX>(const bf16* row, void* tile, int r, int, int64_t num_inputs) {
    memcpy(static_cast<bf16*>(tile) + r * num_inputs, row, num_inputs * sizeof(bf16));
}

#endif

// Where there are no such registers, nobody asks for them.
template <int ARITHMETIC>
struct Registers {};
#ifdef RAYWIRE_MATRIX
template <>
struct Registers<MATRIX> : MatrixRegisters {};
template <>
struct Registers<INT8_MATRIX> : MatrixRegisters {};
#endif

// sums = x Wᵀ for R rows and B blocks of bfloat16. In matrix registers rows of x are `x_stride` elements
// apart.
template <int ARITHMETIC, int R, int B>
inline void product(
    const void* x, [[maybe_unused]] int64_t x_stride, const bf16* weight, int64_t num_inputs,
    Floats (&sums)[R][B * PARTS]) {
#ifdef RAYWIRE_MATRIX
    if constexpr (ARITHMETIC == MATRIX) {
        matrix_multiply<R, B>(static_cast<const bf16*>(x), x_stride, weight, num_inputs, sums);
        return;
    }
#endif
    multiply<ARITHMETIC, R, B>(x, weight, num_inputs, sums);
}

}  // namespace
