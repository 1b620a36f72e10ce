// RMS norm of a row, x / rms(x) * weight, and its addition to another row. Rounds where transformers does: to bf16 before
// the weight is applied, or once after it.
#pragma once
#include <cmath>
#include <type_traits>

#include "team.h"
#include "vectors.h"

namespace {

struct Norm {
    const void* weight;   // bf16; fp32 if the norm rounds late; null: no norm
    float eps;
    int32_t rounds_late;
};

// put(i, numbers): receives sixteen numbers or one from number i on, as bf16.
template <class Weight, class Put>
inline void weighted(const bf16* x, float inverse, const Weight* weight, int64_t count, const Put& put) {
    typedef std::conditional_t<std::is_same_v<Weight, bf16>, Halves, Floats> Weights;
    const auto one = [&](auto number, auto factor) {
        if constexpr (std::is_same_v<Weight, bf16>) return narrow(widen(narrow(number * inverse)) * widen(factor));
        else return narrow(number * inverse * factor);
    };
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) put(i, one(widen(load<Halves>(x + i)), load<Weights>(weight + i)));
    for (; i < count; i++) put(i, one(widen(x[i]), weight[i]));
}

template <class Put> inline void normed(const Norm& norm, const bf16* x, int64_t count, const Put& put) {
    Floats squares{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats v = widen(load<Halves>(x + i));
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < count; i++) total += widen(x[i]) * widen(x[i]);
    const float inverse = 1.0f / std::sqrt(total / count + norm.eps);
    if (norm.rounds_late) weighted(x, inverse, static_cast<const float*>(norm.weight), count, put);
    else weighted(x, inverse, static_cast<const bf16*>(norm.weight), count, put);
}

// x += norm(update)
struct AddNormCall {
    Kind kind;
    Norm norm;
    const bf16* update;  // (tokens, features)
    bf16* x;             // (tokens, features)
    int64_t features;
};

inline void add_norm(const AddNormCall& n, const Step& step, const Worker& me) {
    for (int64_t token = me.first(step.tokens); token < me.end(step.tokens); token++) {
        bf16* x = n.x + token * n.features;
        normed(n.norm, n.update + token * n.features, n.features,
               [&](int64_t i, auto update) { store(x + i, narrow(widen(load<decltype(update)>(x + i)) + widen(update))); });
    }
}

}  // namespace
