// Masks of tokens, laid over rows of logits: what is not allowed becomes minus infinity.
//
// A mask has a bit for each token, so reading it costs a thirty-second of what reading the logits
// would. A word of 32 tokens that are all allowed is passed over: inside a text that is nearly all of
// them, and where little is allowed, the rest is filled without being read. Threads take stretches.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "threads.h"

namespace {

constexpr int64_t STRETCH = 8192;  // logits of a row, a thread's item; whole words

void mask(float* x, int64_t count, const uint32_t* words) {
    constexpr float BANNED = -std::numeric_limits<float>::infinity();
    for (int64_t first = 0; first < count; first += 32) {
        const uint32_t allowed = words[first / 32];
        const int64_t width = std::min<int64_t>(32, count - first);
        if (allowed == ~0u) continue;
        if (allowed == 0) {
            std::fill_n(x + first, width, BANNED);
            continue;
        }
        for (int64_t i = 0; i < width; ++i)
            if (!(allowed >> i & 1)) x[first + i] = BANNED;
    }
}

}  // namespace

extern "C" {

// Lay masks, `[num_masks, ceil(vocab_size / 32)]`, over the rows of logits that `rows` names.
void raywire_mask_logits(
    float* logits, const int64_t* rows, const uint32_t* masks, int64_t num_masks, int64_t vocab_size,
    int num_threads) {
    const int64_t num_words = (vocab_size + 31) / 32;
    const int64_t num_stretches = (vocab_size + STRETCH - 1) / STRETCH;
    raywire::parallel_for(num_masks * num_stretches, num_threads, [&](int64_t item) {
        const int64_t place = item / num_stretches;
        const int64_t begin = item % num_stretches * STRETCH;
        mask(
            logits + rows[place] * vocab_size + begin, std::min(STRETCH, vocab_size - begin),
            masks + place * num_words + begin / 32);
    });
}
}
