// Change of the basis of heads: a row times a matrix of its KV head, in fp32; see engine/kv/basis.py.
#pragma once
#include "pool.h"
#include "vectors.h"

namespace {

// Each (kv heads, head_dim, head_dim), or null: the model's own basis.
struct Basis {
    const float *keys, *values, *queries, *outputs;
};

// Multiplies a row with a matrix from the right. Sums are added in the order of the row.
inline void multiply_row(const float* x, const float* matrix, int64_t dim, float* to) {
    constexpr int COUNT = 4;
    int64_t i = 0;
    for (; i + COUNT * LANES <= dim; i += COUNT * LANES) {
        Floats sums[COUNT] = {};
        for (int64_t k = 0; k < dim; k++)
#pragma GCC unroll 4
            for (int part = 0; part < COUNT; part++) sums[part] += load<Floats>(matrix + k * dim + i + part * LANES) * x[k];
        for (int part = 0; part < COUNT; part++) store(to + i + part * LANES, sums[part]);
    }
    for (; i < dim; i++) {
        float sum = 0;
        for (int64_t k = 0; k < dim; k++) sum += matrix[k * dim + i] * x[k];
        to[i] = sum;
    }
}

// Replaces a head by its product with a matrix, if there are any.
inline void change_basis(bf16* x, const float* matrices, int64_t head, int64_t dim) {
    if (!matrices) return;
    float *numbers = room_for_row(2 * round_up(dim, LANES)), *product = numbers + round_up(dim, LANES);
    widen_numbers(x, dim, numbers);
    multiply_row(numbers, matrices + head * dim * dim, dim, product);
    narrow_numbers(product, dim, x);
}

}  // namespace
