// The penalties of a step's rows, and each row's greatest logit: see engine/likeliest.py. A row is in the cache for both.
#pragma once
#include <algorithm>
#include <limits>

#include "vectors.h"

namespace {

struct ChoiceRow {
    float* logits;
    const int32_t* token_ids;  // with a penalty, each once
    const float* taken;        // of each, after the repetition penalty
    int64_t tokens, sorted;    // of which the first so many ascend
    double repetition;
    int64_t greatest;  // the answer, and its logit
    double most;
};

struct TokenChoices {
    ChoiceRow* row;
    int64_t rows, vocabulary;
    int32_t threads;
};

constexpr int64_t PIECE = 64;       // tokens whose penalties are computed side by side
constexpr int64_t STRETCH = 1024;   // logits in which the greatest is looked for, once it is known
constexpr int ACROSS = 4;           // running maxima, so that none waits for itself

// Of tokens [begin, end). A choice lies between the product and the difference: they are rounded apart, as torch does it.
inline void penalise(const ChoiceRow& row, int64_t begin, int64_t end, int64_t vocabulary) {
    const Floats repetition = all(float(row.repetition));
    const int32_t last = int32_t(vocabulary) - 1;
    float x[PIECE] = {}, taken[PIECE] = {};
    int32_t ids[PIECE];
    for (int64_t first = begin; first < end; first += PIECE) {
        const int64_t count = std::min(PIECE, end - first);
        for (int64_t i = 0; i < count; i++) ids[i] = std::clamp(row.token_ids[first + i], 0, last);
        for (int64_t i = 0; i < count; i++) x[i] = row.logits[ids[i]];
        for (int64_t i = 0; i < count; i++) taken[i] = row.taken[first + i];
        for (int64_t i = 0; i < PIECE; i += LANES) {
            const Floats v = load<Floats>(x + i);
            store(x + i, (v > 0 ? v / repetition : v * repetition) - load<Floats>(taken + i));
        }
        for (int64_t i = 0; i < count; i++) row.logits[ids[i]] = x[i];
    }
}

// Not a number, if one of them is not.
inline float greatest_of(const float* x, int64_t count) {
    float most = -std::numeric_limits<float>::infinity();
    bool is_number = true;
    int64_t i = 0;
    if (count == STRETCH) {
        FloatPart running[ACROSS];
        IntPart none[ACROSS] = {};
        for (int a = 0; a < ACROSS; a++) running[a] = most - FloatPart{};
        for (; i < STRETCH; i += ACROSS * PART_LANES)
            for (int a = 0; a < ACROSS; a++) {
                const FloatPart v = load<FloatPart>(x + i + a * PART_LANES);
                running[a] = v > running[a] ? v : running[a];
                none[a] |= v != v;
            }
        for (int a = 0; a < ACROSS; a++)
            for (int lane = 0; lane < PART_LANES; lane++) {
                most = std::max(most, running[a][lane]);
                is_number &= !none[a][lane];
            }
    }
    for (; i < count; i++) {
        most = std::max(most, x[i]);
        is_number &= x[i] == x[i];
    }
    return is_number ? most : std::numeric_limits<float>::quiet_NaN();
}

// The first of the greatest, or of those that are not numbers. Stretch by stretch, while the next one is on its way.
inline int64_t choose(const ChoiceRow& row, int64_t vocabulary) {
    const float* x = row.logits;
    penalise(row, row.sorted, row.tokens, vocabulary);
    float best = -std::numeric_limits<float>::infinity();
    int64_t at = 0, token = 0;
    for (int64_t first = 0, end; first < vocabulary; first = end) {
        end = std::min(first + STRETCH, vocabulary);
        if (row.sorted) {
            for (int64_t i = end; i < std::min(end + STRETCH, vocabulary); i += LANES) __builtin_prefetch(x + i);
            const int64_t before = token;
            while (token < row.sorted && (row.token_ids[token] < end || end == vocabulary)) token++;
            penalise(row, before, token, vocabulary);
        }
        const float most = greatest_of(x + first, end - first);
        if (most != most) {
            penalise(row, token, row.sorted, vocabulary);
            for (at = first; x[at] == x[at]; at++) continue;
            return at;
        }
        if (most > best) best = most, at = first;
    }
    while (x[at] != best) at++;
    return at;
}

inline void choose_rows(const TokenChoices& all) {
#pragma omp parallel for num_threads(all.threads)
    for (int64_t i = 0; i < all.rows; i++) {
        ChoiceRow& row = all.row[i];
        row.greatest = choose(row, all.vocabulary);
        row.most = row.logits[row.greatest];
    }
}

}  // namespace
