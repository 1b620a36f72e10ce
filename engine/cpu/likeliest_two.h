// Of each row of logits the two likeliest tokens, and which share of the distribution is theirs: what is asked of heads
// that draft, token after token, where calls into torch would take longer than the search.
#pragma once
#include <limits>

#include "vectors.h"

namespace {

struct LikeliestTwo {
    const float* logits;   // (rows, vocabulary), at least two
    int64_t rows, vocabulary;
    int64_t* tokens;       // (rows, 2)
    float* shares;         // (rows, 2); no numbers where a logit is none, or none is finite
    int32_t threads;
};

// A lane's two greatest, and what is no number in it.
struct TwoGreatest {
    Floats most = all(-std::numeric_limits<float>::infinity()), next = most, none{};

    void look(Floats x) {
        const Floats lower = x < most ? x : most;
        next = lower > next ? lower : next;
        most = x > most ? x : most;
        none = x == x ? none : x;
    }
};

inline int64_t place_of(float value, const float* x, int64_t count, int64_t but) {
    int64_t i = 0;
    while (i < count && (i == but || x[i] != value)) i++;
    return i;
}

inline void find_two(const float* x, int64_t count, int64_t* tokens, float* shares) {
    TwoGreatest lanes;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) lanes.look(load<Floats>(x + i));
    Floats last = all(-std::numeric_limits<float>::infinity());
    for (int lane = 0; i + lane < count; lane++) last[lane] = x[i + lane];
    lanes.look(last);
    float most = lanes.most[0], next = -std::numeric_limits<float>::infinity();
    for (int lane = 1; lane < 2 * LANES; lane++) {
        const float value = lane < LANES ? lanes.most[lane] : lanes.next[lane - LANES];
        next = std::max(next, std::min(value, most));
        most = std::max(most, value);
    }
    tokens[0] = place_of(most, x, count, -1) % count;
    tokens[1] = place_of(next, x, count, tokens[0]) % count;
    constexpr float LOG2_E = 1.44269504f;
    Floats totals{};
    for (i = 0; i + LANES <= count; i += LANES) totals += power_of_two((load<Floats>(x + i) - most) * LOG2_E);
    float total = sum(totals) + sum(lanes.none);
    for (; i < count; i++) total += std::exp(x[i] - most);
    shares[0] = 1.0f / total;
    shares[1] = std::exp(next - most) / total;
}

inline void find_likeliest_two(const LikeliestTwo& all) {
#pragma omp parallel for num_threads(all.threads)
    for (int64_t row = 0; row < all.rows; row++)
        find_two(all.logits + row * all.vocabulary, all.vocabulary, all.tokens + 2 * row, all.shares + 2 * row);
}

}  // namespace
