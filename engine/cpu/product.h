// Arguments of a product, the operations on its rows before, and those on its results after.
#pragma once
#include <algorithm>
#include <type_traits>

#include "norm.h"
#include "team.h"
#include "vectors.h"

namespace {

enum Before : int32_t { NOTHING, NORM, SILU, GELU, GELU_TANH, SWIGLU_OAI, RELU2 };  // from SILU on: engine/kernels/gated_mul.py

struct ProductCall {
    Kind kind;
    // Low-bit matrices: FormatName of formats.h, inputs per header and per scale, levels of the codes.
    int32_t format, span, group;
    const uint8_t* levels;
    // Matrix.
    const void* panels;
    const float* scales;     // factor per output; low-bit matrices: or null
    const int32_t* sums;     // int8: the sum of each output's codes
    const bf16* bias;        // or null
    int64_t outputs, inputs;
    const int32_t* order;    // feature of the rows that each input takes, -1 for 0; null: in order
    // Operation on the rows before the product.
    Before before;
    Norm norm;               // NORM
    float alpha, limit;      // SWIGLU_OAI
    // Rows: the step's tokens.
    int64_t features;        // of a row; equal to inputs without `order`
    const bf16* x;           // (rows, features); before gating: (rows, 2 features), gates and then ups; RELU2 has no gates
    const bf16* residual;    // (rows, outputs) added to the result, or null; may alias `out`
    void* out;               // (rows, outputs): bf16, or fp32 rounded to bf16
    int64_t out_stride;      // row stride of out and residual
    int32_t is_wide;         // out is fp32
    int64_t tile_rows;       // from this many rows on AMX is used (tiles.h), if available
};

// ---- operations on a row before the product; round to bf16 wherever transformers does ----

inline void copied(const ProductCall& p, const bf16* x, float* y) {
    int64_t i = 0;
    for (; i + PART_LANES <= p.features; i += PART_LANES) store(y + i, widen_part(x + i));
    for (; i < p.features; i++) y[i] = widen(x[i]);
}

// Returns y / (1 + e^-x), by e^-|x|, which cannot overflow.
inline Floats times_sigmoid(Floats y, Floats x) {
    const Floats e = power_of_two((x > 0.0f ? -x : x) * 1.44269504f);
    return y * (x > 0.0f ? all(1.0f) : e) * reciprocal(e + 1.0f);
}

// x (1 + erf(x / sqrt(2))) / 2; error below 1e-6 x. Formula 7.1.26 of Abramowitz and Stegun.
inline Floats gelu(Floats x) {
    Floats z = (x > 0.0f ? x : -x) * 0.70710678f;
    z = z > 10.0f ? all(10.0f) : z;  // finite
    const Floats t = reciprocal(z * 0.3275911f + 1.0f);
    Floats p = all(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Floats rest = p * t * power_of_two(z * z * -1.44269504f);  // 1 - erf(z)
    return x * 0.5f * (x > 0.0f ? 2.0f - rest : rest);
}

// multiply(gates, ups): sixteen of each.
template <class Multiply>
inline void gated(const ProductCall& p, const bf16* gates, const bf16* ups, float* y, const Multiply& multiply) {
    int64_t i = 0;
    for (; i + LANES <= p.features; i += LANES)
        store(y + i, rounded(multiply(widen(load<Halves>(gates + i)), widen(load<Halves>(ups + i)))));
    for (; i < p.features; i++) y[i] = rounded(multiply(all(widen(gates[i])), all(widen(ups[i]))))[0];
}

// y: receives the inputs, and has room for the features behind them.
inline void prepared(const ProductCall& p, int64_t row, std::vector<float>& y) {
    y.resize(p.order ? p.inputs + p.features : p.inputs);
    float* features = p.order ? y.data() + p.inputs : y.data();
    const bf16 *x = p.x + row * p.features, *gates = x + row * p.features, *ups = gates + p.features;
    switch (p.before) {
        case NOTHING: copied(p, x, features); break;
        case NORM: normed(p.norm, x, p.features, [&](int64_t i, auto numbers) { store(features + i, widen(numbers)); }); break;
        case SILU:
            gated(p, gates, ups, features, [](Floats gate, Floats up) { return rounded(times_sigmoid(gate, gate)) * up; });
            break;
        case GELU: gated(p, gates, ups, features, [](Floats gate, Floats up) { return rounded(gelu(gate)) * up; }); break;
        case GELU_TANH:  // (1 + tanh(x)) / 2 is the sigmoid of 2 x
            gated(p, gates, ups, features, [](Floats gate, Floats up) {
                return rounded(times_sigmoid(gate, gate * (gate * gate * 0.044715f + 1.0f) * 1.59576912f)) * up;
            });
            break;
        case SWIGLU_OAI:
            gated(p, gates, ups, features, [&](Floats gate, Floats up) {
                gate = gate > p.limit ? all(p.limit) : gate;
                up = up > p.limit ? all(p.limit) : up < -p.limit ? all(-p.limit) : up;
                return rounded(gate * rounded(times_sigmoid(all(1.0f), rounded(gate * p.alpha)))) * rounded(up + 1.0f);
            });
            break;
        case RELU2: gated(p, x, x, features, [](Floats, Floats up) { return (up < 0.0f ? all(0.0f) : up) * up; }); break;
    }
    if (p.order)
        for (int64_t i = 0; i < p.inputs; i++) y[i] = p.order[i] < 0 ? 0.0f : features[p.order[i]];
}

// ---- operations on the results, sixteen outputs of one row ----

inline Halves finished(Floats value, const bf16* bias, const bf16* residual) {
    if (bias) value += widen(load<Halves>(bias));
    if (residual) value = widen(narrow(value)) + widen(load<Halves>(residual));
    return narrow(value);
}

inline void put(const ProductCall& p, Floats value, int64_t row, int64_t first) {
    const int64_t count = p.outputs - first, place = row * p.out_stride + first;
    bf16* out = static_cast<bf16*>(p.out) + place;
    float* wide = static_cast<float*>(p.out) + place;
    if (count >= LANES) {
        const Halves done = finished(value, p.bias ? p.bias + first : nullptr, p.residual ? p.residual + place : nullptr);
        return p.is_wide ? store(wide, widen(done)) : store(out, done);
    }
    bf16 bias[LANES] = {}, residual[LANES] = {};  // the last panel may be partial
    if (p.bias) std::copy_n(p.bias + first, count, bias);
    if (p.residual) std::copy_n(p.residual + place, count, residual);
    const Halves done = finished(value, p.bias ? bias : nullptr, p.residual ? residual : nullptr);
    for (int64_t i = 0; i < count; i++)
        if (p.is_wide) wide[i] = widen(bf16(done[i]));
        else out[i] = done[i];
}

// Calls work(N) for the first N of `count` rows, at most MOST, with N a compile-time constant. Returns N.
template <int MOST, class Work> inline int first_rows(int64_t count, const Work& work) {
    if constexpr (MOST > 1)
        if (count < MOST) return first_rows<MOST - 1>(count, work);
    work(std::integral_constant<int, MOST>());
    return MOST;
}

constexpr int BLOCK_ROWS = 96;  // per pass over the panels: their inputs fit the L2 cache

// Returns the panels that this thread reads first: its share. With more than BLOCK_ROWS rows this is a guess, because
// threads take blocks dynamically (matrix.h).
inline Ahead panels_ahead(const ProductCall& p, int64_t panel_bytes, const Worker& me) {
    const int64_t panels = round_up(p.outputs, LANES) / LANES;
    const char* start = static_cast<const char*>(p.panels);
    return {start + me.first(panels) * panel_bytes, start + me.end(panels) * panel_bytes};
}

// Prepares all rows of the step for the product. `Rows` defines their size and layout.
template <class Rows> inline Rows prepared_rows(const ProductCall& p, int64_t count, int64_t panel_bytes, Worker& me) {
    if (count == 1) {  // cheaper to prepare on each thread than to wait
        me.desk.kept.resize(std::max<size_t>(me.desk.kept.size(), Rows(p, 1).bytes()));
        const Rows rows(p, 1, me.desk.kept.data());
        rows.prepare(p, 0, 1, me.desk.row);
        return rows;
    }
    const Rows rows(p, count, me.team.scratch);
    rows.prepare(p, me.first(count), me.end(count), me.desk.row);
    me.wait(panels_ahead(p, panel_bytes, me));
    return rows;
}

}  // namespace
