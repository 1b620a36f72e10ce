// Penalties of a step's rows and each row's greatest logit, fused so that a row stays in the cache; see
// engine/sampling/greedy.py.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

struct RowPenalties {
    const int32_t* token_ids;  // tokens with a penalty, unique
    const float* taken;        // subtracted after the repetition penalty, per token
    int64_t tokens, sorted;    // the first `sorted` ids ascend
    // Index over the first `stretches` stretches of the vocabulary, which contain all penalized tokens: a bit per token,
    // and the range of each stretch among the ascending ids.
    int64_t stretches;
    const uint8_t* bits;
    const int32_t* begins;
    int64_t stays;        // true: logits may be left unchanged, and no penalty yields NaN
    int64_t only_lowers;  // true: no penalty raises a logit
    double repetition;
};

struct ChoiceRow {
    float* logits;
    const RowPenalties* penalties;  // null: none
    int64_t greatest;               // result: token, and its logit below
    double most;
};

struct TokenChoices {
    ChoiceRow* row;
    int64_t rows, vocabulary;
    int32_t threads;
};

constexpr int64_t PIECE = 64;       // tokens penalized together
constexpr int64_t STRETCH = 1024;   // logits per stretch of the index
constexpr int PATIENCE = 8;         // stretches with single look-ups, before all penalized tokens are checked
constexpr int ACROSS = 4;           // independent running maxima, which hide latency

// The select keeps product and difference from being fused: they round separately, as in torch.
inline Floats penalised(Floats x, Floats repetition, Floats taken) {
    return (x > 0 ? x / repetition : x * repetition) - taken;
}

// Logits and penalties of up to PIECE penalized tokens from `first` on, padded with -inf.
struct Penalised {
    int32_t ids[PIECE];
    float x[PIECE];
    int64_t count;

    Penalised(const RowPenalties& row, int64_t first, int64_t end, const float* logits, int64_t vocabulary)
        : count(std::min(PIECE, end - first)) {
        const Floats repetition = all(float(row.repetition));
        const int32_t last = int32_t(vocabulary) - 1;
        float taken[PIECE];
        if (count < PIECE) {
            std::fill_n(x, PIECE, -std::numeric_limits<float>::infinity());
            std::fill_n(taken, PIECE, 0.0f);
        }
        for (int64_t i = 0; i < count; i++) ids[i] = std::clamp(row.token_ids[first + i], 0, last);
        for (int64_t i = 0; i < count; i++) x[i] = logits[ids[i]];
        std::copy_n(row.taken + first, count, taken);
        for (int64_t i = 0; i < PIECE; i += LANES)
            store(x + i, penalised(load<Floats>(x + i), repetition, load<Floats>(taken + i)));
    }
};

// Applies the penalties of tokens [begin, end).
inline void penalise(const RowPenalties& row, int64_t begin, int64_t end, float* logits, int64_t vocabulary) {
    for (int64_t first = begin; first < end; first += PIECE) {
        const Penalised piece(row, first, end, logits, vocabulary);
        for (int64_t i = 0; i < piece.count; i++) logits[piece.ids[i]] = piece.x[i];
    }
}

// Returns the maximum; NaN if any value is NaN.
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

struct Best {
    float most = -std::numeric_limits<float>::infinity();
    int64_t at = 0;

    bool yields(float x, int64_t to) const { return x > most || (x == most && to < at); }
};

inline Best first_that_is_no_number(const float* x, int64_t at) {
    while (x[at] == x[at]) at++;
    return {x[at], at};
}

// Returns the first maximum, or the first NaN, stretch by stretch with prefetch.
inline Best choose(float* x, const RowPenalties& row, int64_t vocabulary) {
    penalise(row, row.sorted, row.tokens, x, vocabulary);
    Best best;
    int64_t token = 0;
    for (int64_t first = 0, end; first < vocabulary; first = end) {
        end = std::min(first + STRETCH, vocabulary);
        if (row.sorted) {
            for (int64_t i = end; i < std::min(end + STRETCH, vocabulary); i += LANES) __builtin_prefetch(x + i);
            const int64_t before = token;
            while (token < row.sorted && (row.token_ids[token] < end || end == vocabulary)) token++;
            penalise(row, before, token, x, vocabulary);
        }
        const float most = greatest_of(x + first, end - first);
        if (most != most) {
            penalise(row, token, row.sorted, x, vocabulary);
            return first_that_is_no_number(x, first);
        }
        if (most > best.most) best = {most, first};
    }
    while (x[best.at] != best.most) best.at++;
    return {x[best.at], best.at};
}

// Updates `best` with the penalized logits of tokens [begin, end).
inline void look_among(const RowPenalties& row, int64_t begin, int64_t end, const float* x, int64_t vocabulary, Best& best) {
    for (int64_t first = begin; first < end; first += PIECE) {
        const Penalised piece(row, first, end, x, vocabulary);
        int32_t reaches = 0;
        for (int64_t i = 0; i < PIECE; i++) reaches |= piece.x[i] >= best.most;
        for (int64_t i = 0; reaches && i < piece.count; i++)
            if (best.yields(piece.x[i], piece.ids[i])) best = {piece.x[i], piece.ids[i]};
    }
}

// Updates `best` with logits [first, end) of a stretch. is_known: all penalized tokens have been checked. Otherwise
// penalties only lower logits, so tokens below `best` can be skipped.
inline void look_into(const RowPenalties& row, bool is_known, int64_t first, int64_t end, const float* x, Best& best) {
    const int64_t stretch = first / STRETCH;
    const int32_t* const ids = row.token_ids;
    for (int64_t block = first; block < end; block += PIECE) {
        const int64_t beyond = std::min(block + PIECE, end);
        int32_t reaches = 0;
        for (int64_t i = block; i < beyond; i++) reaches |= x[i] >= best.most;
        for (int64_t i = block; reaches && i < beyond; i++) {
            if (!best.yields(x[i], i)) continue;
            if (stretch >= row.stretches || !(row.bits[i / 8] >> i % 8 & 1)) {
                best = {x[i], i};
            } else if (!is_known) {
                const int32_t* last = ids + row.begins[stretch + 1];
                const int32_t* found = std::lower_bound(ids + row.begins[stretch], last, int32_t(i));
                if (found == last || *found != i) continue;  // an unsorted id, already checked
                const float lowered = penalised(all(x[i]), all(float(row.repetition)), all(row.taken[found - ids]))[0];
                if (best.yields(lowered, i)) best = {lowered, i};
            }
        }
    }
}

// `choose` without writing to the logits. Most stretches cannot contain the maximum.
inline Best choose_apart(const float* x, const RowPenalties& row, int64_t vocabulary) {
    static thread_local std::vector<float> greatest;
    greatest.clear();
    for (int64_t first = 0; first < vocabulary; first += STRETCH) {
        greatest.push_back(greatest_of(x + first, std::min(STRETCH, vocabulary - first)));
        if (greatest.back() != greatest.back()) return first_that_is_no_number(x, first);
    }
    Best best;
    look_among(row, row.only_lowers ? row.sorted : 0, row.tokens, x, vocabulary, best);
    for (int turn = 0;; turn++) {
        const auto next = std::max_element(greatest.begin(), greatest.end());
        const int64_t first = (next - greatest.begin()) * STRETCH;
        if (!best.yields(*next, first)) return best;
        *next = Best().most;
        if (turn == PATIENCE && row.only_lowers) look_among(row, 0, row.sorted, x, vocabulary, best);
        look_into(row, turn >= PATIENCE || !row.only_lowers, first, std::min(first + STRETCH, vocabulary), x, best);
    }
}

inline void choose_rows(const TokenChoices& all) {
#pragma omp parallel for num_threads(all.threads)
    for (int64_t i = 0; i < all.rows; i++) {
        ChoiceRow& row = all.row[i];
        const RowPenalties none = {}, &penalties = row.penalties ? *row.penalties : none;
        const bool stays = penalties.stays && penalties.tokens;
        const Best best = stays ? choose_apart(row.logits, penalties, all.vocabulary)
                                : choose(row.logits, penalties, all.vocabulary);
        row.greatest = best.at, row.most = best.most;
    }
}

}  // namespace
