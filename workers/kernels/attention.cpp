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
// Few queries (decode) are bound by memory: each key and value is read once, 4 · head_dim bytes for
// both, and used for the heads of its group at once, in float arithmetic.
//
// Many queries (prefill) are bound by arithmetic, 4 · head_dim operations for each query and key.
// QUERIES rows at a time share a tile of keys that is brought into the layout of `tiles.h`: q kᵀ has
// the keys as outputs, p v has them as inputs. Both products then run at the matrix speed of the
// linear layers. p is rounded to bfloat16 where the dot wants it, as flash attention does.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bf16.h"
#include "threads.h"
#include "tiles.h"

namespace {

constexpr int TILE = 64;        // keys
constexpr int QUERIES = 96;     // rows of a prefill item: heads of a group times tokens
constexpr int HEADS = 8;        // of a group, that a decode works on at once
constexpr int FEW_TOKENS = 3;   // up to so many queries of a request are decodes
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Call {
    const bf16* query;  // token stride query_stride
    bf16* out;          // [tokens, heads, size]
    const bf16 *key, *value;  // [blocks, block_size, kv_heads, size]
    const int32_t *block_table, *query_start, *seq_lens;
    int64_t num_reqs, num_heads, num_kv_heads, size, query_stride, block_size, table_stride;
    float scale;
    int64_t window;       // 0: none
    float softcap;        // 0: none
    const float* sinks;   // per head, or null

    int64_t group() const { return num_heads / num_kv_heads; }

    // Where a token of a request lies in key or value.
    int64_t slot(int64_t request, int64_t position, int64_t kv_head) const {
        const int64_t block = block_table[request * table_stride + position / block_size];
        return ((block * block_size + position % block_size) * num_kv_heads + kv_head) * size;
    }
};

// Queries of one key head, of neighbouring tokens of one request.
struct Item {
    int64_t request, kv_head, first_token, num_tokens;  // tokens of the request's queries
};

struct Row {
    float most, total;
};

Row start(const Call& call, int64_t head) {
    // A sink is a key without a value.
    if (call.sinks) return {call.sinks[head], 1.0f};
    return {NEVER, 0.0f};
}

inline Floats capped(Floats x, float cap) {
    return cap * (1.0f - 2.0f / (1.0f + exp(x * (2.0f / cap))));  // cap · tanh(x / cap)
}

// Scores of one row and tile to weights: hide keys outside [first, last), update the row, and return
// what the values summed so far are to be multiplied with.
inline float soften(const Call& call, float* scores, int64_t first, int64_t last, Row& row) {
    Floats most = all(NEVER);
    for (int k = 0; k < TILE; k += LANES) {
        Floats s = load<Floats>(scores + k) * call.scale;
        if (call.softcap != 0) s = capped(s, call.softcap);
        memcpy(scores + k, &s, sizeof s);
    }
    for (int64_t k = 0; k < std::min<int64_t>(first, TILE); ++k) scores[k] = NEVER;
    for (int64_t k = std::max<int64_t>(last, 0); k < TILE; ++k) scores[k] = NEVER;
    for (int k = 0; k < TILE; k += LANES) {
        Floats s = load<Floats>(scores + k);
        most = s > most ? s : most;
    }
    const float new_most = std::max(row.most, largest(most));
    if (new_most == NEVER) {
        std::fill(scores, scores + TILE, 0.0f);
        return 1.0f;
    }
    const float factor = row.most == NEVER ? 0.0f : std::exp(row.most - new_most);
    Floats total{};
    for (int k = 0; k < TILE; k += LANES) {
        Floats s = load<Floats>(scores + k);
        Floats p = s == NEVER ? Floats{} : exp(s - new_most);
        memcpy(scores + k, &p, sizeof p);
        total += p;
    }
    row.total = row.total * factor + sum(total);
    row.most = new_most;
    return factor;
}

// The first and last key of a tile at `position` that a query at `place` sees.
inline int64_t first_key(const Call& call, int64_t place, int64_t position) {
    return call.window ? place - call.window + 1 - position : 0;
}

void finish(const Call& call, const float* sums, const Row& row, bf16* out) {
    const float factor = 1.0f / row.total;
    for (int64_t d = 0; d < call.size; d += LANES)
        store_bf16(out + d, load<Floats>(sums + d) * factor);
}

// Scores of one key for G heads, TILE apart. The key is converted once.
template <int G>
void score_key(const float* query, const bf16* key, int64_t size, float* scores) {
    Floats even[G] = {}, odd[G] = {};
    int64_t d = 0;
    for (; d + 2 * LANES <= size; d += 2 * LANES) {
        const Floats k0 = load_bf16(key + d), k1 = load_bf16(key + d + LANES);
        for (int g = 0; g < G; ++g) {
            even[g] += load<Floats>(query + g * size + d) * k0;
            odd[g] += load<Floats>(query + g * size + d + LANES) * k1;
        }
    }
    if (d < size)
        for (int g = 0; g < G; ++g)
            even[g] += load<Floats>(query + g * size + d) * load_bf16(key + d);
    for (int g = 0; g < G; ++g) scores[g * TILE] = sum(even[g] + odd[g]);
}

// sums = sums · factor + weights · values for G heads, a stretch of the head at a time.
template <int G>
void add_values(
    const bf16* const* values, int64_t count, const float* weights, const float* factors,
    int64_t size, float* sums) {
    for (int64_t d = 0; d < size; d += LANES) {
        Floats s[G];
        for (int g = 0; g < G; ++g) s[g] = load<Floats>(sums + g * size + d) * factors[g];
        for (int64_t k = 0; k < count; ++k) {
            const Floats v = load_bf16(values[k] + d);
            for (int g = 0; g < G; ++g) s[g] += weights[g * TILE + k] * v;
        }
        for (int g = 0; g < G; ++g) memcpy(sums + g * size + d, &s[g], sizeof s[g]);
    }
}

// One token and G heads of a group, from `first_head`, against all keys in turn.
template <int G>
void attend_heads(
    const Call& call, const Item& item, int64_t place, int64_t token, int64_t first_head,
    float* memory) {
    const int64_t size = call.size, request = item.request;
    float *sums = memory, *query = sums + G * size, *scores = query + G * size;
    Row rows[G];
    float factors[G];
    const bf16* q = call.query + token * call.query_stride + first_head * size;
    for (int g = 0; g < G; ++g) rows[g] = start(call, first_head + g);
    for (int64_t d = 0; d < G * size; ++d) query[d] = to_float(q[d]);
    std::fill(sums, sums + G * size, 0.0f);
    int64_t position = std::max<int64_t>(0, first_key(call, place, 0));
    for (; position <= place; position += TILE) {
        const int64_t count = std::min<int64_t>(TILE, place + 1 - position);
        const bf16* values[TILE];
        for (int64_t k = 0; k < count; ++k) {
            const int64_t slot = call.slot(request, position + k, item.kv_head);
            values[k] = call.value + slot;
            score_key<G>(query, call.key + slot, size, scores + k);
        }
        for (int g = 0; g < G; ++g)
            factors[g] = soften(call, scores + g * TILE, 0, count, rows[g]);
        add_values<G>(values, count, scores, factors, size, sums);
    }
    bf16* out = call.out + (token * call.num_heads + first_head) * size;
    for (int g = 0; g < G; ++g) finish(call, sums + g * size, rows[g], out + g * size);
}

void attend_token(const Call& call, const Item& item, int64_t token, std::vector<float>& memory) {
    const int64_t first_query = call.query_start[item.request];
    const int64_t num_queries = call.query_start[item.request + 1] - first_query;
    const int64_t place = call.seq_lens[item.request] - num_queries + token;
    memory.resize(std::max<size_t>(memory.size(), HEADS * (2 * call.size + TILE)));
    for (int64_t g = 0; g < call.group(); g += HEADS) {
        const int heads = int(std::min<int64_t>(HEADS, call.group() - g));
        with_rows<HEADS>(heads, [&]<int G>() {
            attend_heads<G>(
                call, item, place, first_query + token, item.kv_head * call.group() + g,
                memory.data());
        });
    }
}

// Keys as outputs: block of 16 keys, pairs along the head. Missing keys are zero.
void pack_keys(const Call& call, const Item& item, int64_t position, int64_t count, bf16* packed) {
    const int64_t size = call.size;
    if (count < TILE) std::fill(packed, packed + TILE * size, 0);
    for (int64_t k = 0; k < count; ++k) {
        const bf16* key = call.key + call.slot(item.request, position + k, item.kv_head);
        bf16* block = packed + k / LANES * LANES * size + k % LANES * 2;
        for (int64_t d = 0; d < size / 2; ++d) memcpy(block + d * GROUP, key + 2 * d, 4);
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
            if (rows[0]) pair |= __builtin_convertvector(load<Halves>(rows[0] + d), Words);
            if (rows[1]) pair |= __builtin_convertvector(load<Halves>(rows[1] + d), Words) << 16;
            memcpy(packed + d * TILE + k / 2 * GROUP, &pair, sizeof pair);
        }
    }
}

template <int ARITHMETIC>
void pack_weights(const float* weights, void* tile, int r, int num_rows) {
    if constexpr (ARITHMETIC == DOT) {
        bf16 rounded[TILE];
        for (int k = 0; k < TILE; k += LANES) store_bf16(rounded + k, load<Floats>(weights + k));
        pack_row<DOT>(rounded, tile, r, num_rows, TILE);
    } else {
        for (int k = 0; k < TILE; ++k)
            static_cast<float*>(tile)[k * num_rows + r] = weights[k];
    }
}

// Many tokens, all heads of the group: rows are (token, head of the group).
template <int ARITHMETIC>
void attend_many(const Call& call, const Item& item, std::vector<float>& memory) {
    const int64_t group = call.group(), size = call.size, request = item.request;
    const int64_t first_query = call.query_start[request];
    const int64_t num_queries = call.query_start[request + 1] - first_query;
    const int64_t first_place = call.seq_lens[request] - num_queries + item.first_token;
    const int64_t last_place = first_place + item.num_tokens - 1;
    const int64_t num_rows = item.num_tokens * group;

    // sums, scores, packed queries, packed weights, packed keys, packed values
    memory.assign(num_rows * (2 * size + 2 * TILE) + TILE * size, 0.0f);
    float *sums = memory.data(), *scores = sums + num_rows * size;
    char* queries = reinterpret_cast<char*>(scores + num_rows * TILE);
    char* weights = queries + num_rows * size * sizeof(float);
    bf16* keys = reinterpret_cast<bf16*>(weights + num_rows * TILE * sizeof(float));
    bf16* values = keys + TILE * size;
    std::vector<Row> rows(num_rows);
    const int64_t query_bytes = row_bytes<ARITHMETIC>(size);
    const int64_t weight_bytes = row_bytes<ARITHMETIC>(TILE);
    auto rows_of = [&](int64_t tile) { return int(std::min<int64_t>(ROWS, num_rows - tile)); };

    for (int64_t r = 0; r < num_rows; ++r) {
        const int64_t head = item.kv_head * group + r % group;
        const int64_t token = first_query + item.first_token + r / group;
        const int64_t tile = r / ROWS * ROWS;
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
        for (int64_t tile = 0; tile < num_rows; tile += ROWS) {
            with_rows(rows_of(tile), [&]<int R>() {
                for (int64_t k = 0; k < TILE; k += 2 * LANES) {
                    Floats found[R][2];
                    multiply<ARITHMETIC, R, 2>(
                        queries + tile * query_bytes, keys + k * size, size, found);
                    for (int r = 0; r < R; ++r)
                        memcpy(scores + (tile + r) * TILE + k, found[r], sizeof found[r]);
                }
                float factors[R];
                for (int r = 0; r < R; ++r) {
                    const int64_t place = first_place + (tile + r) / group;
                    float* row = scores + (tile + r) * TILE;
                    factors[r] = soften(
                        call, row, first_key(call, place, position), place + 1 - position,
                        rows[tile + r]);
                    pack_weights<ARITHMETIC>(row, weights + tile * weight_bytes, r, R);
                }
                auto add = [&]<int B>(int64_t d) {
                    Floats found[R][B];
                    multiply<ARITHMETIC, R, B>(
                        weights + tile * weight_bytes, values + d * TILE, TILE, found);
                    for (int r = 0; r < R; ++r)
                        for (int b = 0; b < B; ++b) {
                            float* to = sums + (tile + r) * size + d + b * LANES;
                            Floats sum = load<Floats>(to) * factors[r] + found[r][b];
                            memcpy(to, &sum, sizeof sum);
                        }
                };
                int64_t d = 0;
                for (; d + 2 * LANES <= size; d += 2 * LANES) add.template operator()<2>(d);
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

std::vector<Item> divide(const Call& call) {
    std::vector<Item> items;
    const int64_t most = std::max<int64_t>(1, QUERIES / call.group());
    for (int64_t request = 0; request < call.num_reqs; ++request) {
        const int64_t count = call.query_start[request + 1] - call.query_start[request];
        const int64_t step = count <= FEW_TOKENS ? 1 : most;
        // The last tokens see the most keys: they come first, so that no thread ends with them.
        for (int64_t end = count; end > 0; end -= std::min(step, end)) {
            const int64_t first = std::max<int64_t>(0, end - step);
            for (int64_t head = 0; head < call.num_kv_heads; ++head)
                items.push_back({request, head, first, end - first});
        }
    }
    return items;
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
    const std::vector<Item> items = divide(call);
    raywire::parallel_for(int64_t(items.size()), num_threads, [&](int64_t index) {
        thread_local std::vector<float> memory;
        const Item& item = items[index];
        if (item.num_tokens == 1) return attend_token(call, item, item.first_token, memory);
#ifdef __AVX512BF16__
        if (arithmetic == DOT) return attend_many<DOT>(call, item, memory);
#endif
        attend_many<FLOAT>(call, item, memory);
    });
}
}
