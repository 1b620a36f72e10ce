// Depthwise causal convolution of packed sequences. Threads share the channels.
#pragma once
#include "numbers.h"
#include "team.h"

namespace {

struct ConvCall {
    Kind kind;
    int32_t is_fp32;         // x, out and states; otherwise they are bf16
    int32_t activates;       // silu
    void* x;                 // (tokens, channels), token stride x_stride
    const void *before, *after;  // gates like x, or null: x is multiplied by one in place, the result by the other
    int64_t x_stride;
    void* out;               // (tokens, channels)
    int64_t channels, width; // width: MOST_WIDTH at most
    const float* weight;     // (width, channels)
    const float* bias;       // (channels), or null
    void* states;            // (slots, width - 1, channels), slot stride state_stride; the last inputs, oldest first
    int64_t state_stride;
};

constexpr int64_t MOST_WIDTH = 8;

template <class Number> void convolve_channels(const ConvCall& c, const Step& step, Worker& me) {
    const int64_t units = round_up(c.channels, LANES) / LANES, kept = c.width - 1, first = me.first(units) * LANES;
    const int64_t count = std::min(me.end(units) * LANES, c.channels) - first;
    if (count <= 0) return;
    std::vector<Floats>& room = me.desk.state;
    room.resize(std::max<size_t>(room.size(), kept * count * sizeof(Number) / sizeof(Floats) + 1));
    Number* const old = reinterpret_cast<Number*>(room.data());
    Number* const x = static_cast<Number*>(c.x) + first;
    Number *const out = static_cast<Number*>(c.out) + first, *const states = static_cast<Number*>(c.states) + first;
    const auto weigh = [&](const Number* const* rows, Number* to) {
        for (int64_t i = 0; i < count; i += LANES) {
            Floats total = c.bias ? wide(c.bias + first + i, count - i) : Floats{};
            for (int64_t j = 0; j < c.width; j++)
                total += wide(rows[j] + i, count - i) * wide(c.weight + j * c.channels + first + i, count - i);
            put(to + i, c.activates ? silu(total) : total, count - i);
        }
    };
    const auto gate = [&](const void* gates, int64_t token, Number* row) {
        if (!gates) return;
        const Number* const by = static_cast<const Number*>(gates) + first + token * c.x_stride;
        for (int64_t i = 0; i < count; i += LANES) put(row + i, wide(row + i, count - i) * wide(by + i, count - i), count - i);
    };
    for (int64_t s = 0, token = 0; s < step.sequences; token += step.query_lens[s++]) {
        if (!step.query_lens[s]) continue;
        // A copy, because the slot may be written before the last read.
        const int64_t read = step.state_reads[s];
        for (int64_t j = 0; j < kept; j++)
            if (read < 0) std::fill_n(old + j * count, count, Number{});
            else std::copy_n(states + read * c.state_stride + j * c.channels, count, old + j * count);
        for (int64_t i = 0; i < step.query_lens[s]; i++) {
            gate(c.before, token + i, x + (token + i) * c.x_stride);
            const Number* rows[MOST_WIDTH];
            for (int64_t j = 0; j < c.width; j++) {
                const int64_t place = i - kept + j;
                rows[j] = place < 0 ? old + (kept + place) * count : x + (token + place) * c.x_stride;
            }
            weigh(rows, out + (token + i) * c.channels);
            gate(c.after, token + i, out + (token + i) * c.channels);
            const int64_t write = step.state_writes[token + i];
            for (int64_t j = 0; write >= 0 && j < kept; j++)
                std::copy_n(rows[j + 1], count, states + write * c.state_stride + j * c.channels);
        }
    }
}

inline void convolve(const ConvCall& c, const Step& step, Worker& me) {
    if (c.is_fp32) convolve_channels<float>(c, step, me);
    else convolve_channels<bf16>(c, step, me);
}

}  // namespace
