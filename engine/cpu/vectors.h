// Vectors of sixteen numbers in the compilers' portable vector types: AVX-512, AVX2 and NEON from one source.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

// Width of one register. Compilers spill wider vectors to memory: where sums must stay in registers, each vector of sixteen
// is PARTS of these.
#if defined(__AVX512F__)
constexpr int PARTS = 1, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int PARTS = 2, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int PARTS = 4, REGISTERS = 32;
#else
constexpr int PARTS = 4, REGISTERS = 16;  // SSE
#endif
constexpr int PART_LANES = LANES / PARTS;
typedef float FloatPart __attribute__((vector_size(64 / PARTS)));
typedef int32_t IntPart __attribute__((vector_size(64 / PARTS)));
typedef uint32_t WordPart __attribute__((vector_size(64 / PARTS)));
typedef uint16_t HalfPart __attribute__((vector_size(32 / PARTS)));

template <class V> inline V load(const void* from) {  // unaligned
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }

inline Floats all(float x) { return x - Floats{}; }  // -0.0 stays -0.0

// Conversions between integer widths. gcc 12 uses four instructions for one of AVX-512, and converts bytes to words element
// by element unless it goes through 16 bits.
typedef int16_t Shorts __attribute__((vector_size(32)));
#ifdef __AVX512F__
inline Words words_of(Halves x) { return Words(_mm512_cvtepu16_epi32(__m256i(x))); }
inline Halves halves_of(Words x) { return Halves(_mm512_cvtepi32_epi16(__m512i(x))); }
inline Ints widen(Bytes x) { return Ints(_mm512_cvtepi8_epi32(__m128i(x))); }
inline Bytes narrow(Ints x) { return Bytes(_mm512_cvtepi32_epi8(__m512i(x))); }
#else
inline Words words_of(Halves x) { return __builtin_convertvector(x, Words); }
inline Halves halves_of(Words x) { return __builtin_convertvector(x, Halves); }
inline Ints widen(Bytes x) { return __builtin_convertvector(__builtin_convertvector(x, Shorts), Ints); }
inline Bytes narrow(Ints x) { return __builtin_convertvector(__builtin_convertvector(x, Shorts), Bytes); }
#endif

inline float sum(Floats x) {  // fixed order
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

// Halves the vector repeatedly.
template <class V> inline float greatest(V x) {
    constexpr int COUNT = sizeof(V) / sizeof(float);
    typedef decltype(x < x) Whole;
    Whole lane;
    for (int i = 0; i < COUNT; i++) lane[i] = i;
#pragma GCC unroll 4
    for (int step = COUNT / 2; step; step /= 2) {
        const V other = __builtin_shuffle(x, lane ^ step);
        x = other > x ? other : x;
    }
    return x[0];
}

// bfloat16 is the upper half of a float. Rounds to nearest, ties to even; infinities and quiet NaNs are unchanged.
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
inline FloatPart widen_part(const bf16* x) {
    return FloatPart(__builtin_convertvector(load<HalfPart>(x), WordPart) << 16);
}
inline Floats widen(Halves x) { return Floats(words_of(x) << 16); }
inline Halves narrow(Floats f) {
#if defined(__AVX512BF16__)
    return Halves(_mm512_cvtneps_pbh(__m512(f)));  // values below 2^-126 become 0, as in products
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    HalfPart parts[PARTS];
    for (int i = 0; i < PARTS; i++) parts[i] = HalfPart(vcvt_bf16_f32(load<float32x4_t>(reinterpret_cast<const char*>(&f) + 16 * i)));
    return load<Halves>(parts);
#else
    Words bits = Words(f);
    return halves_of((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

inline Floats rounded(Floats f) { return widen(narrow(f)); }

inline void widen_numbers(const bf16* x, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, widen(load<Halves>(x + i)));
    for (; i < count; i++) to[i] = widen(x[i]);
}
inline void narrow_numbers(const float* x, int64_t count, bf16* to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, narrow(load<Floats>(x + i)));
    for (; i < count; i++) to[i] = narrow(x[i]);
}

inline Words pairs_of(Floats first, Floats second) { return words_of(narrow(first)) | words_of(narrow(second)) << 16; }
#if defined(__AVX512BF16__)
inline void store_narrow(void* to, Floats first, Floats second) {
    store(to, _mm512_cvtne2ps_pbh(__m512(second), __m512(first)));
}
#endif

// Multiplies words, each a pair of bf16, with one pair and adds both products.
#if defined(__AVX512BF16__)
#define HAS_PAIRS_OF_BF16
inline FloatPart add_pairs(FloatPart sum, WordPart words, uint32_t pair) {
    return FloatPart(_mm512_dpbf16_ps(__m512(sum), __m512bh(_mm512_set1_epi32(int(pair))), __m512bh(words)));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS_OF_BF16
inline FloatPart add_pairs(FloatPart sum, WordPart words, uint32_t pair) {
    return FloatPart(vbfdotq_f32(float32x4_t(sum), bfloat16x8_t(words), bfloat16x8_t(vdupq_n_u32(pair))));
}
#endif


// 2^x with an error below 3e-6, for x <= 0. Exactly 1 for 0; 0 below the normal range, including -inf; NaN for NaN.
// 2^x = 2^n 2^f with |f| <= 1/2: n by rounding, 2^f by a polynomial of least relative error there.
template <class V> inline V power_of_two(V x) {
    typedef decltype(x < x) Whole;
    const V magic = V{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    V shifted = x + magic;
    V f = x - (shifted - magic);
    V p = V{} + 9.582852945e-3f;
    p = p * f + 5.590642616e-2f;
    p = p * f + 2.402409911e-1f;
    p = p * f + 6.931241751e-1f;
    p = p * f + 1.0f;
    V scaled = V(Whole(p) + (Whole(shifted) << 23));
    return x <= -126.0f ? V{} : scaled;
}

// `about_` below: error within 9e-5 for any x, infinite from 2^128 on; for results rounded to bf16.
#ifdef __AMX_TILE__
// Both in fewer instructions: processors with AMX execute each in half a cycle. Not measured on others.
constexpr int WHOLE_BELOW = 9;  // _mm512_reduce_ps: x minus floor(x), which scalef puts into the exponent

inline Floats scaled(Floats fraction, Floats x) {
    const auto is_normal = _mm512_cmp_ps_mask(__m512(x), _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
    return Floats(_mm512_maskz_scalef_ps(is_normal, __m512(fraction), __m512(x)));
}
template <> inline Floats power_of_two(Floats x) {
    const Floats f = Floats(_mm512_reduce_ps(__m512(x), WHOLE_BELOW));
    Floats p = all(1.3426682911813259e-2f);
    p = p * f + 5.2242476493120193e-2f;
    p = p * f + 2.41280198097229e-1f;
    p = p * f + 6.930448412895203e-1f;
    return scaled(p * f + 1.0f, x);
}
inline Floats about_power_of_two(Floats x) {
    const Floats f = Floats(_mm512_reduce_ps(__m512(x), WHOLE_BELOW));
    Floats p = all(7.706703990697861e-2f);
    p = p * f + 2.2764499485492706e-1f;
    p = p * f + 6.951167583465576e-1f;
    return scaled(p * f + 1.0f, x);
}
#else
inline Floats about_power_of_two(Floats x) {
    const Floats p = power_of_two(x);
    return x >= 128.0f ? all(std::numeric_limits<float>::infinity()) : p;
}
#endif

// Error below 2e-6.
template <class V> inline V hyperbolic_tangent(V x) {
    const V e = power_of_two((x > 0.0f ? -x : x) * 2.88539008f), size = (1.0f - e) / (1.0f + e);
    return x > 0.0f ? size : -size;
}

// Returns 1 / x within 2 ulp, for normal numbers.
inline Floats reciprocal(Floats x) {
#ifdef __AVX512F__
    const Floats guess = Floats(_mm512_rcp14_ps(__m512(x)));
    return guess * (2.0f - x * guess);
#else
    return 1.0f / x;
#endif
}

// One round of a transposition: swaps the off-diagonal quadrants of each 2 STEP by 2 STEP square.
template <int STEP, int... J> inline void swap_corners(FloatPart m[PART_LANES], std::integer_sequence<int, J...>) {
#pragma GCC unroll 16
    for (int i = 0; i < PART_LANES; i++) {
        if (i & STEP) continue;
        const FloatPart a = m[i], b = m[i + STEP];
        m[i] = __builtin_shufflevector(a, b, (J & STEP ? J - STEP + PART_LANES : J)...);
        m[i + STEP] = __builtin_shufflevector(a, b, (J & STEP ? J + PART_LANES : J + STEP)...);
    }
}

// Transposes a square of PART_LANES by PART_LANES.
template <int STEP = 1> inline void transpose(FloatPart m[PART_LANES]) {
    swap_corners<STEP>(m, std::make_integer_sequence<int, PART_LANES>());
    if constexpr (2 * STEP < PART_LANES) transpose<2 * STEP>(m);
}

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace
