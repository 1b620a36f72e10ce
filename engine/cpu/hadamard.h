// Random-sign Hadamard rotation of a row of floats; formulas, signs and order of sums as in
// engine/kernels/quant/hadamard.py.
#pragma once
#include "vectors.h"

namespace {

constexpr uint64_t SIGNS = 0x243F6A8885A308D3;

inline int64_t part_of(int64_t dim) { return dim & -dim; }
inline float factor_of(int64_t dim) { return 1.0f / float(int64_t(1) << __builtin_ctzll(uint64_t(dim)) / 2); }

// Flips the sign bits of sixteen numbers from number i on, a multiple of 16.
inline Words flips(int64_t i) {
    Words lane;
    for (int k = 0; k < LANES; k++) lane[k] = k;
    return ((Words{} + uint32_t(SIGNS >> (i & 63))) >> lane & 1u) << 31;
}

template <int STEP = 1> inline Floats add_near(Floats x) {  // steps within a vector
    Ints lane;
    for (int k = 0; k < LANES; k++) lane[k] = k;
    const Floats other = __builtin_shuffle(x, lane ^ STEP);
    x = other + Floats(Words(x) ^ Words((lane & STEP) != 0) << 31);
    if constexpr (2 * STEP < LANES) return add_near<2 * STEP>(x);
    return x;
}

// Multiplies parts of n numbers with H, in place.
inline void add_all(float* x, int64_t dim, int64_t n) {
    int64_t step = 1;
    if (n % LANES == 0) {
        for (int64_t i = 0; i < dim; i += LANES) store(x + i, add_near(load<Floats>(x + i)));
        for (step = LANES; step < n; step *= 2)
            for (int64_t at = 0; at < dim; at += 2 * step)
                for (int64_t i = at; i < at + step; i += LANES) {
                    const Floats a = load<Floats>(x + i), b = load<Floats>(x + i + step);
                    store(x + i, a + b), store(x + i + step, a - b);
                }
    }
    for (; step < n; step *= 2)
        for (int64_t at = 0; at < dim; at += 2 * step)
            for (int64_t i = at; i < at + step; i++) {
                const float a = x[i], b = x[i + step];
                x[i] = a + b, x[i + step] = a - b;
            }
}

// Flips signs and multiplies by a factor, in place.
inline void flip(float* x, int64_t dim, float factor) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(x + i, Floats(Words(load<Floats>(x + i)) ^ flips(i)) * factor);
    for (; i < dim; i++) x[i] *= SIGNS >> (i & 63) & 1 ? -factor : factor;
}

// Rotates a row; `scale` is an additional power of two.
inline void rotate_row(float* x, int64_t dim, float scale = 1) {
    flip(x, dim, factor_of(dim) * scale);
    add_all(x, dim, part_of(dim));
}

inline void unrotate_row(float* x, int64_t dim) {
    add_all(x, dim, part_of(dim));
    flip(x, dim, 1 / (factor_of(dim) * part_of(dim)));
}

}  // namespace
