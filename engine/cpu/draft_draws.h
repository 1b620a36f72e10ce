// Draws the draft token of each row of logits like engine/spec_decode/draft_models/draft_sampler.py does with torch, whose
// calls take longer than a small head's products.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "vectors.h"

namespace {

enum DraftKind : int32_t { GREEDY, DRAWN, LIKELIEST };  // see draft_sampler.py

struct DraftDraws {
    const float* logits;        // (rows, vocabulary)
    int64_t rows, vocabulary;
    const int32_t* kinds;       // (rows) DraftKind
    const float* temperatures;  // (rows) above 0
    const double* numbers;      // (rows) in [0, 1), the row's random number
    int32_t is_drawn;           // tokens were already drawn by the caller, with filters
    int64_t* tokens;            // (rows, 3): likeliest, drawn, drafted; drawn is negative if a logit is NaN or none is finite
    float* shares;              // (rows) probability of the drafted token
    int32_t threads;
};

// Greatest of a row, and NaN if one of its whole vectors has a NaN.
struct Greatest {
    float most = -std::numeric_limits<float>::infinity(), none = 0;

    Greatest(const float* x, int64_t count) {
        Floats mosts = all(most), nones{};
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const Floats values = load<Floats>(x + i);
            mosts = values > mosts ? values : mosts;
            nones = values == values ? nones : values;
        }
        for (int lane = 0; lane < LANES; lane++) most = std::max(most, mosts[lane]);
        for (; i < count; i++) most = std::max(most, x[i]);
        none = sum(nones);
    }
};

constexpr float LOG2_E = 1.44269504f;

inline int64_t place_of(float value, const float* x, int64_t count) {
    const int64_t place = std::find(x, x + count, value) - x;
    return place < count ? place : 0;
}

// Returns the likeliest token, and its share: NaN if a logit is NaN or none is finite.
inline std::pair<int64_t, float> likeliest(const float* x, int64_t count) {
    const auto [most, none] = Greatest(x, count);
    Floats totals{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) totals += power_of_two((load<Floats>(x + i) - most) * LOG2_E);
    float total = sum(totals) + none;
    for (; i < count; i++) total += std::exp(x[i] - most);
    return {place_of(most, x, count), 1.0f / total};
}

// Weight of each logit relative to the greatest, and prefix sums.
struct Weights {
    static constexpr int64_t PIECE = 64;
    std::vector<float> each;
    std::vector<double> before;  // prefix sum before each piece; then the total

    double total() const { return before.back(); }

    void fill(const float* x, int64_t count, float temperature) {
        const auto [most, none] = Greatest(x, count);
        each.resize(count);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES)
            store(each.data() + i, power_of_two((load<Floats>(x + i) - most) / temperature * LOG2_E));
        for (; i < count; i++) each[i] = std::exp((x[i] - most) / temperature);
        before.assign(1, none);  // NaN spoils all sums
        for (int64_t first = 0; first < count; first += PIECE) {
            double piece = 0;
            for (int64_t j = first; j < std::min(first + PIECE, count); j++) piece += each[j];
            before.push_back(before.back() + piece);
        }
    }

    // Returns the first piece that ends beyond `target`, or the last one.
    int64_t piece_of(double target) const {
        const int64_t found = std::upper_bound(before.begin() + 1, before.end(), target) - before.begin() - 1;
        return std::min<int64_t>(found, before.size() - 2);
    }

    int64_t token_at(double target) const {
        const int64_t piece = piece_of(target), end = std::min<int64_t>((piece + 1) * PIECE, each.size());
        double sum = before[piece];
        int64_t last = piece * PIECE;
        for (int64_t i = last; i < end; i++) {
            sum += each[i];
            if (sum > target) return i;
            last = each[i] > 0 ? i : last;
        }
        return last;  // rounding may leave the target beyond the last sum
    }
};

inline void draw_draft(const DraftDraws& all, int64_t row, Weights& weights) {
    const float* x = all.logits + row * all.vocabulary;
    int64_t* tokens = all.tokens + 3 * row;
    float& share = all.shares[row];
    if (all.kinds[row] == GREEDY) {
        std::tie(tokens[0], share) = likeliest(x, all.vocabulary);
        tokens[2] = tokens[0];
        tokens[1] = std::isfinite(share) ? tokens[0] : -1;
        return;
    }
    weights.fill(x, all.vocabulary, all.temperatures[row]);
    const double total = weights.total();
    if (!std::isfinite(total)) {
        tokens[0] = tokens[2] = 0, tokens[1] = -1;
        share = 0;
        return;
    }
    tokens[0] = place_of(1.0f, weights.each.data(), all.vocabulary);
    if (!all.is_drawn || tokens[1] < 0) tokens[1] = weights.token_at(all.numbers[row] * total);
    tokens[2] = all.kinds[row] == LIKELIEST ? tokens[0] : tokens[1];
    share = weights.each[tokens[2]] / total;
}

inline void draw_all_drafts(const DraftDraws& all) {
#pragma omp parallel num_threads(all.threads)
    {
        static thread_local Weights weights;
#pragma omp for
        for (int64_t row = 0; row < all.rows; row++) draw_draft(all, row, weights);
    }
}

}  // namespace
