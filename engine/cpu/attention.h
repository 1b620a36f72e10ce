// Attention over paged keys and values, read in place: the formulas of engine/attention/layer_attention.py.
//
// Work is cut into pieces (sequence, some KV heads, some positions). The query heads that share a KV head, at those
// positions, are that head's rows of a piece: each key is loaded and transposed once for all of them. For each stretch of
// keys:
//
//   1  transpose keys to columns, so that a vector holds one query's scores with 16 keys
//   2  for six rows at a time: scores; new maximum and the shrink factor of earlier results; then out = out * shrink + p v,
//      while the weights are in the L1 cache
//
// With six rows or fewer, everything stays in registers (few_rows.h). With AMX, if faster, sixteen or more rows go through
// step 2 together (tiles.h).
// Sums run over keys by position, in stretches aligned to their length. A stretch that a query does not see has no effect.
// So, except with AMX, a query's result depends neither on the batch nor on how its prompt was chunked.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "basis.h"
#include "few_rows.h"
#include "numbers.h"
#include "pieces.h"
#include "tiles.h"

namespace {

constexpr int KEYS = HAS_TILES ? 256 : 64;  // per stretch
constexpr int WEIGHT_WORDS = KEYS / Word::NUMBERS;  // of one row's weights
constexpr int MOST_ROWS_AT_ONCE = HAS_TILES ? TILED_ROWS : ROWS_AT_ONCE;
constexpr int KEYS_AT_ONCE = HAS_TILES ? 2 * LANES : LANES;  // granularity of the keys that a row sees of a stretch
constexpr int64_t TILED_QUERIES = 80;  // minimum queries of a sequence for AMX, above any draft length (64)
constexpr float TOO_MUCH = 0x1p32f;    // limit for sums of weights, well inside the range of fp32 and bf16

// Scratch of one head's stretch of keys and values.
struct Stretch {
    const char* addresses[KEYS];        // each key or value, as words
    alignas(64) float key_scales[KEYS], value_scales[KEYS], key_zeros[KEYS], value_zeros[KEYS];
    alignas(64) float scores[MOST_ROWS_AT_ONCE][KEYS];
    alignas(64) uint32_t weights[MOST_ROWS_AT_ONCE][WEIGHT_WORDS];
    float shrink[MOST_ROWS_AT_ONCE];        // factor of the row's earlier results
    int64_t first, seen;                // its first key, and its keys that any row sees
};

class Work {
public:
    Work(const AttentionCall& a, const Step& step, const Piece& piece, Desk& desk, TileUnits& units)
        : a(a), step(step), piece(piece), units(units), group(a.q_heads / a.pool.kv_heads), dim(a.pool.head_dim),
          num_words(Word::count(dim)), padded_dim(num_words * Word::NUMBERS), rows(piece.count * group),
          end(piece.position + piece.count), scale(1.44269504f * (a.soft_cap ? a.soft_cap : a.scale)), is_rotated(a.pool.is_rotated()),
          ahead(desk.ahead) {
        auto room = [](std::vector<Floats>& memory, int64_t count) {
            memory.resize(std::max<size_t>(memory.size(), (count + LANES - 1) / LANES));
            return reinterpret_cast<float*>(memory.data());
        };
        const int64_t all_rows = piece.num_heads * rows;
        q = reinterpret_cast<uint32_t*>(room(desk.q, all_rows * num_words));
        out = room(desk.out, all_rows * padded_dim);
        totals = room(desk.totals, all_rows * LANES);
        sums = room(desk.sums, all_rows);
        offsets = room(desk.offsets, is_rotated ? all_rows * LANES : 0);
        numbers = room(desk.numbers, 2 * padded_dim);
        most = room(desk.most, all_rows);
        columns = reinterpret_cast<uint32_t*>(room(desk.columns, num_words * KEYS));
        values = reinterpret_cast<uint32_t*>(room(desk.values, WEIGHT_WORDS * padded_dim));
        spare = reinterpret_cast<uint32_t*>(room(desk.spare, (KEYS + 1) * num_words));
    }

    // Processes the piece. next(): called at the last stretch; returns this thread's next work, whose first stretch is
    // prefetched, or null.
    template <class Next> void run(const Next& next) {
        stretch.first = first_key(piece);
        if (!ahead.has_any()) look_ahead(piece, stretch.first);
        ahead.fetch_all();
        begin();
        for (; stretch.first < end; stretch.first += KEYS) {
            stretch.seen = std::min<int64_t>(KEYS, end - stretch.first);
            ahead.clear();
            if (stretch.first + KEYS < end) look_ahead(piece, stretch.first + KEYS);
            else if (const Piece* other = next()) look_ahead(*other, first_key(*other));
            for (int64_t h = 0; h < piece.num_heads; h++) {
                // Rows that see none of it come first.
                const int64_t row = std::max<int64_t>(0, stretch.first - piece.position) * group;
                if (rows - row <= ROWS_AT_ONCE) few_rows(h, row);
                else many_rows(h, row);
            }
        }
        finish();
    }

private:
    const AttentionCall& a;
    const Step& step;
    const Piece& piece;
    TileUnits& units;
    const int64_t group, dim, num_words, padded_dim;  // num_words: words per key; padded_dim: numbers in num_words
    const int64_t rows, end;                // rows: per head; end: of the keys
    const float scale;                      // factor of scores, for base-2 exponentials
    const bool is_rotated;                  // see PoolView; queries are rotated too, and results turned back
    uint32_t *q, *columns, *values, *spare;
    float *out, *totals, *most;             // for the rows of all heads
    float *sums, *offsets;                  // the same, of rotated rows: sum of a query; sums of weights times zeros
    float* numbers;                         // two rows
    Stretch stretch;
    Fetches& ahead;                         // next stretch, prefetched at the rate at which this one is read

    // Returns the first key of the piece's first stretch.
    int64_t first_key(const Piece& some) const { return first_seen(some.position) / KEYS * KEYS; }
    int64_t first_seen(int64_t position) const {  // first key that the query at this position sees
        if (a.window) return std::max<int64_t>(0, position - a.window + 1);
        return a.chunk ? position - position % a.chunk : 0;
    }
    int64_t position(int64_t row) const { return piece.position + row / group; }
    int64_t head(int64_t h, int64_t row, int64_t stride, int64_t step) const {  // offset of a row's query or output
        return (piece.token + row / group) * stride + ((piece.first_head + h) * group + row % group) * step;
    }
    const bf16* query(int64_t h, int64_t row) const { return a.q + head(h, row, a.q_stride, dim << a.has_gates); }

    void begin() {
        const int64_t all_rows = piece.num_heads * rows;
        for (int64_t h = 0; h < piece.num_heads; h++)
            for (int64_t r = 0; r < rows; r++) {
                const bf16* x = query(h, r);
                if (is_rotated) x = rotated(x, sums[h * rows + r]);
                Word::of_numbers(x, dim, q + (h * rows + r) * num_words);
            }
        if (is_rotated) std::fill_n(offsets, all_rows * LANES, 0.0f);
        std::fill_n(out, all_rows * padded_dim, 0.0f);
        std::fill_n(totals, all_rows * LANES, 0.0f);
        std::fill_n(most, all_rows, std::numeric_limits<float>::lowest());  // not -inf, because -inf - -inf is NaN
        if (a.sinks) begin_with_sinks();
        std::fill_n(spare + KEYS * num_words, num_words, 0u);
    }

    // Counts each row's sink as a score whose value is zero.
    void begin_with_sinks() {
        for (int64_t own = 0; own < piece.num_heads * rows; own++) {
            const float sink = a.sinks[(piece.first_head + own / rows) * group + own % rows % group];
            most[own] = std::max(most[own], sink * 1.44269504f);
            totals[own * LANES] = 1;
        }
    }

    // Rotates a query, so that its products with rotated keys are those of before; `total` becomes its sum.
    const bf16* rotated(const bf16* x, float& total) {
        const float factor = factor_of(dim);
        widen_numbers(x, dim, numbers);
        rotate_row(numbers, dim, 1 / (factor * factor * part_of(dim)));
        bf16* rounded = reinterpret_cast<bf16*>(numbers + padded_dim);
        narrow_numbers(numbers, dim, rounded);
        total = 0;
        for (int64_t i = 0; i < dim; i++) total += widen(rounded[i]);
        return rounded;
    }

    void finish() {
        for (int64_t h = 0; h < piece.num_heads; h++)
            for (int64_t r = 0; r < rows; r++) {
                const int64_t own = h * rows + r;
                const float total = sum(load<Floats>(totals + own * LANES));
                const float offset = is_rotated ? sum(load<Floats>(offsets + own * LANES)) : 0;
                Word::in_order(out + own * padded_dim, padded_dim, numbers);
                for (int64_t i = 0; i < padded_dim; i += LANES) store(numbers + i, (load<Floats>(numbers + i) + offset) / total);
                if (is_rotated) unrotate_row(numbers, dim);
                const float* result = numbers;
                if (a.output_basis) {
                    multiply_row(numbers, a.output_basis + (piece.first_head + h) * dim * dim, dim, numbers + padded_dim);
                    result = numbers + padded_dim;
                }
                bf16* to = a.out + head(h, r, a.q_heads * dim, dim);
                narrow_numbers(result, dim, to);
                if (a.has_gates) multiply_by_gate(query(h, r) + dim, to);
            }
    }

    void multiply_by_gate(const bf16* gate, bf16* x) const {
        for (int64_t i = 0; i < dim; i += LANES) {
            const Floats factor = rounded(sigmoid(wide(gate + i, dim - i)));
            put(x + i, wide(x + i, dim - i) * factor, dim - i);
        }
    }

    // ---- keys and values in the layout of the products ----

    // Splits keys [key, key + count) of a sequence into runs inside blocks: f(offset in the range, block, offset in the
    // block, length).
    template <class F> void each_run(int64_t sequence, int64_t key, int64_t count, const F& f) const {
        const int64_t* table = a.pool.is_windowed ? step.window_tables + sequence * step.window_width
                                                  : step.tables + sequence * step.table_width;
        const int64_t size = a.pool.block_size;
        for (int64_t k = 0, length; k < count; k += length) {
            length = std::min(size - (key + k) % size, count - k);
            f(k, table[(key + k) / size], (key + k) % size, length);
        }
    }

    // Finds the addresses, scales and zeros of the stretch's keys (kv 0) or values (kv 1).
    void find(int64_t kv, int64_t kv_head, float* scales, float* zeros) {
        each_run(piece.sequence, stretch.first, stretch.seen, [&](int64_t before, int64_t block, int64_t offset, int64_t length) {
            const int64_t row = a.pool.first_row(block, kv, kv_head) + offset;
            if (Word::are_in(a.pool)) {
                for (int64_t i = 0; i < length; i++) stretch.addresses[before + i] = a.pool.address(row + i);
                return;
            }
            for (int64_t i = 0; i < length; i++) {
                stretch.addresses[before + i] = Word::of_row(a.pool, row + i, spare + (before + i) * num_words);
                if (a.pool.scales) scales[before + i] = a.pool.scale(row + i);
                if (is_rotated) zeros[before + i] = a.pool.zero(row + i);
            }
        });
        for (int64_t k = stretch.seen; k < KEYS; k++) {
            stretch.addresses[k] = reinterpret_cast<const char*>(spare + KEYS * num_words);
            scales[k] = zeros[k] = 0;
        }
    }

    // columns: (words of a key, keys), the layout of by_words.
    void transpose_keys(int64_t kv_head) {
        find(0, kv_head, stretch.key_scales, stretch.key_zeros);
        for (int64_t k = 0; k < stretch.seen; k += PART_LANES) {
            for (int64_t w = 0; w < num_words; w += PART_LANES) {
                ahead.fetch(SQUARE_LINES);
                FloatPart square[PART_LANES];
                for (int i = 0; i < PART_LANES; i++) square[i] = load<FloatPart>(stretch.addresses[k + i] + w * 4);
                transpose(square);
                for (int i = 0; i < PART_LANES; i++) store(columns + k * num_words + (w + i) * PART_LANES, square[i]);
            }
        }
    }

    // values: (words of keys, numbers), the layout of by_words.
    void pair_values(int64_t kv_head) {
        find(1, kv_head, stretch.value_scales, stretch.value_zeros);
        for (int64_t k = 0; k < round_up(stretch.seen, KEYS_AT_ONCE); k += Word::NUMBERS) {  // padded with zeros, like the weights
            ahead.fetch(Word::NUMBERS * num_words / LANES);
            for (int64_t w = 0; w < num_words; w += PART_LANES) {
                WordPart both[Word::NUMBERS];
                Word::pair(stretch.addresses + k, w * 4, both);
                for (int i = 0; i < Word::NUMBERS; i++) {
                    const int64_t column = w * Word::NUMBERS + i * PART_LANES;
                    store(values + column * WEIGHT_WORDS + k / Word::NUMBERS * PART_LANES, both[i]);
                }
            }
        }
    }

    // Prefetches in memory order, which is fastest.
    void look_ahead(const Piece& some, int64_t key) {
        const int64_t count = std::min<int64_t>(some.position + some.count - key, KEYS);
        each_run(some.sequence, key, count, [&](int64_t, int64_t block, int64_t offset, int64_t length) {
            for (int64_t kv = 0; kv < 2; kv++)
                for (int64_t h = some.first_head; h < some.first_head + some.num_heads; h++) {
                    const char* first = a.pool.address(a.pool.first_row(block, kv, h) + offset);
                    ahead.add(first, first + length * a.pool.row_bytes());
                }
        });
    }

    // ---- rows of a head, starting at `row` ----

    void few_rows(int64_t h, int64_t row) {
        switch (rows - row) {
            case 1: return few_rows<1>(h, row);
            case 2: return few_rows<2>(h, row);
            case 3: return few_rows<3>(h, row);
            case 4: return few_rows<4>(h, row);
            case 5: return few_rows<5>(h, row);
            case 6: return few_rows<6>(h, row);
        }
    }

    template <int ROWS> void few_rows(int64_t h, int64_t row) {
        const int64_t own = h * rows + row, width = width_of(row + ROWS - 1);
        find(0, piece.first_head + h, stretch.key_scales, stretch.key_zeros);
        scores_of_few<ROWS>(q + own * num_words, num_words, stretch.addresses, width, stretch.scores[0], KEYS, ahead);
        find(1, piece.first_head + h, stretch.value_scales, stretch.value_zeros);
        for (int r = 0; r < ROWS; r++) weigh(own + r, position(row + r), r, width);
        add_values_of_few<ROWS>(stretch.weights[0], WEIGHT_WORDS, width / Word::NUMBERS, stretch.addresses, num_words,
                                stretch.shrink, out + own * padded_dim, ahead);
    }

    void many_rows(int64_t h, int64_t row) {
        transpose_keys(piece.first_head + h);
        pair_values(piece.first_head + h);
        row = tiled_rows(h, row);
        while (row < rows) {
            switch (std::min<int64_t>(rows - row, ROWS_AT_ONCE)) {
                case 1: row += some_rows<1>(h, row); break;
                case 2: row += some_rows<2>(h, row); break;
                case 3: row += some_rows<3>(h, row); break;
                case 4: case 5: row += some_rows<4>(h, row); break;
                default: row += some_rows<ROWS_AT_ONCE>(h, row);
            }
        }
    }

    template <int ROWS> int64_t some_rows(int64_t h, int64_t row) {
        const int64_t own = h * rows + row, width = width_of(row + ROWS - 1);
        by_words<ROWS>(q + own * num_words, num_words, columns, num_words, num_words, width,
                       [](int, int64_t) { return FloatPart{}; },
                       [&](int r, int64_t i, FloatPart sum) { store(&stretch.scores[r][i], sum); });
        for (int r = 0; r < ROWS; r++) weigh(own + r, position(row + r), r, width);
        by_words<ROWS>(stretch.weights[0], WEIGHT_WORDS, values, WEIGHT_WORDS, width / Word::NUMBERS, padded_dim,
                       [&](int r, int64_t i) { return load<FloatPart>(out + (own + r) * padded_dim + i) * stretch.shrink[r]; },
                       [&](int r, int64_t i, FloatPart sum) { store(out + (own + r) * padded_dim + i, sum); });
        return ROWS;
    }

#if HAS_TILES
    // Processes as many rows from `row` on as fill tiles; returns the first remaining row. Sequences with few queries
    // (decoding, with or without drafts) skip tiles, so that results do not depend on the number of queries.
    int64_t tiled_rows(int64_t h, int64_t row) {
        if (!a.by_tiles || step.query_lens[piece.sequence] < TILED_QUERIES || rows - row < TILE_ROWS) return row;
        units.use();
        for (; rows - row >= TILED_ROWS; row += TILED_ROWS) rows_of_tiles<2>(h, row);
        for (; rows - row >= TILE_ROWS; row += TILE_ROWS) rows_of_tiles<1>(h, row);
        return row;
    }

    template <int TILES> void rows_of_tiles(int64_t h, int64_t row) {
        constexpr int ROWS = TILES * TILE_ROWS;
        const int64_t own = h * rows + row, width = round_up(width_of(row + ROWS - 1), KEYS_AT_ONCE);
        for (int64_t k = 0; k < width; k += KEYS_AT_ONCE) {
            zero_four();
            Tiles<TILES>::add(q + own * num_words, num_words, columns + k * num_words, num_words, num_words);
            Tiles<TILES>::store(stretch.scores[0] + k, KEYS);
        }
        for (int r = 0; r < ROWS; r += TILE_ROWS) weigh_tile(own + r, row + r, r, width);
        for (int64_t i = 0; i < padded_dim; i += KEYS_AT_ONCE) {
            float* some = out + own * padded_dim + i;
            Tiles<TILES>::load(some, padded_dim);
            Tiles<TILES>::add(stretch.weights[0], WEIGHT_WORDS, values + i * WEIGHT_WORDS, WEIGHT_WORDS, width / Word::NUMBERS);
            Tiles<TILES>::store(some, padded_dim);
        }
    }

    // `weigh` for sixteen rows. Weights are relative to an earlier maximum: it is recomputed, and results are scaled down,
    // only when a score exceeds it by far.
    void weigh_tile(int64_t own, int64_t row, int first, int64_t width) {
        const bool is_seen = sees_all(position(row), position(row + TILE_ROWS - 1), width);
        for (int r = 0; r < TILE_ROWS; r++) {
            float* scores = stretch.scores[first + r];
            finish_scores(own + r, scores, width);
            if (!is_seen) hide(scores, position(row + r), width);
        }
        if (stretch.first != first_key(piece) && add_weights(own, first, width, TOO_MUCH)) return;
        find_most(own, first, width);
        for (int r = 0; r < TILE_ROWS; r++) {
            if (stretch.shrink[r] == 1) continue;
            shrink(totals + (own + r) * LANES, LANES, stretch.shrink[r]);
            if (is_rotated) shrink(offsets + (own + r) * LANES, LANES, stretch.shrink[r]);
            shrink(out + (own + r) * padded_dim, padded_dim, stretch.shrink[r]);
        }
        add_weights(own, first, width, std::numeric_limits<float>::infinity());
    }

    static void shrink(float* numbers, int64_t count, float by) {
        for (int64_t i = 0; i < count; i += LANES) ::store(numbers + i, load<Floats>(numbers + i) * by);
    }

    // Computes each row's maximum score so far and its shrink factor.
    void find_most(int64_t own, int first, int64_t width) {
        Floats tops[LANES];
        for (int r = 0; r < TILE_ROWS; r++) {
            const float* scores = stretch.scores[first + r];
            tops[r] = load<Floats>(scores);
            for (int64_t i = LANES; i < width; i += LANES) {
                const Floats s = load<Floats>(scores + i);
                tops[r] = s > tops[r] ? s : tops[r];
            }
        }
        transpose(tops);
        Floats top = tops[0];
        for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
        const Floats before = load<Floats>(most + own), high = top * scale, now = high > before ? high : before;
        ::store(most + own, now);
        ::store(stretch.shrink, power_of_two(before - now));
    }

    // Adds each row's weights to its total. Returns false, adding nothing, if a total would exceed `limit`.
    bool add_weights(int64_t own, int first, int64_t width, float limit) {
        Floats added[LANES], added_offsets[LANES], much = all(0.0f);
        for (int r = 0; r < TILE_ROWS; r++) {
            const float* scores = stretch.scores[first + r];
            const Floats highest = all(most[own + r]);
            added[r] = load<Floats>(totals + (own + r) * LANES);
            if (is_rotated) added_offsets[r] = load<Floats>(offsets + (own + r) * LANES);
            for (int64_t i = 0; i < width; i += KEYS_AT_ONCE) {
                Floats weights[2];
                for (int part = 0; part < 2; part++) {
                    const int64_t at = i + part * LANES;
                    weights[part] = about_power_of_two(load<Floats>(scores + at) * scale - highest);
                    added[r] += weights[part];
                    if (is_rotated) added_offsets[r] += weights[part] * load<Floats>(stretch.value_zeros + at);
                    if (a.pool.scales) weights[part] *= load<Floats>(stretch.value_scales + at);
                }
                store_narrow(stretch.weights[first + r] + i / Word::NUMBERS, weights[0], weights[1]);
            }
            much = added[r] > much ? added[r] : much;
        }
        if (greatest(much) > limit) return false;
        std::memcpy(totals + own * LANES, added, sizeof added);
        if (is_rotated) std::memcpy(offsets + own * LANES, added_offsets, sizeof added_offsets);
        return true;
    }
#else
    int64_t tiled_rows(int64_t, int64_t row) { return row; }
#endif

    // Returns the number of keys that this row sees of the stretch, in whole vectors.
    int64_t width_of(int64_t row) const {
        return round_up(std::min<int64_t>(stretch.seen, position(row) + 1 - stretch.first), LANES);
    }

    // Applies the keys' scales and zeros, then the soft cap, whose result is relative to the cap.
    void finish_scores(int64_t own, float* scores, int64_t width) const {
        if (a.pool.scales) apply_key_scales(own, scores, width);
        if (a.soft_cap) apply_soft_cap(scores, width);
    }

    __attribute__((noinline)) void apply_soft_cap(float* scores, int64_t width) const {
        const float factor = a.scale / a.soft_cap;
        for (int64_t i = 0; i < width; i += PART_LANES)
            store(scores + i, hyperbolic_tangent(load<FloatPart>(scores + i) * factor));
    }

    void apply_key_scales(int64_t own, float* scores, int64_t width) const {
        const float total = is_rotated ? sums[own] : 0;
        for (int64_t i = 0; i < width; i += PART_LANES) {
            FloatPart s = load<FloatPart>(scores + i) * load<FloatPart>(stretch.key_scales + i);
            if (is_rotated) s += load<FloatPart>(stretch.key_zeros + i) * total;
            store(scores + i, s);
        }
    }

    // Turns scores of the r-th of these rows with `width` keys into weights.
    void weigh(int64_t own, int64_t position, int r, int64_t width) {
        float* scores = stretch.scores[r];
        finish_scores(own, scores, width);
        hide(scores, position, width);
        FloatPart most_scores = load<FloatPart>(scores);
        for (int64_t i = PART_LANES; i < width; i += PART_LANES) {
            const FloatPart s = load<FloatPart>(scores + i);
            most_scores = s > most_scores ? s : most_scores;
        }
        const float before = most[own], now = std::max(before, greatest(most_scores) * scale);
        FloatPart total[PARTS], offset[PARTS] = {};
        for (int part = 0; part < PARTS; part++) {
            total[part] = load<FloatPart>(totals + own * LANES + part * PART_LANES);
            if (is_rotated) offset[part] = load<FloatPart>(offsets + own * LANES + part * PART_LANES);
        }
        stretch.shrink[r] = 1;
        if (now > before) {
            most[own] = now;
            stretch.shrink[r] = power_of_two(FloatPart{} + (before - now))[0];
            for (int part = 0; part < PARTS; part++) total[part] *= stretch.shrink[r], offset[part] *= stretch.shrink[r];
        }
        for (int64_t i = 0; i < width; i += LANES) {
            FloatPart weights[PARTS];
            for (int part = 0; part < PARTS; part++) {
                weights[part] = power_of_two(load<FloatPart>(scores + i + part * PART_LANES) * scale - now);
                total[part] += weights[part];
                if (is_rotated) offset[part] += weights[part] * load<FloatPart>(stretch.value_zeros + i + part * PART_LANES);
                if (a.pool.scales) weights[part] *= load<FloatPart>(stretch.value_scales + i + part * PART_LANES);
            }
            Word::of_weights(load<Floats>(weights), stretch.weights[r] + i / Word::NUMBERS);
        }
        for (int part = 0; part < PARTS; part++) {
            store(totals + own * LANES + part * PART_LANES, total[part]);
            if (is_rotated) store(offsets + own * LANES + part * PART_LANES, offset[part]);
        }
    }

    // Masks keys that the query does not see.
    void hide(float* scores, int64_t position, int64_t width) const {
        if (sees_all(position, position, width)) return;
        const int64_t lowest = first_seen(position);
        for (int64_t i = 0; i < width; i++)
            if (stretch.first + i < lowest || stretch.first + i > position)
                scores[i] = -std::numeric_limits<float>::infinity();
    }

    // Returns true if the queries at all these positions see `width` keys of the stretch.
    bool sees_all(int64_t position, int64_t last, int64_t width) const {
        return stretch.first >= first_seen(last) && stretch.first + width - 1 <= position;
    }
};

inline void attend(const AttentionCall& a, const Step& step, Worker& me) {
    const std::vector<Piece> pieces = cut(a, step);
    auto taken = [&] {
        const size_t i = me.take();
        return i < pieces.size() ? &pieces[i] : nullptr;
    };
    me.desk.ahead.clear();
    TileUnits units;
    for (const Piece *piece = taken(), *next = nullptr; piece; piece = next)
        Work(a, step, *piece, me.desk, units).run([&] { return next = taken(); });
}

}  // namespace
