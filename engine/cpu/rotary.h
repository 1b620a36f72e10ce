// Between the projection and the attention: optional norm of the heads, rotation, and storing keys and values in the pool.
// Rounds to bf16 wherever transformers does.
#pragma once
#include "basis.h"
#include "norm.h"
#include "pool.h"
#include "team.h"

namespace {

struct RotaryCall {
    Kind kind;
    PoolView pool;
    bf16* heads;                     // (tokens, heads, head_dim): queries, keys, values; rotated in place
    Norm q_norm, k_norm, v_norm;     // of a head
    int64_t q_heads, rope;           // rope: index of the step's angles
    int32_t stores;                  // 0: heads are queries only
    int32_t has_gates;               // each query is followed by its gate, one more head
    Basis basis;                     // of the pool
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
    const int64_t dim = t.pool.head_dim, kv_heads = t.stores ? t.pool.kv_heads : 0, wide = 1 + t.has_gates;
    const int64_t width = (t.q_heads * wide + 2 * kv_heads) * dim, group = std::max<int64_t>(1, t.q_heads / t.pool.kv_heads);
    const Angles angles = step.angles[t.rope];
    const int64_t* slots = t.pool.is_windowed ? step.window_slots : step.slots;
    for (int64_t token = me.first(step.tokens); token < me.end(step.tokens); token++) {
        bf16 *queries = t.heads + token * width, *keys = queries + t.q_heads * wide * dim;
        const bf16 *cos = angles.cos + token * angles.pairs, *sin = angles.sin + token * angles.pairs;
        for (int64_t h = 0; h < t.q_heads + kv_heads; h++) {
            const bool is_query = h < t.q_heads;
            bf16* head = is_query ? queries + h * wide * dim : keys + (h - t.q_heads) * dim;
            norm_head(is_query ? t.q_norm : t.k_norm, head, dim);
            rotate_head(head, cos, sin, angles.pairs);
            if (is_query) change_basis(head, t.basis.queries, h / group, dim);
            else change_basis(head, t.basis.keys, h - t.q_heads, dim);
        }
        const int64_t block = slots[token] / t.pool.block_size, offset = slots[token] % t.pool.block_size;
        for (int64_t kv = 0; kv < 2; kv++)
            for (int64_t h = 0; h < kv_heads; h++) {
                bf16* head = keys + (kv * kv_heads + h) * dim;
                if (kv) {
                    norm_head(t.v_norm, head, dim);
                    change_basis(head, t.basis.values, h, dim);
                }
                write_row(t.pool, t.pool.first_row(block, kv, h) + offset, head);
            }
    }
}

}  // namespace
