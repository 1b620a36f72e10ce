// Between the projection and the attention: optional norm of the heads, rotation, and storing keys and values in the pool.
// Rounds to bf16 wherever transformers does.
#pragma once
#include "norm.h"
#include "pool.h"
#include "team.h"

namespace {

struct RotaryCall {
    Kind kind;
    PoolView pool;
    bf16* heads;                     // (tokens, q heads + 2 kv heads, head_dim): queries, keys, values; rotated in place
    Norm q_norm, k_norm, v_norm;     // of a head
    int64_t q_heads, rope;           // rope: index of the step's angles
    int32_t stores;                  // 0: heads are queries only
};

// Rotates pairs of numbers by their angles.
template <class V> inline void turn(V& a, V& b, V cos, V sin) {
    auto product = [](V x, V y) { return widen(narrow(x * y)); };
    const V first = product(a, cos) - product(b, sin);
    b = product(b, cos) + product(a, sin);
    a = first;
}

inline void rotate_head(bf16* x, const bf16* cos, const bf16* sin, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats a = widen(load<Halves>(x + i)), b = widen(load<Halves>(x + half + i));
        turn(a, b, widen(load<Halves>(cos + i)), widen(load<Halves>(sin + i)));
        store(x + i, narrow(a));
        store(x + half + i, narrow(b));
    }
    for (; i < half; i++) {
        float a = widen(x[i]), b = widen(x[half + i]);
        turn(a, b, widen(cos[i]), widen(sin[i]));
        x[i] = narrow(a), x[half + i] = narrow(b);
    }
}

inline void norm_head(const Norm& norm, bf16* x, int64_t dim) {
    if (norm.weight) normed(norm, x, dim, [&](int64_t i, auto numbers) { store(x + i, numbers); });
}

inline void rotate(const RotaryCall& t, const Step& step, const Worker& me) {
    const int64_t dim = t.pool.head_dim, kv_heads = t.stores ? t.pool.kv_heads : 0, all_heads = t.q_heads + 2 * kv_heads;
    const Angles angles = step.angles[t.rope];
    for (int64_t token = me.first(step.tokens); token < me.end(step.tokens); token++) {
        bf16* heads = t.heads + token * all_heads * dim;
        const bf16 *cos = angles.cos + token * angles.pairs, *sin = angles.sin + token * angles.pairs;
        for (int64_t h = 0; h < t.q_heads + kv_heads; h++) {
            norm_head(h < t.q_heads ? t.q_norm : t.k_norm, heads + h * dim, dim);
            rotate_head(heads + h * dim, cos, sin, angles.pairs);
        }
        const int64_t block = step.slots[token] / t.pool.block_size, offset = step.slots[token] % t.pool.block_size;
        for (int64_t kv = 0; kv < 2; kv++)
            for (int64_t h = 0; h < kv_heads; h++) {
                bf16* head = heads + (t.q_heads + kv * kv_heads + h) * dim;
                if (kv) norm_head(t.v_norm, head, dim);
                write_row(t.pool, t.pool.first_row(block, kv, h) + offset, head);
            }
    }
}

}  // namespace
