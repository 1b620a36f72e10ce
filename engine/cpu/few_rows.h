// Attention of a few rows: keys are transposed and values paired in registers. Sums use the order of by_words (words.h), so
// results are bit-identical.
#pragma once
#include "ahead.h"
#include "words.h"

namespace {

constexpr int64_t SQUARE_LINES = 4 * PART_LANES * PART_LANES / 64;  // cache lines of a square of PART_LANES by PART_LANES words

// Computes scores (ROWS, keys; row stride `stride`) of queries (ROWS, num_words) with the first `width` of `keys`, each
// num_words long.
template <int ROWS>
inline void scores_of_few(const uint32_t* q, int64_t num_words, const char* const* keys, int64_t width, float* scores,
                          int64_t stride, Fetches& ahead) {
    for (int64_t k = 0; k < width; k += PART_LANES) {
        FloatPart sums[ROWS] = {};
        for (int64_t w = 0; w < num_words; w += PART_LANES) {
            ahead.fetch(SQUARE_LINES);
            FloatPart square[PART_LANES];
            for (int i = 0; i < PART_LANES; i++) square[i] = load<FloatPart>(keys[k + i] + w * 4);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < PART_LANES; i++)
                for (int r = 0; r < ROWS; r++) sums[r] = Word::add(sums[r], WordPart(square[i]), q[r * num_words + w + i]);
        }
        for (int r = 0; r < ROWS; r++) store(scores + r * stride + k, sums[r]);
    }
}

// Accumulates COUNT registers of each value, starting at word `at`.
template <int ROWS, int COUNT>
inline void add_part_of_values(const uint32_t* weights, int64_t stride, int64_t num_groups, const char* const* values,
                               int64_t at, const float* shrink, float* out, int64_t padded_dim, Fetches& ahead) {
    constexpr int VECTORS = COUNT * Word::NUMBERS;
    out += at * Word::NUMBERS;
    FloatPart sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++) sums[r][c] = load<FloatPart>(out + r * padded_dim + c * PART_LANES) * shrink[r];
    for (int64_t g = 0; g < num_groups; g++) {
        ahead.fetch(VECTORS * PART_LANES / LANES);
        WordPart some[VECTORS];
        for (int c = 0; c < COUNT; c++)
            Word::pair(values + g * Word::NUMBERS, (at + c * PART_LANES) * 4, some + c * Word::NUMBERS);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < VECTORS; c++) sums[r][c] = Word::add(sums[r][c], some[c], weights[r * stride + g]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++) store(out + r * padded_dim + c * PART_LANES, sums[r][c]);
}

// out (ROWS, numbers) = out * shrink + weights (ROWS, num_groups; row stride `stride`) times values, each num_words long.
// One word of weights covers a group of Word::NUMBERS values.
template <int ROWS>
inline void add_values_of_few(const uint32_t* weights, int64_t stride, int64_t num_groups, const char* const* values,
                              int64_t num_words, const float* shrink, float* out, Fetches& ahead) {
    constexpr int COUNT = VECTORS_AT_ONCE / Word::NUMBERS;
    int64_t at = 0;
    for (; at + COUNT * PART_LANES <= num_words; at += COUNT * PART_LANES)
        add_part_of_values<ROWS, COUNT>(weights, stride, num_groups, values, at, shrink, out, num_words * Word::NUMBERS, ahead);
    for (; at < num_words; at += PART_LANES)
        add_part_of_values<ROWS, 1>(weights, stride, num_groups, values, at, shrink, out, num_words * Word::NUMBERS, ahead);
}

}  // namespace
