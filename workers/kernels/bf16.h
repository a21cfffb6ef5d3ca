// Vectors and the bfloat16 that goes in and out of them, for all kernels of this folder.
//
// Written with the vector extensions of GCC and Clang, for any processor: a vector is as wide as its
// registers, for what is wider is taken apart badly. Intrinsics appear only where an instruction has
// no other spelling. Exported functions are plain C, called through ctypes (`native.py`).
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;  // NEON
#endif

using bf16 = uint16_t;  // the upper half of a float
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));
using Words = uint32_t __attribute__((vector_size(4 * LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));

template <typename To, typename From>
static inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline Floats all(float x) { return x - Floats{}; }  // exactly, also of -0

template <typename Vector>
static inline Vector load(const void* from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

// By value: an array whose address is taken, for a copy of the whole, would not stay in registers.
static inline void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }

// GCC 12 takes these two conversions apart for eight lanes.
static inline Words widen(Halves x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return bits<Words>(_mm256_cvtepu16_epi32(bits<__m128i>(x)));
#else
    return __builtin_convertvector(x, Words);
#endif
}

static inline Halves narrow(Words x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i packed = _mm256_packus_epi32(bits<__m256i>(x), bits<__m256i>(x));
    return bits<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
    return __builtin_convertvector(x, Halves);
#endif
}

static inline float to_float(bf16 x) { return bits<float>(uint32_t(x) << 16); }

static inline Floats load_bf16(const bf16* from) {
    return bits<Floats>(widen(load<Halves>(from)) << 16);
}

// Round to nearest, ties to even, as torch does. A NaN may become an infinity.
static inline bf16 to_bf16(float x) {
    uint32_t word = bits<uint32_t>(x);
    return bf16((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

static inline void store_bf16(bf16* to, Floats x) {
#ifdef __AVX512BF16__
    const __m256bh half = _mm512_cvtneps_pbh(bits<__m512>(x));  // below 2^-126: zero
#else
    Words word = bits<Words>(x);
    const Halves half = narrow((word + 0x7fff + ((word >> 16) & 1)) >> 16);
#endif
    memcpy(to, &half, sizeof half);
}

static inline Floats round_bf16(Floats x) {
    Words word = bits<Words>(x);
    return bits<Floats>((word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000u);
}

template <typename Combine>
static inline float reduce(Floats x, const Combine& combine) {
    using Four = float __attribute__((vector_size(16)));
    Four parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
    for (int half = LANES / 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] = combine(parts[i], parts[i + half]);
    const Four four = parts[0];
    return combine(combine(four[0], four[2]), combine(four[1], four[3]));
}

static inline float sum(Floats x) {
    return reduce(x, [](auto a, auto b) { return a + b; });
}

static inline float largest(Floats x) {
    return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x to about 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
static inline Floats exp(Floats x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 88.0f ? all(88.0f) : x;
    const Floats magic = all(12582912.0f);  // adding 1.5 · 2^23 rounds to an integer
    Floats n = (x * 1.44269504f + magic) - magic;
    Floats r = x - n * 0.693145752f - n * 1.42860677e-6f;
    Floats p = all(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * bits<Floats>(power);
}
