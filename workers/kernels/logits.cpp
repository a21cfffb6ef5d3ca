// What sampling needs of rows of logits, by groups of 128: the largest logit of each, with the best
// token of the row; and the weight of each, which is the sum of e^((logit - best) / temperature).
//
// Either reads every logit once, 4 bytes each: for two or three operations, bound by memory, or by
// the cache where the head has just written them; for about twenty, bound by them. Threads take
// stretches of a row, and nothing but the groups' numbers is written. For the best token, the largest
// of the groups' maxima says in which of them it is, and only that one is read again.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "bf16.h"
#include "threads.h"

namespace {

constexpr int64_t GROUP = 128;             // as in token_choice.py
constexpr int64_t STRETCH = 64 * GROUP;    // of a row, a thread's item
constexpr int64_t STREAMS = 32 / LANES;    // vectors of maxima, so that none waits for another

// Comparisons leave NaN out.
float most_of(const float* x, int64_t count) {
    Floats most[STREAMS];
    for (Floats& m : most) m = all(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + STREAMS * LANES <= count; i += STREAMS * LANES)
        for (int64_t s = 0; s < STREAMS; ++s) {
            const Floats v = load<Floats>(x + i + s * LANES);
            most[s] = v > most[s] ? v : most[s];
        }
    for (int64_t s = 1; s < STREAMS; ++s) most[0] = most[s] > most[0] ? most[s] : most[0];
    float found = largest(most[0]);
    for (; i < count; ++i) found = std::max(found, x[i]);
    return found;
}

// Masked and very unlikely tokens weigh nothing. A group's sum depends on nothing but the group.
double weight_of(const float* x, int64_t count, float best, float scale) {
    const auto weigh = [&](Floats v) {
        const Floats power = (v - best) * scale;
        return power > -87.0f ? exp(power) : Floats{};
    };
    Floats total = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) total += weigh(load<Floats>(x + i));
    if (i < count) {
        Floats rest = all(-std::numeric_limits<float>::infinity());
        memcpy(&rest, x + i, sizeof(float) * (count - i));
        total += weigh(rest);
    }
    return sum(total);
}

template <typename Visit>
void for_each_stretch(int64_t num_rows, int64_t vocab_size, int num_threads, const Visit& visit) {
    const int64_t num_stretches = (vocab_size + STRETCH - 1) / STRETCH;
    raywire::parallel_for(num_rows * num_stretches, num_threads, [&](int64_t item) {
        const int64_t begin = item % num_stretches * STRETCH;
        const int64_t end = std::min(vocab_size, begin + STRETCH);
        for (int64_t first = begin; first < end; first += GROUP)
            visit(item / num_stretches, first, std::min(GROUP, end - first));
    });
}

}  // namespace

extern "C" {

// Write the maxima of all groups, `[num_rows, groups]`, of which the last may be shorter, and the best
// token of each row: among equals that of the lowest id.
void raywire_best_tokens(
    const float* logits, float* maxima, int64_t* tokens, int64_t num_rows, int64_t vocab_size,
    int num_threads) {
    const int64_t num_groups = (vocab_size + GROUP - 1) / GROUP;
    for_each_stretch(
        num_rows, vocab_size, num_threads, [&](int64_t row, int64_t first, int64_t count) {
            maxima[row * num_groups + first / GROUP] =
                most_of(logits + row * vocab_size + first, count);
        });
    for (int64_t row = 0; row < num_rows; ++row) {
        const float* const of_groups = maxima + row * num_groups;
        const int64_t group = std::max_element(of_groups, of_groups + num_groups) - of_groups;
        const float* const first = logits + row * vocab_size + group * GROUP;
        const float* const last = first + std::min(GROUP, vocab_size - group * GROUP);
        const float* const best = std::find(first, last, of_groups[group]);
        tokens[row] = group * GROUP + (best == last ? 0 : best - first);
    }
}

// Write the weights of all groups of some rows, `[num_rows, groups]`.
void raywire_group_weights(
    const float* logits, const int64_t* rows, const float* best, const float* scale,
    double* weights, int64_t num_rows, int64_t vocab_size, int num_threads) {
    const int64_t num_groups = (vocab_size + GROUP - 1) / GROUP;
    for_each_stretch(
        num_rows, vocab_size, num_threads, [&](int64_t i, int64_t first, int64_t count) {
            const float* const group = logits + rows[i] * vocab_size + first;
            weights[i * num_groups + first / GROUP] = weight_of(group, count, best[i], scale[i]);
        });
}
}
