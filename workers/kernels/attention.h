// What decode (`decode.h`) and prefill (`attention.cpp`) share: the call, and the online softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "bf16.h"

namespace {

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

struct Row {
    float most, total;
};

inline Row start(const Call& call, int64_t head) {
    // A sink is a key without a value.
    if (call.sinks) return {call.sinks[head], 1.0f};
    return {NEVER, 0.0f};
}

inline Floats capped(Floats x, float cap) {
    return cap * (1.0f - 2.0f / (1.0f + exp(x * (2.0f / cap))));  // cap · tanh(x / cap)
}

// The numbers of LANES keys, from `first` on.
inline Ints numbered(int32_t first) {
    Ints numbers;
    for (int i = 0; i < LANES; ++i) numbers[i] = first + i;
    return numbers;
}

// Scores of one row and a tile of keys to weights: hide keys outside [first, last), update the row,
// and return what the values summed so far are to be multiplied with.
template <int TILE>
inline float soften(const Call& call, float* scores, int64_t first, int64_t last, Row& row) {
    constexpr int VECTORS = TILE / LANES;
    const bool hides = first > 0 || last < TILE;
    const auto from = int32_t(std::clamp<int64_t>(first, 0, TILE));
    const auto to = int32_t(std::clamp<int64_t>(last, 0, TILE));
    Floats s[VECTORS], most = all(NEVER);
    for (int v = 0; v < VECTORS; ++v) {
        s[v] = load<Floats>(scores + v * LANES) * call.scale;
        if (call.softcap != 0) s[v] = capped(s[v], call.softcap);
        if (hides) {
            const Ints key = numbered(v * LANES);
            s[v] = key < from ? all(NEVER) : s[v];
            s[v] = key < to ? s[v] : all(NEVER);
        }
        most = s[v] > most ? s[v] : most;
    }
    const float new_most = std::max(row.most, largest(most));
    if (new_most == NEVER) {
        std::fill(scores, scores + TILE, 0.0f);
        return 1.0f;
    }
    float factor = 1.0f;
    if (row.most != new_most) factor = row.most == NEVER ? 0.0f : std::exp(row.most - new_most);
    Floats total{};
    for (int v = 0; v < VECTORS; ++v) {
        const Floats p = s[v] == NEVER ? Floats{} : exp(s[v] - new_most);
        store(scores + v * LANES, p);
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

inline void finish(const Call& call, const float* sums, const Row& row, bf16* out) {
    const float factor = 1.0f / row.total;
    for (int64_t d = 0; d < call.size; d += LANES)
        store_bf16(out + d, load<Floats>(sums + d) * factor);
}

}  // namespace
