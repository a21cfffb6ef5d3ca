// A stack of decoder layers in one call: what lies between our kernels costs nothing that way.
//
// The kernels of a layer take a hundred microseconds or so when a step has one token, and calling
// each of them from Python takes a tenth of that every time. Here they are called in a row:
//
//     qkv      = normed · Wqkv                 normed = norm(x); query, key and value in one
//     qkv      = rotate(norm(qkv))             query and key heads, in place
//     pages   <- key, value
//     attended = attention(query, pages)
//     x       += norm(attended · Wo)           and normed = norm(x) in the same pass
//     inner    = act(normed · Wg) · (normed · Wu)
//     x       += norm(inner · Wd)              and normed = norm(x) for the layer that follows
//
// x, the residual, is the caller's and is overwritten. All else lives in memory that the caller gives
// (`raywire_layers_memory`): one row of it per token. A part is given up when it has been read, so
// that the next may lie there:
//
//     | cosine, sine of each table | normed, or what is to be added | qkv, attended, or inner |
//
// Threads stay awake from the first layer to the last (`threads.h`).
#include "layers.h"

#include <algorithm>
#include <cstring>

#include "exports.h"
#include "threads.h"
#include "tiles.h"

namespace {

// So far apart rows of so many elements lie, that all of them find room in the L1 together: it has a
// place for a line by the line's address, and few for addresses that a power of two lies between.
constexpr int64_t apart(int64_t width) {
    constexpr int64_t LINE = 64 / sizeof(bf16);
    return ((width + LINE - 1) / LINE | 1) * LINE;
}

// Rows of a step's memory, in elements.
struct Widths {
    int64_t rotary, hidden, qkv = 0, attended = 0, inner = 0;

    explicit Widths(const LayerStack& stack)
        : rotary(2 * stack.head_size * stack.num_tables), hidden(stack.hidden_size) {
        for (int64_t i = 0; i < stack.num_layers; ++i) {
            const DecoderLayer& layer = stack.layers[i];
            qkv = std::max(qkv, layer.qkv.num_outputs);
            attended = std::max(attended, layer.num_heads * stack.head_size);
            inner = std::max(inner, apart(layer.gate_up.num_outputs / 2));
        }
    }

    int64_t all() const { return rotary + hidden + std::max(qkv + attended, inner); }
};

struct Run {
    const LayerStack& stack;
    const StepLayout& step;
    const Widths widths;
    bf16 *x, *rotary, *normed, *qkv, *attended, *inner;  // inner lies where qkv has been
    int arithmetic, num_threads;

    Run(const LayerStack& stack, const StepLayout& step, bf16* x, bf16* memory, int arithmetic,
        int num_threads)
        : stack(stack), step(step), widths(stack), x(x), arithmetic(arithmetic),
          num_threads(num_threads) {
        const int64_t count = step.num_tokens;
        rotary = memory;
        normed = rotary + count * widths.rotary;
        qkv = inner = normed + count * widths.hidden;
        attended = qkv + count * widths.qkv;
    }

    void embed() const {
        const LinearLayer& head = stack.embedding;
        const int64_t count = step.num_tokens, size = stack.hidden_size;
        if (head.kind == EIGHT_BITS)
            raywire_int8_rows(
                static_cast<const int8_t*>(head.weight), step.ids, x, count, size, num_threads);
        else
            raywire_rows(
                static_cast<const bf16*>(head.weight), step.ids, x, count, size, num_threads);
        if (stack.embedding_scale == 0) return;
        for (int64_t i = 0; i < count * size; i += LANES)
            store_bf16(x + i, load_bf16(x + i) * stack.embedding_scale);
    }

    // Of the step's tokens, `[num_tokens, head_size]` each.
    bf16* cosine(int64_t table) const {
        return rotary + 2 * table * step.num_tokens * stack.head_size;
    }
    bf16* sine(int64_t table) const { return cosine(table) + step.num_tokens * stack.head_size; }

    void look_up_positions() const {
        const int64_t size = stack.head_size;
        for (int64_t i = 0; i < stack.num_tables; ++i)
            for (int64_t t = 0; t < step.num_tokens; ++t) {
                const int64_t from = step.positions[t] * size, to = t * size;
                memcpy(cosine(i) + to, stack.tables[i].cosine + from, size * sizeof(bf16));
                memcpy(sine(i) + to, stack.tables[i].sine + from, size * sizeof(bf16));
            }
    }

    void multiply(
        const LinearLayer& layer, const bf16* from, int64_t stride, bf16* to,
        int64_t to_stride) const {
        const int of_bytes = arithmetic == MATRIX ? INT8_MATRIX : INT8;
        raywire_linear(
            from, layer.weight, layer.bias, to, step.num_tokens, layer.num_outputs,
            layer.num_inputs, stride, to_stride, layer.kind == EIGHT_BITS ? of_bytes : arithmetic,
            layer.activation, false, num_threads);
    }

    void attend(const DecoderLayer& layer) const {
        const int64_t size = stack.head_size, query_width = layer.num_heads * size;
        const int64_t key_width = layer.num_kv_heads * size;
        const int64_t stride = query_width + 2 * key_width;
        raywire_norm_and_rotate(
            qkv, layer.query_norm, layer.key_norm, cosine(layer.rotary), sine(layer.rotary),
            step.num_tokens, layer.num_heads, layer.num_kv_heads, size, layer.head_eps,
            layer.heads_round_first, num_threads);
        raywire_write_kv(
            qkv + query_width, qkv + query_width + key_width, stride, step.slots, layer.key_pages,
            layer.value_pages, step.num_tokens, key_width);
        raywire_attention(
            qkv, attended, layer.key_pages, layer.value_pages, step.block_table, step.query_start,
            step.seq_lens, layer.sinks, step.num_reqs, layer.num_heads, layer.num_kv_heads, size,
            stride, step.block_size, step.table_stride, layer.window, layer.scale, layer.softcap,
            arithmetic, num_threads);
    }

    // x += norm(normed), and then out = norm(x): each norm where there are factors for it.
    void add(const float* after, const float* next, bf16* out) const {
        raywire_add_and_norm(
            normed, x, after, x, next, out, step.num_tokens, stack.hidden_size, stack.eps,
            stack.rounds_first, num_threads);
    }

    void layers() const {
        const int64_t hidden = stack.hidden_size;
        raywire_rms_norm(
            x, stack.layers[0].before_attention, normed, step.num_tokens, stack.hidden_size,
            stack.eps, stack.rounds_first, num_threads);
        for (int64_t i = 0; i < stack.num_layers; ++i) {
            const DecoderLayer& layer = stack.layers[i];
            multiply(layer.qkv, normed, hidden, qkv, layer.qkv.num_outputs);
            attend(layer);
            multiply(layer.out, attended, layer.out.num_inputs, normed, hidden);
            add(layer.after_attention, layer.before_mlp, normed);
            multiply(layer.gate_up, normed, hidden, inner, widths.inner);
            multiply(layer.down, inner, widths.inner, normed, hidden);
            if (i + 1 < stack.num_layers)
                add(layer.after_mlp, stack.layers[i + 1].before_attention, normed);
            else
                add(layer.after_mlp, stack.last_norm, x);
        }
    }
};

}  // namespace

extern "C" {

// Elements of memory that `raywire_layers` wants for each token.
int64_t raywire_layers_memory(const LayerStack* stack) { return Widths(*stack).all(); }

// Embed the step's tokens, if it has ids, and run all layers of a stack, at least one, over x,
// `[num_tokens, hidden_size]`, in place. `memory` is num_tokens times `raywire_layers_memory`, and
// holds nothing between calls.
void raywire_layers(
    const LayerStack* stack, const StepLayout* step, bf16* x, bf16* memory, int arithmetic,
    int num_threads) {
    const raywire::Awake awake;
    const Run run(*stack, *step, x, memory, arithmetic, num_threads);
    if (step->ids) run.embed();
    run.look_up_positions();
    run.layers();
}
}
