// Arguments of a product, the operations on its rows before, and those on its results after.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "team.h"
#include "vectors.h"

namespace {

enum Before : int32_t { NOTHING, NORM, SILU };

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
    float eps;               // NORM
    const bf16* norm;        // NORM
    // Rows: the step's tokens.
    int64_t features;        // of a row; equal to inputs without `order`
    const bf16* x;           // (rows, features); SILU: (rows, 2 features), gates and then ups
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

inline void normed(const ProductCall& p, const bf16* x, float* y) {
    Floats squares{};
    int64_t i = 0;
    for (; i + LANES <= p.features; i += LANES) {
        Floats v = widen(load<Halves>(x + i));
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < p.features; i++) total += widen(x[i]) * widen(x[i]);
    const float inverse = 1.0f / std::sqrt(total / p.features + p.eps);
    auto norm = [&](auto v, auto weight) { return widen(narrow(widen(narrow(v * inverse)) * weight)); };
    for (i = 0; i + LANES <= p.features; i += LANES)
        store(y + i, norm(widen(load<Halves>(x + i)), widen(load<Halves>(p.norm + i))));
    for (; i < p.features; i++) y[i] = norm(widen(x[i]), widen(p.norm[i]));
}

inline void gated(const ProductCall& p, const bf16* x, float* y) {
    auto silu_mul = [](Floats gate, Floats up) {
        // 1 / (1 + e^-g) by e^-|g|, which cannot overflow
        Floats e = power_of_two((gate > 0.0f ? -gate : gate) * 1.44269504f);
        Floats silu = gate * (gate > 0.0f ? all(1.0f) : e) * reciprocal(e + 1.0f);
        return widen(narrow(widen(narrow(silu)) * up));
    };
    int64_t i = 0;
    for (; i + LANES <= p.features; i += LANES)
        store(y + i, silu_mul(widen(load<Halves>(x + i)), widen(load<Halves>(x + p.features + i))));
    for (; i < p.features; i++) y[i] = silu_mul(all(widen(x[i])), all(widen(x[p.features + i])))[0];
}

// y: receives the inputs, and has room for the features behind them.
inline void prepared(const ProductCall& p, int64_t row, std::vector<float>& y) {
    y.resize(p.order ? p.inputs + p.features : p.inputs);
    float* features = p.order ? y.data() + p.inputs : y.data();
    switch (p.before) {
        case NOTHING: copied(p, p.x + row * p.features, features); break;
        case NORM: normed(p, p.x + row * p.features, features); break;
        case SILU: gated(p, p.x + row * 2 * p.features, features); break;
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
