// Sixteen numbers at a time, in the compilers' portable vector types: AVX-512, AVX2 and NEON from one source.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

// What one register holds. Compilers keep wider vectors in memory: where sums must stay in registers, each vector of
// sixteen is PARTS of these.
#if defined(__AVX512F__)
constexpr int PARTS = 1, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int PARTS = 2, REGISTERS = 16;
#else
constexpr int PARTS = 4, REGISTERS = 32;  // NEON
#endif
constexpr int PART_LANES = LANES / PARTS;
typedef float FloatPart __attribute__((vector_size(64 / PARTS)));
typedef int32_t IntPart __attribute__((vector_size(64 / PARTS)));
typedef uint32_t WordPart __attribute__((vector_size(64 / PARTS)));

template <class V> inline V load(const void* from) {  // no alignment needed
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }

inline Floats all(float x) { return x - Floats{}; }  // -0.0 stays -0.0

inline float sum(Floats x) {  // always in this order
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
inline float greatest(Floats x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// bfloat16 is the upper half of a float. Rounded to nearest, ties to even; infinities and quiet NaNs stay what they are.
typedef uint16_t bf16;
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline bf16 narrow(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float rounded(float f) { return widen(narrow(f)); }
inline Floats widen(Halves x) { return Floats(__builtin_convertvector(x, Words) << 16); }
inline Halves narrow(Floats f) {
    Words bits = Words(f);
    return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
}

// By way of 16 bits: in one step gcc 12 goes number by number, and takes no notice of AVX-512's instruction for it.
inline Ints widen(Bytes x) {
#ifdef __AVX512F__
    return Ints(_mm512_cvtepi8_epi32(__m128i(x)));
#else
    typedef int16_t Shorts __attribute__((vector_size(32)));
    return __builtin_convertvector(__builtin_convertvector(x, Shorts), Ints);
#endif
}
inline Bytes narrow(Ints x) {
    typedef int16_t Shorts __attribute__((vector_size(32)));
    return __builtin_convertvector(__builtin_convertvector(x, Shorts), Bytes);
}

// e^x within 2 ulp for x <= 0; exactly 0 where it would leave the normal range, so for -inf.
// e^x = 2^n e^r with |r| <= ln(2) / 2: n by rounding, e^r by its Taylor polynomial of degree 6.
inline Floats exponential(Floats x) {
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    Floats shifted = x * 1.44269504f + magic;
    Floats n = shifted - magic;
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = all(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Floats scaled = Floats(Ints(p) + (Ints(shifted) << 23));
    return x > -87.0f ? scaled : Floats{};
}

// One round of a transposition: what lies off the diagonal in each square of 2 STEP by 2 STEP changes places.
template <int STEP> inline void swap_corners(Floats m[LANES]) {
#define LOW(j) ((j) & STEP ? (j) - STEP + LANES : (j))  // which of the two rows' 32 numbers
#define HIGH(j) ((j) & STEP ? (j) + LANES : (j) + STEP)
#define LANES_OF(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
    const Ints low = {LANES_OF(LOW)}, high = {LANES_OF(HIGH)};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        const Floats a = m[i], b = m[i + STEP];
        m[i] = __builtin_shuffle(a, b, low);
        m[i + STEP] = __builtin_shuffle(a, b, high);
    }
#undef LOW
#undef HIGH
#undef LANES_OF
}

// Rows become columns.
inline void transpose(Floats m[LANES]) {
    swap_corners<1>(m);
    swap_corners<2>(m);
    swap_corners<4>(m);
    swap_corners<8>(m);
}

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace
