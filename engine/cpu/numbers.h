// Rows of bf16 or fp32 numbers, computed in fp32.
#pragma once
#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace {

inline float one(bf16 x) { return widen(x); }
inline float one(float x) { return x; }
inline Floats wide(const bf16* x) { return widen(load<Halves>(x)); }
inline Floats wide(const float* x) { return load<Floats>(x); }
inline void put(bf16* to, Floats f) { store(to, narrow(f)); }
inline void put(float* to, Floats f) { store(to, f); }
template <class Number> inline float as_stored(float f) {
    if constexpr (sizeof(Number) == sizeof(bf16)) return rounded(f);
    else return f;
}
template <class Number> inline Floats as_stored(Floats f) {
    if constexpr (sizeof(Number) == sizeof(bf16)) return rounded(f);
    else return f;
}

// The first `count` of sixteen numbers; the others are zero, or not stored.
template <class Number> inline Floats wide(const Number* x, int64_t count) {
    if (count >= LANES) return wide(x);
    Number some[LANES]{};
    std::memcpy(some, x, count * sizeof(Number));
    return wide(some);
}
template <class Number> inline void put(Number* to, Floats f, int64_t count) {
    if (count >= LANES) return put(to, f);
    Number some[LANES];
    put(some, f);
    std::memcpy(to, some, count * sizeof(Number));
}

// e^x with a relative error below 2e-7, for x limited to +-87. NaN for NaN.
inline Floats exponential(Floats x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 87.0f ? all(87.0f) : x;
    const Floats magic = all(12582912.0f), shifted = x * 1.44269504f + magic, whole = shifted - magic;
    const Floats f = x - whole * 0.693145752f - whole * 1.42860677e-6f;  // ln 2 in two parts
    Floats p = f * (1.0f / 5040) + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    return Floats(Ints(p) + (Ints(shifted) << 23));
}
inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }
inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace
