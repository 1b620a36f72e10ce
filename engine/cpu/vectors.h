// Sixteen numbers at a time, in the compilers' portable vector types: AVX-512, AVX2 and NEON from one source.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

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

// Rows become columns: four rounds, each of which swaps one bit of the row's number with one of the column's.
inline void transpose(Floats m[LANES]) {
    for (int step = 1; step < LANES; step *= 2) {
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            Floats a = m[i], b = m[i + step];
            Ints low, high;  // which of (a, b)'s 32 numbers
            for (int j = 0; j < LANES; j++) {
                low[j] = j & step ? j - step + LANES : j;
                high[j] = j & step ? j + LANES : j + step;
            }
            m[i] = __builtin_shuffle(a, b, low);
            m[i + step] = __builtin_shuffle(a, b, high);
        }
    }
}

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace
