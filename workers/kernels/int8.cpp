// Weights to 8-bit integers, and back where an embedding shares them with the head.
//
// What it costs. A decode step of one row reads 1.06 bytes a weight instead of 2, and is bound by
// memory, so it takes little more than half the time. With many rows the arithmetic counts, where
// integers do twice as many products in an instruction (`int8.h`); `linear.cpp` runs it, as it does
// bfloat16. Packing reads a weight twice, from its bfloat16 layout (`tiles.h`), in which 16 outputs
// lie side by side as they will here: everything is done for all of them at once.
#include "int8.h"

#include "exports.h"
#include "threads.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr int64_t BLOCKS = 64;   // that are packed in one go
constexpr uintptr_t PAGE = 4096;

// Return the memory of whole pages to the system; it reads as zeros from now on.
void give_back(const bf16* from, const bf16* to) {
#ifdef __linux__
    const uintptr_t first = (uintptr_t(from) + PAGE - 1) & -PAGE, last = uintptr_t(to) & -PAGE;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
}

// Pairs of bfloat16, of outputs side by side.
struct Pairs {
    Words words;

    explicit Pairs(const bf16* from) : words(load<Words>(from)) {}
    Floats even() const { return bits<Floats>(words << 16); }
    Floats odd() const { return bits<Floats>(words & 0xffff0000u); }
};

// The largest of LANES outputs in a span, without its sign.
Floats largest(const bf16* weight, int64_t count) {
    Words most = {};
    for (int64_t k = 0; k < count; k += 2, weight += GROUP) {
        const Pairs pairs(weight);
        const Words even = bits<Words>(pairs.even()) & 0x7fffffffu;
        const Words odd = bits<Words>(pairs.odd()) & 0x7fffffffu;
        most = even > most ? even : most;
        most = odd > most ? odd : most;
    }
    return bits<Floats>(most);
}

// The next bfloat16 that is no smaller: what is divided by it keeps within its bounds.
Halves round_up(Floats x) {
    return __builtin_convertvector((bits<Words>(x) + 0xffff) >> 16, Halves);
}

// Quantize `count` inputs of LANES outputs.
void quantize_span(const bf16* weight, int64_t count, int8_t* out, int part) {
    const Halves scale = round_up(largest(weight, count) / float(WEIGHT_MAX));
    const Floats inverse = inverse_of(load_bf16(reinterpret_cast<const bf16*>(&scale)), 1);
    int8_t* quads = out + HEADER + part * DEPTH * LANES;
    Ints sum = {};
    for (int64_t k = 0; k < count; k += DEPTH, quads += QUADS) {
        Words quad = {};
        for (int i = 0; i < DEPTH && k + i < count; i += 2, weight += GROUP) {
            const Pairs pairs(weight);
            const Ints even = nearest(pairs.even() * inverse);
            const Ints odd = nearest(pairs.odd() * inverse);
            sum += even + odd;
            quad |= (bits<Words>(even) & 255) << 8 * i | (bits<Words>(odd) & 255) << 8 * (i + 1);
        }
        memcpy(quads, &quad, sizeof quad);
    }
    const Shorts sums = __builtin_convertvector(sum, Shorts);
    memcpy(out + part * sizeof scale, &scale, sizeof scale);
    memcpy(out + HEADER / 2 + part * sizeof sums, &sums, sizeof sums);
}

void quantize_block(const bf16* weight, int8_t* out, int64_t num_inputs) {
    for (int64_t k = 0; k < num_inputs; k += SPAN, weight += SPAN / 2 * GROUP) {
        const int64_t count = std::min<int64_t>(SPAN, num_inputs - k);
        for (int p = 0; p < PARTS; ++p)
            quantize_span(weight + p * 2 * LANES, count, out, p);
        out += HEADER + num_quads(count) * QUADS;
    }
}

}  // namespace

extern "C" {

// Of 16 outputs, packed.
int64_t raywire_int8_block_bytes(int64_t num_inputs) { return int8_block_bytes(num_inputs); }

// Pack a weight that has been packed as bfloat16, `[num_outputs, num_inputs]`, and which is used up.
void raywire_int8_pack(
    bf16* weight, int8_t* out, int64_t num_outputs, int64_t num_inputs, int num_threads) {
    const int64_t num_blocks = num_outputs / BLOCK, size = BLOCK * num_inputs;
    raywire::parallel_for((num_blocks + BLOCKS - 1) / BLOCKS, num_threads, [&](int64_t item) {
        const int64_t first = item * BLOCKS, last = std::min(num_blocks, first + BLOCKS);
        for (int64_t n = first; n < last; ++n)
            quantize_block(weight + n * size, out + n * int8_block_bytes(num_inputs), num_inputs);
        give_back(weight + first * size, weight + last * size);
    });
}

// Rows of W, as numbers again.
void raywire_int8_rows(
    const int8_t* weight, const int64_t* ids, bf16* out, int64_t num_ids, int64_t num_inputs,
    int num_threads) {
    raywire::parallel_for(num_ids, num_ids > 16 ? num_threads : 1, [&](int64_t i) {
        const int64_t lane = ids[i] % BLOCK;
        const int8_t* span = weight + ids[i] / BLOCK * int8_block_bytes(num_inputs);
        bf16* row = out + i * num_inputs;
        for (int64_t k = 0; k < num_inputs; k += SPAN) {
            const int64_t count = std::min<int64_t>(SPAN, num_inputs - k);
            const float scale = to_float(load<bf16>(span + lane * sizeof(bf16)));
            const int8_t* quads = span + HEADER + lane * DEPTH;
            for (int64_t j = 0; j < count; ++j)
                row[k + j] = to_bf16(scale * quads[j / DEPTH * QUADS + j % DEPTH]);
            span += HEADER + num_quads(count) * QUADS;
        }
    });
}
}
