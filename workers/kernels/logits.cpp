// What sampling needs of rows of logits. By groups of 128: the largest logit of each, with the best
// token of the row; and the weight of each, which is the sum of e^((logit - best) / temperature).
// And where a cut goes deep into a row, all tokens above it, sorted:
//
//     distance from the best    0     1/64    2/64    3/64               64
//     tokens                    |  3    |   0   |  17   |  …       |  902  |  never looked at
//                                                       ^ the cut; the bins before it are filled
//                                                         from the row and sorted one by one
//
// Either reads every logit once, 4 bytes each: for two or three operations, bound by memory, or by
// the cache where the head has just written them; for about twenty, bound by them. Threads take
// stretches of a row, and nothing but the groups' numbers is written. For the best token, the largest
// of the groups' maxima says in which of them it is, and only that one is read again.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

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

constexpr int64_t BINS = 4096, BINS_PER_UNIT = 64;  // of distances, in units of the temperature

// The same for equal logits, and never less for a lower one, however it is rounded.
Ints bin_of(Floats x, float best, float scale) {
    const Floats place = (best - x) * (scale * BINS_PER_UNIT);
    return __builtin_convertvector(place < float(BINS) ? place : all(float(BINS)), Ints);
}

// Visit all tokens of a row, a vector of bins at a time. What is no number is far away.
template <typename Visit>
void for_each_bin(const float* x, int64_t count, float best, float scale, const Visit& visit) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) visit(bin_of(load<Floats>(x + i), best, scale), i, LANES);
    if (i < count) {
        Floats rest = {};
        memcpy(&rest, x + i, sizeof(float) * (count - i));
        visit(bin_of(rest, best, scale), i, int(count - i));
    }
}

// The first bin up to which tokens weigh `weight`, or are `count`, or reach `farthest`; BINS if none.
int64_t last_bin(const uint32_t* sizes, double weight, int64_t count, double farthest) {
    double sum = 0.0;
    int64_t seen = 0;
    for (int64_t bin = 0; bin < BINS; ++bin) {
        seen += sizes[bin];
        sum += sizes[bin] * std::exp(-double(bin + 1) / BINS_PER_UNIT);  // at the least
        if (sum >= weight || seen >= count || bin >= farthest * BINS_PER_UNIT + 1) return bin;
    }
    return BINS;
}

// Integers that order like (logit, -token), the best first.
uint64_t key_of(float logit, int64_t token) {
    const uint32_t word = bits<uint32_t>(logit + 0.0f);  // -0 equals 0
    const uint32_t rising = word >> 31 ? ~word : word | 1u << 31;
    return uint64_t(~rising) << 32 | uint32_t(token);
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

// Find the bin down to which some rows have to be looked at, BINS if that is too far; with it, how
// many tokens each bin has, `[num_rows, BINS]`, and all of these bins together.
void raywire_find_cuts(
    const float* logits, const int64_t* rows, const float* best, const float* scale,
    const double* weights, const int64_t* counts, const double* farthest, uint32_t* bin_sizes,
    int64_t* cuts, int64_t* sizes, int64_t num_rows, int64_t vocab_size, int num_threads) {
    raywire::parallel_for(num_rows, num_threads, [&](int64_t i) {
        uint32_t found[2][BINS + 1] = {};  // two, so that equal neighbours do not wait for each other
        for_each_bin(
            logits + rows[i] * vocab_size, vocab_size, best[i], scale[i],
            [&](Ints bin, int64_t, int count) {
                for (int lane = 0; lane < count; ++lane) ++found[lane & 1][bin[lane]];
            });
        uint32_t* const of_bins = bin_sizes + i * BINS;
        for (int64_t bin = 0; bin < BINS; ++bin) of_bins[bin] = found[0][bin] + found[1][bin];
        cuts[i] = last_bin(of_bins, weights[i], counts[i], farthest[i]);
        sizes[i] = cuts[i] == BINS ? 0 : std::accumulate(of_bins, of_bins + cuts[i] + 1, int64_t{0});
    });
}

// Write the tokens of some rows down to their cuts, from `begins[i]` on: the best first, and the
// lowest id first among equals.
void raywire_tokens_above(
    const float* logits, const int64_t* rows, const float* best, const float* scale,
    const uint32_t* bin_sizes, const int64_t* cuts, const int64_t* begins, float* values,
    int64_t* tokens, int64_t num_rows, int64_t vocab_size, int num_threads) {
    raywire::parallel_for(num_rows, num_threads, [&](int64_t i) {
        if (cuts[i] == BINS) return;
        const float* const row = logits + rows[i] * vocab_size;
        const uint32_t* const of_bins = bin_sizes + i * BINS;
        int64_t ends[BINS];
        std::exclusive_scan(of_bins, of_bins + cuts[i] + 1, ends, begins[i]);
        uint64_t* const keys = reinterpret_cast<uint64_t*>(tokens);
        for_each_bin(row, vocab_size, best[i], scale[i], [&](Ints bin, int64_t first, int count) {
            for (int lane = 0; lane < count; ++lane)
                if (bin[lane] <= cuts[i])
                    keys[ends[bin[lane]]++] = key_of(row[first + lane], first + lane);
        });
        for (int64_t bin = 0; bin <= cuts[i]; ++bin)
            std::sort(keys + ends[bin] - of_bins[bin], keys + ends[bin]);
        for (int64_t at = begins[i]; at < ends[cuts[i]]; ++at) {
            tokens[at] = uint32_t(keys[at]);
            values[at] = row[tokens[at]];
        }
    });
}
}
