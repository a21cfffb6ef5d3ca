// Attention of single tokens (decode) over paged keys and values.
//
// Traffic. Each key and value of the context is read once, 4 · head_dim bytes, and used for all heads
// of its group: 2 · 2 · head_dim · group operations. For a group of 4 that is 4 operations a byte,
// which a core manages at about the rate at which memory delivers, and only if nothing is wasted:
//
//     scores    up to 16 sums (4 heads x 4 keys) stay in registers over the whole head; then all of
//               them are added up at once (`sum_each`)
//     values    the sums of 4 heads x 64 columns stay in registers over a tile of keys
//     pages     a tile's keys are fetched while the tile before is computed, its values while its
//               scores are: pages lie anywhere, and the processor does not guess where the next one is
//
// Two kinds of arithmetic, as in `tiles.h`. The dot takes pairs of bfloat16: of a key, neighbouring
// elements as they lie; of the values, the same column of two keys, which unpacking brings together.
// The weights of these two keys are rounded to bfloat16; all sums are float.
//
// Threads. A token's keys are cut into stretches of STRETCH, for a long context of few requests is
// work for all threads too. Each stretch gives a maximum, a sum of weights and a weighted sum of
// values; `join` puts them together as one tile more would be. Where it is cut depends on the token
// alone: a request's result does not depend on its neighbours or the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "bf16.h"
#include "memory.h"
#include "tiles.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int FEW_KEYS = 32;      // a tile: its keys and values fit into the L1
constexpr int64_t STRETCH = 512;  // keys
constexpr int64_t COLUMNS = 2 * LANES;  // of values, a unit of work: two vectors of sums
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int MOST = 8;  // vectors of sums: of 16 registers
#else
constexpr int MOST = 16;  // of 32
#endif

// The keys [first_key, end_key) of one token and the heads of one group.
struct Stretch {
    int64_t request, kv_head, token;  // token of the whole batch
    int64_t first_key, end_key;
    bool is_first;
    int64_t part;  // where its result goes; -1: it is the only one, and writes the output
};

// A token whose parts are to be joined.
struct Cut {
    int64_t kv_head, token, first_part, num_parts;
};

// A part: for each head of the group the largest score, the sum of weights, and the weighted values.
inline int64_t part_size(const Call& call) { return call.group() * (2 + call.size); }

struct Decodes {
    std::vector<Stretch> stretches;
    std::vector<Cut> cuts;
    int64_t num_parts = 0;

    void add(const Call& call, int64_t request, int64_t query, int64_t place) {
        const int64_t token = call.query_start[request] + query;
        const int64_t first = std::max<int64_t>(0, first_key(call, place, 0)), end = place + 1;
        const int64_t count = (end - first + STRETCH - 1) / STRETCH;
        for (int64_t head = 0; head < call.num_kv_heads; ++head) {
            if (count > 1) cuts.push_back({head, token, num_parts, count});
            for (int64_t key = first; key < end; key += STRETCH)
                stretches.push_back(
                    {request, head, token, key, std::min(end, key + STRETCH), key == first,
                     count > 1 ? num_parts++ : -1});
        }
    }

    // For the results of all parts, kept between calls.
    float* memory(const Call& call) const {
        thread_local Memory parts;
        return parts.of<float>(num_parts * part_size(call));
    }
};

// The halves of each of two vectors added, and the results interleaved.
inline Floats add_halves(Floats a, Floats b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(
               a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
           __builtin_shufflevector(
               a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11) +
           __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// The sum of each vector, LANES at a time: for 16 vectors 15 additions instead of 64.
template <int N>
inline void sum_each(const Floats (&sums)[N], float* to) {
    static_assert(N % LANES == 0);
    for (int first = 0; first < N; first += LANES) {
        Floats v[LANES];
        for (int i = 0; i < LANES; ++i) v[i] = sums[first + i];
        for (int half = LANES / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) v[i] = add_halves(v[i], v[i + half]);
        store(to + first, v[0]);
    }
}

template <int ARITHMETIC>
struct Unit;

template <>
struct Unit<FLOAT> {
    static constexpr int64_t STEP = LANES;  // elements of a head at a time
    static constexpr int KEYS = 1;          // whose values are added at a time
    using Weight = float;
    using Query = float;

    static void queries(const bf16* from, int64_t count, float* to) {
        for (int64_t i = 0; i < count; i += LANES) store(to + i, load_bf16(from + i));
    }
    static Floats load(const bf16* row, int64_t, int64_t) { return load_bf16(row); }
    static Floats load(const float* query, int64_t, int64_t) { return ::load<Floats>(query); }
    static Floats multiply_add(Floats x, Floats y, Floats sum) { return x * y + sum; }
    static Floats spread(const float* weight) { return all(*weight); }
    static void columns(const bf16* const* values, int64_t d, int64_t size, Floats (&to)[2]) {
        to[0] = load_bf16(values[0] + d);
        to[1] = d + LANES < size ? load_bf16(values[0] + d + LANES) : Floats{};
    }
    static void weights(const float* from, float* to) { memcpy(to, from, LANES * sizeof(float)); }
    static void in_order(Floats (&)[2]) {}
};

#ifdef __AVX512BF16__
template <>
struct Unit<DOT> {
    static constexpr int64_t STEP = 2 * LANES;
    static constexpr int KEYS = 2;
    using Weight = bf16;
    using Query = bf16;

    static void queries(const bf16* from, int64_t count, bf16* to) {
        memcpy(to, from, count * sizeof(bf16));
    }

    // 32 elements; behind the end of the head, zeros.
    static __m512bh load(const bf16* row, int64_t d, int64_t size) {
        return (__m512bh)(d + STEP <= size ? _mm512_loadu_si512(row)
                                           : _mm512_maskz_loadu_epi16(0xffff, row));
    }
    static Floats multiply_add(__m512bh x, __m512bh y, Floats sum) {
        return bits<Floats>(_mm512_dpbf16_ps(bits<__m512>(sum), x, y));
    }
    static __m512bh spread(const bf16* pair) {
        return (__m512bh)_mm512_set1_epi32(::load<int32_t>(pair));
    }
    // Columns 0-3, 8-11, 16-19, 24-27 go to the first, the others to the second.
    static void columns(const bf16* const* values, int64_t d, int64_t size, __m512bh (&to)[2]) {
        const __m512i a = (__m512i)load(values[0] + d, d, size);
        const __m512i b = (__m512i)load(values[1] + d, d, size);
        to[0] = (__m512bh)_mm512_unpacklo_epi16(a, b);
        to[1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    static void weights(const float* from, bf16* to) { store_bf16(to, ::load<Floats>(from)); }
    static void in_order(Floats (&sums)[2]) {
        const Floats a = sums[0], b = sums[1];
        sums[0] = __builtin_shufflevector(
            a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        sums[1] = __builtin_shufflevector(
            a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
};
#endif

inline void fetch(const bf16* row, int64_t size) {
    for (int64_t d = 0; d < size; d += 32) __builtin_prefetch(row + d);
}

// A tile of FEW_KEYS rows; behind the last key, the last once more.
struct KeyTile {
    const bf16 *keys[FEW_KEYS], *values[FEW_KEYS];
    int64_t count;

    // Find the rows from key `first`, and fetch the keys.
    void find(const Call& call, const Stretch& stretch, int64_t first) {
        count = std::min<int64_t>(FEW_KEYS, stretch.end_key - first);
        for (int64_t k = 0; k < FEW_KEYS; ++k) {
            const int64_t slot =
                call.slot(stretch.request, first + std::min(k, count - 1), stretch.kv_head);
            keys[k] = call.key + slot;
            values[k] = call.value + slot;
            if (k < count) fetch(keys[k], call.size);
        }
    }
};

// Scores of H heads, FEW_KEYS apart.
template <int ARITHMETIC, int H>
void score(
    const typename Unit<ARITHMETIC>::Query* query, const KeyTile& tile, int64_t size,
    float* scores) {
    using Unit = ::Unit<ARITHMETIC>;
    constexpr int K = MOST / H;
    for (int64_t k = 0; k < tile.count; k += K) {
        Floats sums[MOST] = {};
        for (int j = 0; j < K; ++j) fetch(tile.values[k + j], size);
        for (int64_t d = 0; d < size; d += Unit::STEP) {
            decltype(Unit::load(query, d, size)) q[H];
            for (int h = 0; h < H; ++h) q[h] = Unit::load(query + h * size + d, d, size);
            for (int j = 0; j < K; ++j) {
                const auto key = Unit::load(tile.keys[k + j] + d, d, size);
                for (int h = 0; h < H; ++h)
                    sums[h * K + j] = Unit::multiply_add(q[h], key, sums[h * K + j]);
            }
        }
        float found[MOST];
        sum_each(sums, found);
        for (int h = 0; h < H; ++h)
            memcpy(scores + h * FEW_KEYS + k, found + h * K, K * sizeof(float));
    }
}

// sums = sums · factor + weights v for H heads and C units of columns, from d.
template <int ARITHMETIC, int H, int C>
void add_values(
    const typename Unit<ARITHMETIC>::Weight* weights, const float* factors, const KeyTile& tile,
    int64_t d, int64_t size, int64_t padded, float* sums) {
    using Unit = ::Unit<ARITHMETIC>;
    Floats total[H][C][2];
    const auto place = [&](int h, int c, int i) {
        return sums + h * padded + d + c * COLUMNS + i * LANES;
    };
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c)
            for (int i = 0; i < 2; ++i)
                total[h][c][i] = load<Floats>(place(h, c, i)) * factors[h];
    for (int64_t k = 0; k < tile.count; k += Unit::KEYS) {
        decltype(Unit::spread(weights)) v[C][2];
        for (int c = 0; c < C; ++c) Unit::columns(tile.values + k, d + c * COLUMNS, size, v[c]);
        for (int h = 0; h < H; ++h) {
            const auto weight = Unit::spread(weights + h * FEW_KEYS + k);
            for (int c = 0; c < C; ++c)
                for (int i = 0; i < 2; ++i)
                    total[h][c][i] = Unit::multiply_add(v[c][i], weight, total[h][c][i]);
        }
    }
    for (int h = 0; h < H; ++h)
        for (int c = 0; c < C; ++c)
            for (int i = 0; i < 2; ++i) store(place(h, c, i), total[h][c][i]);
}

template <int ARITHMETIC, int H>
void attend_tile(
    const Call& call, const typename Unit<ARITHMETIC>::Query* query, const KeyTile& tile,
    int64_t padded, Row* rows, float* sums) {
    float scores[H * FEW_KEYS], factors[H];
    typename Unit<ARITHMETIC>::Weight weights[H * FEW_KEYS];
    score<ARITHMETIC, H>(query, tile, call.size, scores);
    for (int h = 0; h < H; ++h)
        factors[h] = soften<FEW_KEYS>(call, scores + h * FEW_KEYS, 0, tile.count, rows[h]);
    for (int i = 0; i < H * FEW_KEYS; i += LANES)
        Unit<ARITHMETIC>::weights(scores + i, weights + i);
    constexpr int C = std::max(1, MOST / H / 2);
    int64_t d = 0;
    for (; d + C * COLUMNS <= padded; d += C * COLUMNS)
        add_values<ARITHMETIC, H, C>(weights, factors, tile, d, call.size, padded, sums);
    for (; d < padded; d += COLUMNS)
        add_values<ARITHMETIC, H, 1>(weights, factors, tile, d, call.size, padded, sums);
}

// One token, a stretch of its keys, and the heads of a group: into the output or a part.
template <int ARITHMETIC>
void attend_stretch(
    const Call& call, const Stretch& stretch, Memory& memory, float* parts) {
    const int64_t group = call.group(), first_head = stretch.kv_head * group;
    const int64_t padded = (call.size + COLUMNS - 1) / COLUMNS * COLUMNS;
    float* const sums = memory.of<float>(group * (padded + call.size));
    std::fill(sums, sums + group * (padded + call.size), 0.0f);
    auto* const query = reinterpret_cast<typename Unit<ARITHMETIC>::Query*>(sums + group * padded);
    Unit<ARITHMETIC>::queries(
        call.query + stretch.token * call.query_stride + first_head * call.size,
        group * call.size, query);
    std::vector<Row> rows(group);
    for (int64_t g = 0; g < group; ++g)
        rows[g] = stretch.is_first ? start(call, first_head + g) : Row{NEVER, 0.0f};

    KeyTile tile, next;
    next.find(call, stretch, stretch.first_key);
    for (int64_t first = stretch.first_key; first < stretch.end_key; first += FEW_KEYS) {
        tile = next;
        if (first + FEW_KEYS < stretch.end_key) next.find(call, stretch, first + FEW_KEYS);
        const auto attend = [&]<int H>(int64_t g) {
            attend_tile<ARITHMETIC, H>(
                call, query + g * call.size, tile, padded, &rows[g], sums + g * padded);
        };
        int64_t g = 0;
        for (; g + 4 <= group; g += 4) attend.template operator()<4>(g);
        for (; g + 2 <= group; g += 2) attend.template operator()<2>(g);
        if (g < group) attend.template operator()<1>(g);
    }

    for (int64_t d = 0; d < group * padded; d += COLUMNS) {
        Floats pair[2];
        memcpy(pair, sums + d, sizeof pair);
        Unit<ARITHMETIC>::in_order(pair);
        memcpy(sums + d, pair, sizeof pair);
    }
    float* part = parts + stretch.part * part_size(call);
    for (int64_t g = 0; g < group; ++g, part += 2 + call.size) {
        if (stretch.part < 0) {
            const int64_t head = stretch.token * call.num_heads + first_head + g;
            finish(call, sums + g * padded, rows[g], call.out + head * call.size);
        } else {
            part[0] = rows[g].most;
            part[1] = rows[g].total;
            memcpy(part + 2, sums + g * padded, call.size * sizeof(float));
        }
    }
}

// Put the parts of a token and head g of its group together.
void join(const Call& call, const Cut& cut, int64_t g, const float* parts) {
    const float* const first =
        parts + cut.first_part * part_size(call) + g * (2 + call.size);
    const auto part = [&](int64_t p) { return first + p * part_size(call); };
    Row row{NEVER, 0.0f};
    for (int64_t p = 0; p < cut.num_parts; ++p) row.most = std::max(row.most, part(p)[0]);
    std::vector<float> sums(call.size);
    for (int64_t p = 0; p < cut.num_parts; ++p) {
        const float factor = std::exp(part(p)[0] - row.most);
        row.total += part(p)[1] * factor;
        for (int64_t d = 0; d < call.size; ++d) sums[d] += part(p)[2 + d] * factor;
    }
    const int64_t head = cut.token * call.num_heads + cut.kv_head * call.group() + g;
    finish(call, sums.data(), row, call.out + head * call.size);
}

}  // namespace
