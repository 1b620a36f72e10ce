// Of each row of a draft's logits the token that is drafted, and the one that may be there instead: what
// engine/spec_decode/draft_models/draft_sampler.py says with torch, whose calls take longer than a small head's products.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

enum DraftKind : int32_t { GREEDY, DRAWN, LIKELIEST };  // see draft_sampler.py

struct DraftDraws {
    const float* logits;        // (rows, vocabulary), at least two
    int64_t rows, vocabulary;
    const int32_t* kinds;       // (rows) DraftKind
    const float* temperatures;  // (rows) above 0
    const double* numbers;      // (rows) in [0, 1), the row's random number
    float nearby;               // distance from the random number searched for the alternative
    int32_t is_drawn;           // tokens were already drawn by the caller, with filters
    int64_t* tokens;            // (rows, 4): likeliest, drawn, drafted, alternative; drawn is negative if a logit is
                                // NaN or none is finite
    float* shares;              // (rows, 2): probabilities of the drafted token and of the alternative
    int32_t threads;
};

// A lane's two greatest values, and its NaN check.
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

// Finds the two greatest. Shares are NaN if a logit is NaN or none is finite.
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

// Weight of each logit relative to the greatest, and prefix sums.
struct Weights {
    static constexpr int64_t PIECE = 64;
    std::vector<float> each;
    std::vector<double> before;  // prefix sum before each piece; then the total

    double total() const { return before.back(); }

    void fill(const float* x, int64_t count, float temperature) {
        constexpr float LOG2_E = 1.44269504f;
        float most = -std::numeric_limits<float>::infinity();
        Floats mosts = all(most), none{};
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const Floats values = load<Floats>(x + i);
            mosts = values > mosts ? values : mosts;
            none = values == values ? none : values;
        }
        for (int lane = 0; lane < LANES; lane++) most = std::max(most, mosts[lane]);
        for (int64_t j = i; j < count; j++) most = std::max(most, x[j]);
        each.resize(count);
        for (i = 0; i + LANES <= count; i += LANES)
            store(each.data() + i, power_of_two((load<Floats>(x + i) - most) / temperature * LOG2_E));
        for (; i < count; i++) each[i] = std::exp((x[i] - most) / temperature);
        before.assign(1, sum(none));  // NaN spoils all sums
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

    // Returns the token other than `but` with the largest share between two sums, and that share.
    std::pair<int64_t, double> most_between(double low, double high, int64_t but) const {
        const int64_t piece = piece_of(low);
        int64_t found = but ? 0 : 1;
        double most = 0, sum = before[piece];
        for (int64_t i = piece * PIECE; i < int64_t(each.size()) && sum < high; i++) {
            const double begin = sum;
            sum += each[i];
            const double inside = std::min(sum, high) - std::max(begin, low);
            if (i != but && inside > most) found = i, most = inside;
        }
        return {found, most};
    }
};

inline void draw_draft(const DraftDraws& all, int64_t row, Weights& weights) {
    const float* x = all.logits + row * all.vocabulary;
    int64_t *tokens = all.tokens + 4 * row, two[2];
    float *shares = all.shares + 2 * row, of_two[2];
    if (all.kinds[row] == GREEDY) {
        find_two(x, all.vocabulary, two, of_two);
        tokens[0] = tokens[2] = two[0], tokens[3] = two[1];
        tokens[1] = std::isfinite(of_two[0]) ? two[0] : -1;
        shares[0] = of_two[0], shares[1] = of_two[1];
        return;
    }
    weights.fill(x, all.vocabulary, all.temperatures[row]);
    const double total = weights.total();
    if (!std::isfinite(total)) {
        tokens[0] = tokens[2] = 0, tokens[1] = -1, tokens[3] = 1;
        shares[0] = shares[1] = 0;
        return;
    }
    const double number = all.numbers[row];
    tokens[0] = place_of(1.0f, weights.each.data(), all.vocabulary, -1) % all.vocabulary;
    if (!all.is_drawn || tokens[1] < 0) tokens[1] = weights.token_at(number * total);
    tokens[2] = all.kinds[row] == LIKELIEST ? tokens[0] : tokens[1];
    shares[0] = weights.each[tokens[2]] / total;
    if (tokens[2] != tokens[1]) {
        tokens[3] = tokens[1];
        shares[1] = weights.each[tokens[3]] / total;
        return;
    }
    const auto [other, most] = weights.most_between((number - all.nearby) * total, (number + all.nearby) * total, tokens[2]);
    tokens[3] = other;
    shares[1] = most / (2 * all.nearby * total);
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
