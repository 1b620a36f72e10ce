// softmax(q k / sqrt(D)) v over paged keys and values, read where they lie.
//
// The work is cut into (sequence, kv head, a few positions). The query heads that share a kv head, at those positions, are
// the rows of one piece: each key is fetched and turned once for all of them.
//
//   1  for each tile of 32 keys: keys become columns, so that a vector holds one query's scores with 16 keys
//   2  softmax along each row of scores
//   3  for each tile of 32 keys: out += p v
//
// Sums run over keys in the order of their positions, in tiles that begin at multiples of 32: what a query gets depends
// neither on the queries beside it nor on how its prompt was cut.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "pool.h"
#include "team.h"

namespace {

struct AttentionCall {
    Kind kind;
    PoolView pool;
    const bf16* q;           // (tokens, q heads, head_dim), a token every q_stride
    int64_t q_stride;
    bf16* out;               // (tokens, q heads, head_dim)
    int64_t q_heads;
    int64_t window;          // 0: none
};

struct Piece {
    int64_t sequence, kv_head;
    int64_t token;           // of the step, of its first query
    int64_t position, count; // of its queries
};

constexpr int64_t POSITIONS = 16;  // of one piece
constexpr int KEYS = 2 * LANES;    // of one tile

// Registers of sums that a row has at once: six rows of them, and what they are made of, must fit.
constexpr int SCORES_AT_ONCE = 2, OUTPUTS_AT_ONCE = PARTS == 2 ? 2 : 4;

// columns: (2, dim), for the first and the second 16 keys of the tile
template <int ROWS> inline void score(const float* q, int64_t dim, const Floats* columns, float* scores, int64_t stride) {
    for (int part = 0; part < 2 * PARTS; part += SCORES_AT_ONCE) {
        FloatPart sums[ROWS][SCORES_AT_ONCE] = {};
        for (int64_t d = 0; d < dim; d++)
            for (int i = 0; i < SCORES_AT_ONCE; i++) {
                const Floats* column = columns + (part + i) / PARTS * dim + d;
                const FloatPart keys = load<FloatPart>(reinterpret_cast<const float*>(column) + (part + i) % PARTS * PART_LANES);
                for (int r = 0; r < ROWS; r++) sums[r][i] += keys * q[r * dim + d];
            }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < SCORES_AT_ONCE; i++) store(scores + r * stride + (part + i) * PART_LANES, sums[r][i]);
    }
}

template <int ROWS, int COUNT>
inline void mix(const float* weights, int64_t stride, const float* values, float* out, int64_t dim) {
    FloatPart sums[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) sums[r][v] = load<FloatPart>(out + r * dim + v * PART_LANES);
    for (int key = 0; key < KEYS; key++)
        for (int v = 0; v < COUNT; v++) {
            const FloatPart value = load<FloatPart>(values + key * dim + v * PART_LANES);
            for (int r = 0; r < ROWS; r++) sums[r][v] += value * weights[r * stride + key];
        }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) store(out + r * dim + v * PART_LANES, sums[r][v]);
}

template <int ROWS> inline void mix_all(const float* weights, int64_t stride, const float* values, float* out, int64_t dim) {
    int64_t d = 0;
    for (; d + OUTPUTS_AT_ONCE * PART_LANES <= dim; d += OUTPUTS_AT_ONCE * PART_LANES)
        mix<ROWS, OUTPUTS_AT_ONCE>(weights, stride, values + d, out + d, dim);
    for (; d < dim; d += LANES) mix<ROWS, PARTS>(weights, stride, values + d, out + d, dim);
}

// F(6) as often as six rows are left, then F(3), then F(1); `row` is the first of them.
#define FOR_ROWS(rows, row, F)                                                          \
    for (int64_t row = 0, left; (left = (rows) - row) > 0;) {                           \
        if (left >= 6) { F(6); row += 6; }                                              \
        else if (left >= 3) { F(3); row += 3; }                                         \
        else { F(1); row += 1; }                                                        \
    }

struct Work {
    const AttentionCall& a;
    const Step& step;
    const Piece& piece;
    Desk& desk;
    int64_t dim, rows, first, end, width;  // head_dim in whole vectors; keys [first, end), first in whole tiles
    int64_t stride;                        // of a row of scores: beyond its width, lest all rows meet in the same cache sets

    Work(const AttentionCall& a, const Step& step, const Piece& piece, Desk& desk) : a(a), step(step), piece(piece), desk(desk) {
        const int64_t lowest = a.window ? std::max<int64_t>(0, piece.position - a.window + 1) : 0;
        dim = round_up(a.pool.head_dim, LANES);
        rows = piece.count * group();
        first = lowest / KEYS * KEYS;
        end = piece.position + piece.count;
        width = round_up(end - first, KEYS);
        stride = width + LANES;
        desk.q.assign(rows * dim, 0.0f);
        desk.out.assign(rows * dim, 0.0f);
        desk.scores.resize(rows * stride);
        desk.tile.assign(KEYS * dim, 0.0f);
        desk.columns.resize(2 * dim);
    }
    int64_t group() const { return a.q_heads / a.pool.kv_heads; }
    int64_t position(int64_t row) const { return piece.position + row / group(); }
    int64_t head(int64_t row, int64_t stride) const {  // where a row's query begins, and its output
        return (piece.token + row / group()) * stride + (piece.kv_head * group() + row % group()) * a.pool.head_dim;
    }

    void run() {
        const float scale = 1.0f / std::sqrt(float(a.pool.head_dim));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < a.pool.head_dim; d++) desk.q[r * dim + d] = widen(a.q[head(r, a.q_stride) + d]) * scale;
        for (int64_t key = first; key < end; key += KEYS) score_tile(key);
        std::vector<float>& sums = desk.q;  // the queries have done their part
        for (int64_t r = 0; r < rows; r++) sums[r] = softmax(&desk.scores[r * stride]);
        for (int64_t key = first; key < end; key += KEYS) mix_tile(key);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < a.pool.head_dim; d++)
                a.out[head(r, a.q_heads * a.pool.head_dim) + d] = narrow(desk.out[r * dim + d] / sums[r]);
    }

    void read_tile(int64_t key, int64_t kind) {
        const int64_t* table = step.tables + piece.sequence * step.table_width;
        const int64_t size = a.pool.block_size, last = std::min(key + KEYS, end);
        float* to = desk.tile.data();
        for (int64_t k = key, count; k < last; k += count) {  // the keys that lie in one block follow each other
            const int64_t offset = k % size, row = a.pool.first_row(table[k / size], kind, piece.kv_head) + offset;
            count = std::min(size - offset, last - k);
            for (int64_t i = 0; i < count; i++, to += dim) read_row(a.pool, row + i, to);
        }
        std::fill(to, desk.tile.data() + KEYS * dim, 0.0f);
    }

    void score_tile(int64_t key) {
        read_tile(key, 0);
        float* columns = reinterpret_cast<float*>(desk.columns.data());
        for (int k = 0; k < KEYS; k += PART_LANES)
            for (int64_t d = 0; d < dim; d += PART_LANES) {
                FloatPart square[PART_LANES];
                for (int i = 0; i < PART_LANES; i++) square[i] = load<FloatPart>(&desk.tile[(k + i) * dim + d]);
                transpose(square);
                for (int i = 0; i < PART_LANES; i++) store(columns + (k / LANES * dim + d + i) * LANES + k % LANES, square[i]);
            }
        float* scores = &desk.scores[key - first];
#define SCORE(N) score<N>(&desk.q[row * dim], dim, desk.columns.data(), scores + row * stride, stride)
        FOR_ROWS(rows, row, SCORE)
#undef SCORE
        for (int64_t r = 0; r < rows; r++) hide(scores + r * stride, key, position(r));
    }

    // Keys behind the query, or too far before it.
    void hide(float* scores, int64_t key, int64_t position) const {
        const int64_t lowest = a.window ? position - a.window + 1 : 0;
        if (key >= lowest && key + KEYS - 1 <= position) return;
        for (int64_t k = key; k < key + KEYS; k++)
            if (k < lowest || k > position) scores[k - key] = -std::numeric_limits<float>::infinity();
    }

    // In place, without the division; returns the sum to divide by.
    float softmax(float* scores) const {
        FloatPart most = load<FloatPart>(scores);
        for (int64_t i = PART_LANES; i < width; i += PART_LANES) {
            const FloatPart s = load<FloatPart>(scores + i);
            most = s > most ? s : most;
        }
        float greatest_score = most[0];
        for (int i = 1; i < PART_LANES; i++) greatest_score = most[i] > greatest_score ? most[i] : greatest_score;
        FloatPart totals[PARTS] = {};
        for (int64_t i = 0; i < width; i += LANES)
            for (int part = 0; part < PARTS; part++) {
                float* place = scores + i + part * PART_LANES;
                const FloatPart e = exponential(load<FloatPart>(place) - greatest_score);
                store(place, e);
                totals[part] += e;
            }
        return sum(load<Floats>(totals));
    }

    void mix_tile(int64_t key) {
        read_tile(key, 1);
        const float* weights = &desk.scores[key - first];
#define MIX(N) mix_all<N>(weights + row * stride, stride, desk.tile.data(), &desk.out[row * dim], dim)
        FOR_ROWS(rows, row, MIX)
#undef MIX
    }
};

inline std::vector<Piece> cut(const AttentionCall& a, const Step& step) {
    std::vector<Piece> pieces;
    for (int64_t s = 0, token = 0; s < step.sequences; token += step.query_lens[s++])
        for (int64_t q = 0; q < step.query_lens[s]; q += POSITIONS)
            for (int64_t h = 0; h < a.pool.kv_heads; h++) {
                const int64_t count = std::min(POSITIONS, step.query_lens[s] - q);
                pieces.push_back({s, h, token + q, step.context_lens[s] - step.query_lens[s] + q, count});
            }
    // The longest first, so that no thread is left with one at the end.
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) { return x.position > y.position; });
    return pieces;
}

inline void attend(const AttentionCall& a, const Step& step, Worker& me) {
    const std::vector<Piece> pieces = cut(a, step);
    for (size_t i; (i = me.take()) < pieces.size();) Work(a, step, pieces[i], me.desk).run();
}

}  // namespace
