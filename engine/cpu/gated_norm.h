// RMS norm of groups of features, gated by silu before or after it. Rounds where transformers does.
#pragma once
#include "numbers.h"
#include "team.h"

namespace {

struct GatedNormCall {
    Kind kind;
    int32_t is_fp32;       // x, gate and out; otherwise they are bf16
    int32_t gates_first;
    int32_t shares_weight; // one weight for all groups
    float eps;
    const void* x;         // (tokens, groups, dim)
    const void* gate;      // (tokens, groups, dim), token stride gate_stride
    int64_t gate_stride;
    const float* weight;   // (groups, dim), or (dim)
    int64_t groups, dim;
    void* out;             // (tokens, groups, dim)
};

template <class Number> void gated_norm_of(const GatedNormCall& n, const Step& step, Worker& me) {
    std::vector<Floats>& kept = me.desk.chunk;
    kept.resize(std::max<size_t>(kept.size(), n.dim / LANES + 1));
    for (int64_t row = me.first(step.tokens * n.groups); row < me.end(step.tokens * n.groups); row++) {
        const int64_t token = row / n.groups, group = row % n.groups;
        const Number* const x = static_cast<const Number*>(n.x) + row * n.dim;
        const Number* const gate = static_cast<const Number*>(n.gate) + token * n.gate_stride + group * n.dim;
        const float* const weight = n.weight + (n.shares_weight ? 0 : group * n.dim);
        Number* const out = static_cast<Number*>(n.out) + row * n.dim;
        Floats squares{};
        for (int64_t i = 0; i < n.dim; i += LANES) {
            Floats y = wide(x + i, n.dim - i);
            if (n.gates_first) y *= silu(wide(gate + i, n.dim - i));
            squares += y * y;
            kept[i / LANES] = y;
        }
        const float inverse = 1.0f / std::sqrt(sum(squares) / n.dim + n.eps);
        for (int64_t i = 0; i < n.dim; i += LANES) {
            Floats y = as_stored<Number>(as_stored<Number>(kept[i / LANES] * inverse) * wide(weight + i, n.dim - i));
            if (!n.gates_first) y *= silu(wide(gate + i, n.dim - i));
            put(out + i, y, n.dim - i);
        }
    }
}

inline void gated_norm(const GatedNormCall& n, const Step& step, Worker& me) {
    if (n.is_fp32) gated_norm_of<float>(n, step, me);
    else gated_norm_of<bf16>(n, step, me);
}

}  // namespace
