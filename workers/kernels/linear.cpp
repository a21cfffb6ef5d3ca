// y = x Wᵀ + b with packed weights, bfloat16 or 8-bit integers, for one row or thousands.
//
// What it costs. A decode step with few rows reads every weight once and does little with it: it is
// bound by memory, N · K · 2 bytes. With many rows it is bound by arithmetic, 2 · M · N · K. So
// weights are laid out to be read in order, once, and in the shape that the arithmetic wants.
//
// The layout of W, and the two kinds of arithmetic over it, are in `tiles.h`; those of 8-bit integers
// in `int8.h`. A block of 16 rows of bfloat16 takes exactly the memory of these rows, so that packing
// is done in place, without a second copy of the model.
//
// Threads take chunks of blocks as they get to run (`threads.h`).
#include <algorithm>
#include <cmath>
#include <memory>

#include "bf16.h"
#include "exports.h"
#include "int8.h"
#include "threads.h"
#include "tiles.h"

namespace {

enum Activation { NONE = 0, GELU_TANH = 1, SILU = 2 };

constexpr int64_t PANEL_BYTES = 512 << 10;  // of x, read again for every block: stays in the L2

struct Call {
    const void* x;  // packed: see pack_row
    const char* weight;
    const bf16* bias;
    void* out;  // bf16, or float if is_float
    int64_t num_rows, num_outputs, num_inputs;
    int activation;
    bool is_float;

    int64_t num_blocks() const { return (num_outputs + BLOCK - 1) / BLOCK; }
    int64_t out_stride() const { return activation == NONE ? num_outputs : num_outputs / 2; }
};

// gelu_tanh(x) = x/2 · (1 + tanh u) = x · sigmoid(2u), u = sqrt(2/π) (x + 0.044715 x³)
inline Floats activate(int activation, Floats x) {
    Floats y = activation == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-y));
}

// gate · up, from two blocks. As torch would: each step is rounded to what a tensor can hold.
void finish_gated(const Call& call, const Floats (&sums)[2 * PARTS], bf16* out) {
    for (int p = 0; p < PARTS; ++p) {
        const Floats gate = round_bf16(activate(call.activation, round_bf16(sums[p])));
        store_bf16(out + p * LANES, gate * round_bf16(sums[PARTS + p]));
    }
}

template <int B>
void finish_row(const Call& call, Floats (&sums)[B * PARTS], int64_t row, int64_t block) {
    const int64_t first = block * BLOCK;
    if (call.bias)
        for (int v = 0; v < B * PARTS; ++v) sums[v] += load_bf16(call.bias + first + v * LANES);
    const int64_t at = row * call.out_stride() + first;
    const int64_t count = std::min<int64_t>(call.num_outputs - first, B * BLOCK);
    if (call.is_float) {
        memcpy(static_cast<float*>(call.out) + at, sums, count * sizeof(float));
        return;
    }
    bf16 rounded[B * BLOCK];
    for (int v = 0; v < B * PARTS; ++v) store_bf16(rounded + v * LANES, sums[v]);
    memcpy(static_cast<bf16*>(call.out) + at, rounded, count * sizeof(bf16));
}

template <int R, int B>
void finish(const Call& call, Floats (&sums)[R][B * PARTS], int64_t row, int64_t block) {
    for (int r = 0; r < R; ++r) {
        if constexpr (B == 2) {
            if (call.activation != NONE) {
                bf16* out = static_cast<bf16*>(call.out) + (row + r) * call.out_stride();
                finish_gated(call, sums[r], out + block / 2 * BLOCK);
                continue;
            }
        }
        finish_row<B>(call, sums[r], row + r, block);
    }
}

// Of a block of weights.
template <int ARITHMETIC>
constexpr int64_t block_bytes(int64_t num_inputs) {
    return ARITHMETIC == INT8 ? int8_block_bytes(num_inputs)
                              : BLOCK * num_inputs * int64_t(sizeof(bf16));
}

template <int ARITHMETIC, int R, int B>
void tile(const Call& call, int64_t row, int64_t block) {
    const int64_t num_inputs = call.num_inputs;
    const char* x = static_cast<const char*>(call.x) + row * row_bytes<ARITHMETIC>(num_inputs);
    const char* weight = call.weight + block * block_bytes<ARITHMETIC>(num_inputs);
    Floats sums[R][B * PARTS];
    if constexpr (ARITHMETIC == INT8)
        int8_multiply<R, B>(x, reinterpret_cast<const int8_t*>(weight), num_inputs, sums);
    else
        multiply<ARITHMETIC, R, B>(x, reinterpret_cast<const bf16*>(weight), num_inputs, sums);
    finish<R, B>(call, sums, row, block);
}

// Memory for packed rows, kept between calls of a thread.
void* scratch(size_t bytes) {
    thread_local std::unique_ptr<char[]> memory;
    thread_local size_t size = 0;
    if (bytes > size) {
        memory.reset();
        memory.reset(new char[bytes]);
        size = bytes;
    }
    return memory.get();
}

template <int ARITHMETIC>
void run(Call call, const bf16* x, int num_threads) {
    const int64_t num_rows = call.num_rows, num_inputs = call.num_inputs;
    const int64_t bytes = row_bytes<ARITHMETIC>(num_inputs);
    char* packed = static_cast<char*>(scratch(num_rows * bytes));
    call.x = packed;
    const int64_t num_tiles = (num_rows + ROWS - 1) / ROWS;
    raywire::parallel_for(num_tiles, num_tiles > 4 ? num_threads : 1, [&](int64_t t) {
        const int rows = int(std::min<int64_t>(ROWS, num_rows - t * ROWS));
        for (int r = 0; r < rows; ++r)
            pack_row<ARITHMETIC>(
                x + (t * ROWS + r) * num_inputs, packed + t * ROWS * bytes, r, rows, num_inputs);
    });

    const int64_t panel = std::max<int64_t>(1, PANEL_BYTES / (ROWS * bytes)) * ROWS;
    const int64_t num_panels = (num_rows + panel - 1) / panel;
    const int64_t num_blocks = call.num_blocks(), num_pairs = (num_blocks + 1) / 2;
    const int64_t chunk = std::clamp<int64_t>(num_pairs / (8 * num_threads), 1, 64);
    const int64_t num_chunks = (num_pairs + chunk - 1) / chunk;
    raywire::parallel_for(num_panels * num_chunks, num_threads, [&](int64_t item) {
        const int64_t first_row = item / num_chunks * panel;
        const int64_t last_row = std::min(num_rows, first_row + panel);
        const int64_t first_pair = item % num_chunks * chunk;
        const int64_t last_pair = std::min(num_pairs, first_pair + chunk);
        for (int64_t pair = first_pair; pair < last_pair; ++pair) {
            for (int64_t row = first_row; row < last_row; row += ROWS) {
                const int rows = int(std::min<int64_t>(ROWS, last_row - row));
                with_rows(rows, [&]<int R>() {
                    if (2 * pair + 1 < num_blocks)
                        tile<ARITHMETIC, R, 2>(call, row, 2 * pair);
                    else
                        tile<ARITHMETIC, R, 1>(call, row, 2 * pair);
                });
            }
        }
    });
}

}  // namespace

extern "C" {

// Whether this processor, as far as the compiler was told, multiplies pairs of bfloat16.
int raywire_has_dot() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// Bring a weight `[num_outputs, num_inputs]` into the layout above, in place. The number of outputs
// is a multiple of 16, that of inputs even.
void raywire_pack(bf16* weight, int64_t num_outputs, int64_t num_inputs, int num_threads) {
    raywire::parallel_for(num_outputs / BLOCK, num_threads, [&](int64_t n) {
        bf16* block = weight + n * BLOCK * num_inputs;
        auto* rows = static_cast<uint32_t*>(scratch(BLOCK * num_inputs * sizeof(bf16)));
        memcpy(rows, block, BLOCK * num_inputs * sizeof(bf16));
        for (int64_t k = 0; k < num_inputs / 2; ++k)
            for (int lane = 0; lane < BLOCK; ++lane)
                memcpy(block + k * GROUP + 2 * lane, &rows[lane * num_inputs / 2 + k], 4);
    });
}

// out = x Wᵀ + bias, `[num_rows, num_outputs]`. With an activation, blocks of W take turns, gate and
// up, and out = activation(gate) · up has half as many columns.
//
// The bias is as long as the packed weight, or null. Output is float if is_float, else bf16.
void raywire_linear(
    const bf16* x, const void* weight, const bf16* bias, void* out, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int arithmetic, int activation, int is_float,
    int num_threads) {
    const auto* bytes = static_cast<const char*>(weight);
    Call call{nullptr,     bytes,      bias,       out,          num_rows,
              num_outputs, num_inputs, activation, is_float != 0};
#ifdef __AVX512BF16__
    if (arithmetic == DOT) return run<DOT>(call, x, num_threads);
#endif
    if (arithmetic == INT8) return run<INT8>(call, x, num_threads);
    run<FLOAT>(call, x, num_threads);
}

// Rows of W, out of its packed layout: an embedding that shares its weight with the head.
void raywire_rows(
    const bf16* weight, const int64_t* ids, bf16* out, int64_t num_ids, int64_t num_inputs,
    int num_threads) {
    raywire::parallel_for(num_ids, num_ids > 16 ? num_threads : 1, [&](int64_t i) {
        const bf16* block = weight + ids[i] / BLOCK * BLOCK * num_inputs + ids[i] % BLOCK * 2;
        for (int64_t k = 0; k < num_inputs / 2; ++k)
            memcpy(out + i * num_inputs + 2 * k, block + k * GROUP, 4);
    });
}
}
