// y = x Wᵀ + b with packed weights, bfloat16 or 8-bit integers, for one row or thousands.
//
// What it costs. A decode step with few rows reads every weight once and does little with it: it is
// bound by memory, N · K · 2 bytes. With many rows it is bound by arithmetic, 2 · M · N · K. So
// weights are laid out to be read in order, once, and in the shape that the arithmetic wants.
//
// The layout of W, and the two kinds of arithmetic over it that every processor has, are in `tiles.h`;
// matrix registers in `matrix.h`, 8-bit integers in `int8.h` and `int8_matrix.h`. A block of 16 rows
// of bfloat16 takes exactly the memory of these rows, so that packing is done in place, without a
// second copy of the model.
//
// Threads take chunks of blocks as they get to run (`threads.h`).
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "bf16.h"
#include "exports.h"
#include "int8.h"
#include "int8_matrix.h"
#include "matrix.h"
#include "memory.h"
#include "threads.h"
#include "tiles.h"

#ifdef RAYWIRE_MATRIX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

enum Activation { NONE = 0, GELU_TANH = 1, SILU = 2 };

constexpr int64_t PANEL_BYTES = 512 << 10;  // of x, read again for every block: stays in the L2

struct Call {
    const bf16* x;
    const char* packed;    // rows of x from `first_packed` on: see pack_row
    int64_t first_packed;
    const char* weight;
    const bf16* bias;
    void* out;  // bf16, or float if is_float
    int64_t num_rows, num_outputs, num_inputs, x_stride, out_stride;
    int activation;
    bool is_float;

    int64_t num_blocks() const { return (num_outputs + BLOCK - 1) / BLOCK; }
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
    const int64_t at = row * call.out_stride + first;
    const int64_t count = std::min<int64_t>(call.num_outputs - first, B * BLOCK);
    const auto write = [&](auto* out, const auto& store) {
        if (count == B * BLOCK) {
            for (int v = 0; v < B * PARTS; ++v) store(out + v * LANES, sums[v]);
            return;
        }
        std::remove_reference_t<decltype(*out)> last[B * BLOCK];
        for (int v = 0; v < B * PARTS; ++v) store(last + v * LANES, sums[v]);
        std::copy_n(last, count, out);
    };
    if (call.is_float)
        write(static_cast<float*>(call.out) + at, store);
    else
        write(static_cast<bf16*>(call.out) + at, store_bf16);
}

template <int ARITHMETIC, int R, int B>
void finish(
    const Call& call, Floats (&sums)[R][B * PARTS], int64_t row, int num_rows, int64_t block) {
    const int present = in_matrix_registers(ARITHMETIC) ? num_rows : R;
    for (int r = 0; r < present; ++r) {
        if constexpr (B == 2) {
            if (call.activation != NONE) {
                bf16* out = static_cast<bf16*>(call.out) + (row + r) * call.out_stride;
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
    return ARITHMETIC == INT8 || ARITHMETIC == INT8_MATRIX
               ? int8_block_bytes(num_inputs)
               : BLOCK * num_inputs * int64_t(sizeof(bf16));
}

template <int ARITHMETIC, int R, int B>
void tile(const Call& call, int64_t row, int num_rows, int64_t block) {
    const int64_t num_inputs = call.num_inputs;
    const bool is_packed = row >= call.first_packed;
    const void* x = call.x + row * call.x_stride;
    if (is_packed) x = call.packed + (row - call.first_packed) * row_bytes<ARITHMETIC>(num_inputs);
    const char* weight = call.weight + block * block_bytes<ARITHMETIC>(num_inputs);
    Floats sums[R][B * PARTS];
    if constexpr (ARITHMETIC == INT8)
        int8_multiply<R, B>(x, reinterpret_cast<const int8_t*>(weight), num_inputs, sums);
    else if constexpr (ARITHMETIC == INT8_MATRIX)
        int8_matrix_multiply<R, B>(x, reinterpret_cast<const int8_t*>(weight), num_inputs, sums);
    else
        product<ARITHMETIC, R, B>(
            x, is_packed ? num_inputs : call.x_stride, reinterpret_cast<const bf16*>(weight),
            num_inputs, sums);
    finish<ARITHMETIC, R, B>(call, sums, row, num_rows, block);
}

// Memory for packed rows.
char* scratch(int64_t bytes) {
    thread_local Memory memory;
    return memory.of<char>(bytes);
}

// Bring x into the layout of the arithmetic. Matrix registers take full tiles as they are.
template <int ARITHMETIC>
void pack_rows(Call& call, int num_threads) {
    constexpr int64_t most = MOST_ROWS<ARITHMETIC>;
    const int64_t bytes = row_bytes<ARITHMETIC>(call.num_inputs);
    call.first_packed = ARITHMETIC == MATRIX ? call.num_rows / most * most : 0;
    const int64_t count = call.num_rows - call.first_packed;
    char* packed = scratch(rows_with_room<ARITHMETIC>(count) * bytes);
    call.packed = packed;
    const int64_t num_tiles = (count + most - 1) / most;
    raywire::parallel_for(num_tiles, num_tiles > 4 ? num_threads : 1, [&](int64_t t) {
        const int64_t first = t * most;
        const int rows = int(std::min(most, count - first));
        const bf16* x = call.x + (call.first_packed + first) * call.x_stride;
        for (int r = 0; r < rows; ++r)
            pack_row<ARITHMETIC>(
                x + r * call.x_stride, packed + first * bytes, r, rows, call.num_inputs);
    });
}

template <int ARITHMETIC>
void run(Call call, int num_threads) {
    pack_rows<ARITHMETIC>(call, num_threads);
    constexpr int64_t most = MOST_ROWS<ARITHMETIC>;
    const int64_t num_rows = call.num_rows, bytes = row_bytes<ARITHMETIC>(call.num_inputs);
    const int64_t panel = std::max<int64_t>(1, PANEL_BYTES / (most * bytes)) * most;
    const int64_t num_panels = (num_rows + panel - 1) / panel;
    const int64_t num_blocks = call.num_blocks(), num_pairs = (num_blocks + 1) / 2;
    const int64_t chunk = std::clamp<int64_t>(num_pairs / (8 * num_threads), 1, 64);
    const int64_t num_chunks = (num_pairs + chunk - 1) / chunk;
    raywire::parallel_for(num_panels * num_chunks, num_threads, [&](int64_t item) {
        const int64_t first_row = item / num_chunks * panel;
        const int64_t last_row = std::min(num_rows, first_row + panel);
        const int64_t first_pair = item % num_chunks * chunk;
        const int64_t last_pair = std::min(num_pairs, first_pair + chunk);
        [[maybe_unused]] const Registers<ARITHMETIC> registers;
        for (int64_t pair = first_pair; pair < last_pair; ++pair) {
            for (int64_t row = first_row; row < last_row; row += most) {
                const int rows = int(std::min<int64_t>(most, last_row - row));
                with_rows<ARITHMETIC>(rows, [&]<int R>() {
                    if (2 * pair + 1 < num_blocks)
                        tile<ARITHMETIC, R, 2>(call, row, rows, 2 * pair);
                    else
                        tile<ARITHMETIC, R, 1>(call, row, rows, 2 * pair);
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

// Whether it has matrix registers as well, and the system lets this process use them.
int raywire_has_matrix() {
#ifdef RAYWIRE_MATRIX
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

// Bring a weight `[num_outputs, num_inputs]` into the layout above, in place. The number of outputs
// is a multiple of 16, that of inputs even.
void raywire_pack(bf16* weight, int64_t num_outputs, int64_t num_inputs, int num_threads) {
    raywire::parallel_for(num_outputs / BLOCK, num_threads, [&](int64_t n) {
        bf16* block = weight + n * BLOCK * num_inputs;
        auto* rows = reinterpret_cast<uint32_t*>(scratch(BLOCK * num_inputs * sizeof(bf16)));
        memcpy(rows, block, BLOCK * num_inputs * sizeof(bf16));
        for (int64_t k = 0; k < num_inputs / 2; ++k)
            for (int lane = 0; lane < BLOCK; ++lane)
                memcpy(block + k * GROUP + 2 * lane, &rows[lane * num_inputs / 2 + k], 4);
    });
}

// out = x Wᵀ + bias, `[num_rows, num_outputs]`. With an activation, blocks of W take turns, gate and
// up, and out = activation(gate) · up has half as many columns. Rows of x and out are so many elements
// apart: where that is a multiple of 4 KiB, they get in each other's way in the L1.
//
// The bias is as long as the packed weight, or null. Output is float if is_float, else bf16.
void raywire_linear(
    const bf16* x, const void* weight, const bf16* bias, void* out, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t x_stride, int64_t out_stride, int arithmetic,
    int activation, int is_float, int num_threads) {
    const auto* bytes = static_cast<const char*>(weight);
    const Call call{x,        nullptr,     0,          bytes,      bias,       out,
                    num_rows, num_outputs, num_inputs, x_stride,   out_stride, activation,
                    is_float != 0};
#ifdef RAYWIRE_MATRIX
    if (arithmetic == MATRIX && num_inputs % DEEP == 0) return run<MATRIX>(call, num_threads);
    // Few rows are bound by memory.
    if (arithmetic == INT8_MATRIX && num_rows > ROWS && has_whole_spans(num_inputs))
        return run<INT8_MATRIX>(call, num_threads);
#endif
#ifdef __AVX512BF16__
    if (arithmetic == DOT || arithmetic == MATRIX) return run<DOT>(call, num_threads);
#endif
    if (arithmetic == INT8 || arithmetic == INT8_MATRIX) return run<INT8>(call, num_threads);
    run<FLOAT>(call, num_threads);
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
