// Attention over paged keys and values, which are read where they lie.
//
//     out = softmax(q kᵀ · scale) v        for each query head; heads of a group share k and v
//
// Keys come in tiles of TILE. Per row of queries a running maximum m, a running sum l and the
// weighted sum o of values are kept; a tile whose maximum is larger scales l and o down first
// (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention"). Nothing of size queries x keys
// is ever in memory, keys that a mask or the window hides are skipped by the tile, and the rest of a
// last page, where an earlier owner's numbers lie, is never read.
//
// Few queries (decode) are bound by memory, and have a file of their own: `decode.h`.
//
// Many queries (prefill) are bound by arithmetic, 4 · head_dim operations for each query and key.
// QUERIES rows at a time share a tile of keys that is brought into the layout of `tiles.h`: q kᵀ has
// the keys as outputs, p v has them as inputs. Both products then run at the matrix speed of the
// linear layers. p is rounded to bfloat16 where the dot wants it, as flash attention does.
#include <algorithm>
#include <utility>
#include <vector>

#include "attention.h"
#include "bf16.h"
#include "decode.h"
#include "exports.h"
#include "matrix.h"
#include "memory.h"
#include "threads.h"
#include "tiles.h"

namespace {

constexpr int TILE = 64;        // keys
constexpr int QUERIES = 96;     // rows of a prefill item: heads of a group times tokens
constexpr int FEW_TOKENS = 3;   // up to so many queries of a request are decodes

// Queries of one key head, of neighbouring tokens of one request.
struct Item {
    int64_t request, kv_head, first_token, num_tokens;  // tokens of the request's queries
};

// Rows i and i + W of a matrix of squares of 2 W, each of which is to swap two of its quarters: what
// becomes of the first, or of the second.
template <int W, bool IS_UPPER, size_t... LANE>
inline Words half_of(Words a, Words b, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(
        a, b, (LANE & W ? LANES + LANE - (IS_UPPER ? 0 : W) : LANE + (IS_UPPER ? W : 0))...);
}

// rows[i][j] becomes rows[j][i]: first in squares of two, at last in one of LANES.
template <int W = 1>
inline void transpose(Words (&rows)[LANES]) {
    constexpr auto lanes = std::make_index_sequence<LANES>();
    for (int i = 0; i < LANES; ++i) {
        if (i & W) continue;
        const Words a = rows[i], b = rows[i + W];
        rows[i] = half_of<W, false>(a, b, lanes);
        rows[i + W] = half_of<W, true>(a, b, lanes);
    }
    if constexpr (2 * W < LANES) transpose<2 * W>(rows);
}

// Of LANES keys (null: zeros) COUNT pairs of each, to the keys side by side.
template <int COUNT>
inline void pack_pairs(const bf16* const (&keys)[LANES], int64_t first, bf16* block) {
    Words pairs[LANES];
    for (int i = 0; i < LANES; ++i) {
        pairs[i] = Words{};
        if (keys[i]) memcpy(&pairs[i], keys[i] + 2 * first, COUNT * sizeof(uint32_t));
    }
    transpose(pairs);
    for (int i = 0; i < COUNT; ++i)
        memcpy(block + (first + i) * GROUP, &pairs[i], sizeof pairs[i]);
}

// Keys as outputs: block of 16 keys, pairs along the head. Missing keys are zero.
void pack_keys(const Call& call, const Item& item, int64_t position, int64_t count, bf16* packed) {
    const int64_t num_pairs = call.size / 2;
    for (int64_t k = 0; k < TILE; k += LANES) {
        const bf16* keys[LANES];
        for (int64_t i = 0; i < LANES; ++i)
            keys[i] = k + i < count
                          ? call.key + call.slot(item.request, position + k + i, item.kv_head)
                          : nullptr;
        bf16* block = packed + k / BLOCK * BLOCK * call.size + k % BLOCK * 2;
        int64_t first = 0;
        for (; first + LANES <= num_pairs; first += LANES) pack_pairs<LANES>(keys, first, block);
        if (first < num_pairs)  // 8, for sizes go by 16
            pack_pairs<std::min(LANES, BLOCK / 2)>(keys, first, block);
    }
}

// Keys as inputs: block of 16 columns of the head, pairs along the keys.
void pack_values(
    const Call& call, const Item& item, int64_t position, int64_t count, bf16* packed) {
    for (int64_t k = 0; k < TILE; k += 2) {
        const bf16* rows[2];
        for (int i = 0; i < 2; ++i)
            rows[i] = k + i < count
                          ? call.value + call.slot(item.request, position + k + i, item.kv_head)
                          : nullptr;
        for (int64_t d = 0; d < call.size; d += LANES) {
            Words pair{};
            if (rows[0]) pair |= widen(load<Halves>(rows[0] + d));
            if (rows[1]) pair |= widen(load<Halves>(rows[1] + d)) << 16;
            bf16* block = packed + d / BLOCK * BLOCK * TILE;
            memcpy(block + k / 2 * GROUP + d % BLOCK * 2, &pair, sizeof pair);
        }
    }
}

template <int ARITHMETIC>
void pack_weights(const float* weights, void* tile, int r, int num_rows) {
    if constexpr (ARITHMETIC != FLOAT) {
        bf16 rounded[TILE];
        for (int k = 0; k < TILE; k += LANES) store_bf16(rounded + k, load<Floats>(weights + k));
        pack_row<ARITHMETIC>(rounded, tile, r, num_rows, TILE);
    } else {
        for (int k = 0; k < TILE; ++k)
            static_cast<float*>(tile)[k * num_rows + r] = weights[k];
    }
}

// Many tokens, all heads of the group: rows are (token, head of the group).
template <int ARITHMETIC>
void attend_many(const Call& call, const Item& item, Memory& memory) {
    const int64_t group = call.group(), size = call.size, request = item.request;
    const int64_t first_query = call.query_start[request];
    const int64_t num_queries = call.query_start[request + 1] - first_query;
    const int64_t first_place = call.seq_lens[request] - num_queries + item.first_token;
    const int64_t last_place = first_place + item.num_tokens - 1;
    const int64_t num_rows = item.num_tokens * group;

    // sums, scores, packed queries, packed weights, packed keys, packed values
    const int64_t room = rows_with_room<ARITHMETIC>(num_rows);
    float* sums = memory.of<float>((num_rows + room) * (size + TILE) + TILE * size);
    float* scores = sums + num_rows * size;
    std::fill(sums, scores, 0.0f);
    char* queries = reinterpret_cast<char*>(scores + num_rows * TILE);
    char* weights = queries + room * size * sizeof(float);
    bf16* keys = reinterpret_cast<bf16*>(weights + room * TILE * sizeof(float));
    bf16* values = keys + TILE * size;
    std::vector<Row> rows(num_rows);
    const int64_t query_bytes = row_bytes<ARITHMETIC>(size);
    const int64_t weight_bytes = row_bytes<ARITHMETIC>(TILE);
    constexpr int64_t most = MOST_ROWS<ARITHMETIC>;
    auto rows_of = [&](int64_t tile) { return int(std::min(most, num_rows - tile)); };
    [[maybe_unused]] const Registers<ARITHMETIC> registers;

    for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t head = item.kv_head * group + r % group;
        const int64_t token = first_query + item.first_token + r / group;
        const int64_t tile = r / most * most;
        rows[r] = start(call, head);
        pack_row<ARITHMETIC>(
            call.query + token * call.query_stride + head * size, queries + tile * query_bytes,
            int(r - tile), rows_of(tile), size);
    }
    // From the first key that the first token sees, at the start of a tile.
    int64_t position = std::max<int64_t>(0, first_key(call, first_place, 0)) / TILE * TILE;
    for (; position <= last_place; position += TILE) {
        const int64_t count = std::min<int64_t>(TILE, last_place + 1 - position);
        pack_keys(call, item, position, count, keys);
        pack_values(call, item, position, count, values);
        for (int64_t tile = 0; tile < num_rows; tile += most) {
            with_rows<ARITHMETIC>(rows_of(tile), [&]<int R>() {
                const int present = ARITHMETIC == MATRIX ? rows_of(tile) : R;
                for (int64_t k = 0; k < TILE; k += 2 * BLOCK) {
                    Floats found[R][2 * PARTS];
                    product<ARITHMETIC, R, 2>(
                        queries + tile * query_bytes, size, keys + k * size, size, found);
                    for (int r = 0; r < present; ++r)
                        memcpy(scores + (tile + r) * TILE + k, found[r], sizeof found[r]);
                }
                float factors[R];
                for (int r = 0; r < present; ++r) {
                    const int64_t place = first_place + (tile + r) / group;
                    float* row = scores + (tile + r) * TILE;
                    factors[r] = soften<TILE>(
                        call, row, first_key(call, place, position), place + 1 - position,
                        rows[tile + r]);
                    pack_weights<ARITHMETIC>(row, weights + tile * weight_bytes, r, present);
                }
                auto add = [&]<int B>(int64_t d) {
                    Floats found[R][B * PARTS];
                    product<ARITHMETIC, R, B>(
                        weights + tile * weight_bytes, TILE, values + d * TILE, TILE, found);
                    for (int r = 0; r < present; ++r)
                        for (int v = 0; v < B * PARTS; ++v) {
                            float* to = sums + (tile + r) * size + d + v * LANES;
                            Floats sum = load<Floats>(to) * factors[r] + found[r][v];
                            memcpy(to, &sum, sizeof sum);
                        }
                };
                int64_t d = 0;
                for (; d + 2 * BLOCK <= size; d += 2 * BLOCK) add.template operator()<2>(d);
                if (d < size) add.template operator()<1>(d);
            });
        }
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t token = first_query + item.first_token + r / group;
        const int64_t head = item.kv_head * group + r % group;
        finish(call, sums + r * size, rows[r], call.out + (token * call.num_heads + head) * size);
    }
}

struct Work {
    std::vector<Item> items;
    Decodes decodes;
};

Work divide(const Call& call) {
    Work work;
    const int64_t most = std::max<int64_t>(1, QUERIES / call.group());
    for (int64_t request = 0; request < call.num_reqs; ++request) {
        const int64_t count = call.query_start[request + 1] - call.query_start[request];
        if (count <= FEW_TOKENS) {
            for (int64_t token = 0; token < count; ++token)
                work.decodes.add(call, request, token, call.seq_lens[request] - count + token);
            continue;
        }
        // The last tokens see the most keys: they come first, so that no thread ends with them.
        for (int64_t end = count; end > 0; end -= std::min(most, end)) {
            const int64_t first = std::max<int64_t>(0, end - most);
            for (int64_t head = 0; head < call.num_kv_heads; ++head)
                work.items.push_back({request, head, first, end - first});
        }
    }
    return work;
}

template <int ARITHMETIC>
void run(const Call& call, int num_threads) {
    const Work work = divide(call);
    const int64_t num_items = int64_t(work.items.size());
    const int64_t num_stretches = int64_t(work.decodes.stretches.size());
    float* parts = work.decodes.memory(call);
    raywire::parallel_for(num_items + num_stretches, num_threads, [&](int64_t index) {
        thread_local Memory memory;
        if (index < num_items)
            attend_many<ARITHMETIC>(call, work.items[index], memory);
        else
            attend_stretch<ARITHMETIC == MATRIX ? DOT : ARITHMETIC>(
                call, work.decodes.stretches[index - num_items], memory, parts);
    });
    const int64_t num_cuts = int64_t(work.decodes.cuts.size());
    raywire::parallel_for(num_cuts * call.group(), num_threads, [&](int64_t index) {
        join(call, work.decodes.cuts[index / call.group()], index % call.group(), parts);
    });
}

}  // namespace

extern "C" {

// Copy keys and values of this step's tokens into their slots. Source rows are `stride` elements
// apart, a slot holds `width`.
void raywire_write_kv(
    const bf16* key, const bf16* value, int64_t stride, const int64_t* slots, bf16* key_pages,
    bf16* value_pages, int64_t num_tokens, int64_t width) {
    for (int64_t t = 0; t < num_tokens; ++t) {
        memcpy(key_pages + slots[t] * width, key + t * stride, width * sizeof(bf16));
        memcpy(value_pages + slots[t] * width, value + t * stride, width * sizeof(bf16));
    }
}

// The head size is a multiple of 16. See Call for the rest.
void raywire_attention(
    const bf16* query, bf16* out, const bf16* key, const bf16* value, const int32_t* block_table,
    const int32_t* query_start, const int32_t* seq_lens, const float* sinks, int64_t num_reqs,
    int64_t num_heads, int64_t num_kv_heads, int64_t size, int64_t query_stride,
    int64_t block_size, int64_t table_stride, int64_t window, float scale, float softcap,
    int arithmetic, int num_threads) {
    const Call call{query,      out,         key,          value,        block_table,
                    query_start, seq_lens,   num_reqs,     num_heads,    num_kv_heads,
                    size,        query_stride, block_size, table_stride, scale,
                    window,      softcap,    sinks};
#ifdef RAYWIRE_MATRIX
    if (arithmetic == MATRIX && size % DEEP == 0) return run<MATRIX>(call, num_threads);
#endif
#ifdef __AVX512BF16__
    if (arithmetic == DOT || arithmetic == MATRIX) return run<DOT>(call, num_threads);
#endif
    run<FLOAT>(call, num_threads);
}
}
