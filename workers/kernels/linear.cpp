// y = x Wᵀ + b with bfloat16 weights, for one row or thousands.
//
// What it costs. A decode step with few rows reads every weight once and does little with it: it is
// bound by memory, N · K · 2 bytes. With many rows it is bound by arithmetic, 2 · M · N · K. So
// weights are laid out to be read in order, once, and in the shape that the arithmetic wants.
//
// Layout. 16 rows of W (outputs) make a block, and a block is K/2 groups of 64 bytes:
//
//     group k/2:   W[n+0][k] W[n+0][k+1] | W[n+1][k] W[n+1][k+1] | … | W[n+15][k] W[n+15][k+1]
//
// The block takes exactly the memory of its 16 rows, so that packing is done in place, without a
// second copy of the model. A group serves both kinds of arithmetic:
//
//     dot    one instruction multiplies pairs of bfloat16 and adds to 16 floats (AVX-512 BF16)
//     float  word << 16 and word & 0xffff0000 *are* the floats of k and k+1; then two multiply-adds
//
// Which of them is faster depends on the processor: the dot does twice as much at the same rate on
// AMD's Zen 4, half the rate on some of Intel's. `linear.py` times them.
//
// Tiles. ROWS rows of x times two blocks stay in registers over the whole of K. Rows are copied
// beforehand so that a tile's values for one k lie side by side. Each output is a single sum over
// k in order, whatever the number of rows: a request's result does not depend on its neighbours.
//
// Threads take chunks of blocks as they get to run (`threads.h`).
#include <algorithm>
#include <cmath>
#include <memory>

#include "bf16.h"
#include "threads.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

enum Arithmetic { DOT = 0, FLOAT = 1 };
enum Activation { NONE = 0, GELU_TANH = 1, SILU = 2 };

#ifdef __AVX512F__
constexpr int ROWS = 12;  // 24 of 32 registers are sums
#else
constexpr int ROWS = 3;
#endif
constexpr int64_t GROUP = 2 * LANES;   // elements of W
constexpr int64_t AHEAD = 48 * GROUP;  // how far ahead weights are fetched
constexpr int64_t PANEL_BYTES = 512 << 10;  // of x, read again for every block: stays in the L2

struct Call {
    const void* x;  // packed: see pack_rows
    const bf16* weight;
    const bf16* bias;
    void* out;  // bf16, or float if is_float
    int64_t num_rows, num_outputs, num_inputs;
    int activation;
    bool is_float;

    int64_t num_blocks() const { return (num_outputs + LANES - 1) / LANES; }
    int64_t out_stride() const { return activation == NONE ? num_outputs : num_outputs / 2; }
};

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

// gelu_tanh(x) = x/2 · (1 + tanh u) = x · sigmoid(2u), u = sqrt(2/π) (x + 0.044715 x³)
inline Floats activate(int activation, Floats x) {
    Floats y = activation == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-y));
}

template <int R, int B>
void finish(const Call& call, Floats (&sums)[R][B], int64_t row, int64_t block) {
    for (int b = 0; b < B; ++b) {
        const int64_t first = (block + b) * LANES;
        if (call.bias)
            for (int r = 0; r < R; ++r) sums[r][b] += load_bf16(call.bias + first);
    }
    if (call.is_float) {
        float* out = static_cast<float*>(call.out) + row * call.num_outputs + block * LANES;
        const int64_t left = call.num_outputs - block * LANES;
        for (int r = 0; r < R; ++r, out += call.num_outputs)
            memcpy(out, sums[r], std::min<int64_t>(left, B * LANES) * sizeof(float));
        return;
    }
    bf16* out = static_cast<bf16*>(call.out) + row * call.out_stride();
    for (int r = 0; r < R; ++r, out += call.out_stride()) {
        if constexpr (B == 2) {
            if (call.activation != NONE) {
                // As torch would: each step is rounded to what a tensor can hold.
                Floats gate = round_bf16(activate(call.activation, round_bf16(sums[r][0])));
                store_bf16(out + block / 2 * LANES, gate * round_bf16(sums[r][1]));
                continue;
            }
        }
        for (int b = 0; b < B; ++b) {
            const int64_t first = (block + b) * LANES;
            if (first + LANES <= call.num_outputs) {
                store_bf16(out + first, sums[r][b]);
            } else {
                for (int64_t n = first; n < call.num_outputs; ++n)
                    out[n] = to_bf16(sums[r][b][n - first]);
            }
        }
    }
}

template <int ARITHMETIC, int R, int B>
void tile(const Call& call, int64_t row, int64_t block) {
    const bf16* weight = call.weight + block * LANES * call.num_inputs;
    Floats sums[R][B];
#ifdef __AVX512BF16__
    if constexpr (ARITHMETIC == DOT)
        dot_tile<R, B>(
            static_cast<const uint32_t*>(call.x) + row * (call.num_inputs / 2), weight,
            call.num_inputs, sums);
    else
#endif
        float_tile<R, B>(
            static_cast<const float*>(call.x) + row * call.num_inputs, weight, call.num_inputs,
            sums);
    finish<R, B>(call, sums, row, block);
}

template <int ARITHMETIC, int B, int R = ROWS>
void tile_of(int num_rows, const Call& call, int64_t row, int64_t block) {
    if (num_rows == R)
        tile<ARITHMETIC, R, B>(call, row, block);
    else if constexpr (R > 1)
        tile_of<ARITHMETIC, B, R - 1>(num_rows, call, row, block);
}

// Rows side by side within a tile: tile t has, for each pair of inputs (DOT) or each input (FLOAT),
// the values of its rows. The last tile has fewer rows.
template <int ARITHMETIC>
void pack_rows(const bf16* x, void* to, int64_t first, int64_t rows, int64_t num_inputs) {
    if constexpr (ARITHMETIC == DOT) {
        auto* out = static_cast<uint32_t*>(to) + first * (num_inputs / 2);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < num_inputs / 2; ++k)
                memcpy(&out[k * rows + r], x + (first + r) * num_inputs + 2 * k, 4);
    } else {
        auto* out = static_cast<float*>(to) + first * num_inputs;
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < num_inputs; ++k)
                out[k * rows + r] = to_float(x[(first + r) * num_inputs + k]);
    }
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
    const int64_t row_bytes = num_inputs * (ARITHMETIC == DOT ? sizeof(bf16) : sizeof(float));
    void* packed = scratch(num_rows * row_bytes);
    call.x = packed;
    const int64_t num_tiles = (num_rows + ROWS - 1) / ROWS;
    raywire::parallel_for(num_tiles, num_tiles > 4 ? num_threads : 1, [&](int64_t t) {
        pack_rows<ARITHMETIC>(
            x, packed, t * ROWS, std::min<int64_t>(ROWS, num_rows - t * ROWS), num_inputs);
    });

    const int64_t panel = std::max<int64_t>(1, PANEL_BYTES / (ROWS * row_bytes)) * ROWS;
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
                if (2 * pair + 1 < num_blocks)
                    tile_of<ARITHMETIC, 2>(rows, call, row, 2 * pair);
                else
                    tile_of<ARITHMETIC, 1>(rows, call, row, 2 * pair);
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
    raywire::parallel_for(num_outputs / LANES, num_threads, [&](int64_t n) {
        bf16* block = weight + n * LANES * num_inputs;
        auto* rows = static_cast<uint32_t*>(scratch(LANES * num_inputs * sizeof(bf16)));
        memcpy(rows, block, LANES * num_inputs * sizeof(bf16));
        for (int64_t k = 0; k < num_inputs / 2; ++k)
            for (int lane = 0; lane < LANES; ++lane)
                memcpy(block + k * GROUP + 2 * lane, &rows[lane * num_inputs / 2 + k], 4);
    });
}

// out = x Wᵀ + bias, `[num_rows, num_outputs]`. With an activation, blocks of W take turns, gate and
// up, and out = activation(gate) · up has half as many columns.
//
// The bias is as long as the packed weight, or null. Output is float if is_float, else bf16.
void raywire_linear(
    const bf16* x, const bf16* weight, const bf16* bias, void* out, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int arithmetic, int activation, int is_float,
    int num_threads) {
    Call call{nullptr,    weight,     bias,       out,          num_rows,
              num_outputs, num_inputs, activation, is_float != 0};
#ifdef __AVX512BF16__
    if (arithmetic == DOT) return run<DOT>(call, x, num_threads);
#endif
    run<FLOAT>(call, x, num_threads);
}

// Rows of W, out of its packed layout: an embedding that shares its weight with the head.
void raywire_rows(
    const bf16* weight, const int64_t* ids, bf16* out, int64_t num_ids, int64_t num_inputs,
    int num_threads) {
    raywire::parallel_for(num_ids, num_ids > 16 ? num_threads : 1, [&](int64_t i) {
        const bf16* block = weight + ids[i] / LANES * LANES * num_inputs + ids[i] % LANES * 2;
        for (int64_t k = 0; k < num_inputs / 2; ++k)
            memcpy(out + i * num_inputs + 2 * k, block + k * GROUP, 4);
    });
}
}
