// softmax(q k / sqrt(D)) v over paged keys and values, read where they lie.
//
// The work is cut into (sequence, some kv heads, some positions). The query heads that share a kv head, at those positions,
// are that head's rows of a piece: each key is fetched and turned once for all of them. For each tile of 64 keys:
//
//   1  keys become columns, so that a vector holds one query's scores with 16 keys
//   2  six rows at a time: their scores; what that makes of each row's greatest score, and of its weights so far; then
//      out = out * shrink + p v, while the weights are in the first cache
//
// Sums run over keys in the order of their positions, in tiles that begin at multiples of 64, and a tile in which a query
// sees nothing changes nothing: what it gets depends neither on the queries beside it nor on how its prompt was cut.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "team.h"
#include "words.h"

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
    int64_t sequence;
    int64_t first_head, num_heads;  // of the keys and values
    int64_t token;                  // of the step, of its first query
    int64_t position, count;        // of its queries
};

constexpr int64_t POSITIONS = 64, PIECE_ROWS = 256;  // of one piece at most: queries and outputs stay in the second cache
constexpr int KEYS = 64;           // of one tile
constexpr int KEY_WORDS = KEYS / Word::NUMBERS;  // of a row's weights

// What happens to a tile of one head's keys; nothing of it is kept.
struct Tile {
    const char* rows[KEYS];             // each key, or value, as words
    alignas(64) float key_scales[KEYS], value_scales[KEYS];
    alignas(64) float scores[ROWS_AT_ONCE][KEYS];
    alignas(64) uint32_t weights[ROWS_AT_ONCE][KEY_WORDS];
    float shrink[ROWS_AT_ONCE];         // of what the row has so far
    int64_t first, seen;                // its first key, and how many keys of it any row sees
};

class Work {
public:
    Work(const AttentionCall& a, const Step& step, const Piece& piece, Desk& desk)
        : a(a), step(step), piece(piece), group(a.q_heads / a.pool.kv_heads), dim(a.pool.head_dim),
          words(Word::count(dim)), wide(words * Word::NUMBERS), rows(piece.count * group),
          end(piece.position + piece.count), scale(1.44269504f / std::sqrt(float(dim))), ahead(desk.ahead) {
        auto room = [](std::vector<Floats>& memory, int64_t count) {
            memory.resize(std::max<size_t>(memory.size(), (count + LANES - 1) / LANES));
            return reinterpret_cast<float*>(memory.data());
        };
        const int64_t all_rows = piece.num_heads * rows;
        q = reinterpret_cast<uint32_t*>(room(desk.q, all_rows * words));
        out = room(desk.out, all_rows * wide);
        totals = room(desk.totals, all_rows * LANES);
        most = room(desk.most, all_rows);
        columns = reinterpret_cast<uint32_t*>(room(desk.columns, words * KEYS));
        values = reinterpret_cast<uint32_t*>(room(desk.values, KEY_WORDS * wide));
        spare = reinterpret_cast<uint32_t*>(room(desk.spare, (KEYS + 1) * words));
    }

    void run() {
        const int64_t lowest = a.window ? std::max<int64_t>(0, piece.position - a.window + 1) : 0;
        tile.first = lowest / KEYS * KEYS;
        look_ahead(tile.first);
        fetch_ahead(lines_ahead);
        begin();
        for (; tile.first < end; tile.first += KEYS) {
            tile.seen = std::min<int64_t>(KEYS, end - tile.first);
            look_ahead(tile.first + KEYS);
            for (int64_t h = 0; h < piece.num_heads; h++) {
                turn_keys(piece.first_head + h);
                turn_values(piece.first_head + h);
                // Rows that see none of it come first
                int64_t row = std::max<int64_t>(0, tile.first - piece.position) * group;
                while (row < rows) row += some_rows(h * rows, row);
            }
        }
        finish();
    }

private:
    const AttentionCall& a;
    const Step& step;
    const Piece& piece;
    const int64_t group, dim, words, wide;  // words: of a key; wide: numbers in so many words
    const int64_t rows, end;                // rows: of each head; end: of the keys
    const float scale;                      // of scores, as powers of two
    uint32_t *q, *columns, *values, *spare;
    float *out, *totals, *most;             // of all heads' rows
    Tile tile;
    std::vector<Ahead>& ahead;              // what of the next tile is still to be fetched, from `next_ahead` on
    size_t next_ahead = 0;
    int64_t lines_ahead = 0, share_ahead = 0;

    int64_t position(int64_t row) const { return piece.position + row / group; }
    int64_t head(int64_t h, int64_t row, int64_t stride) const {  // where a row's query begins, and its output
        return (piece.token + row / group) * stride + ((piece.first_head + h) * group + row % group) * dim;
    }

    void begin() {
        const int64_t all_rows = piece.num_heads * rows;
        for (int64_t h = 0; h < piece.num_heads; h++)
            for (int64_t r = 0; r < rows; r++) Word::of_numbers(a.q + head(h, r, a.q_stride), dim, q + (h * rows + r) * words);
        std::fill_n(out, all_rows * wide, 0.0f);
        std::fill_n(totals, all_rows * LANES, 0.0f);
        std::fill_n(most, all_rows, std::numeric_limits<float>::lowest());  // -inf less itself would be no number
        std::fill_n(spare + KEYS * words, words, 0u);
    }

    void finish() {
        for (int64_t h = 0; h < piece.num_heads; h++)
            for (int64_t r = 0; r < rows; r++) {
                const float total = sum(load<Floats>(totals + (h * rows + r) * LANES));
                Word::to_numbers(out + (h * rows + r) * wide, total, dim, a.out + head(h, r, a.q_heads * dim));
            }
    }

    // ---- keys and values, as the products want them ----

    // Of the keys [key, key + count) each run that lies in one block: f(how many come before it, its block, where in that,
    // its length).
    template <class F> void each_run(int64_t key, int64_t count, const F& f) const {
        const int64_t* table = step.tables + piece.sequence * step.table_width;
        const int64_t size = a.pool.block_size;
        for (int64_t k = 0, length; k < count; k += length) {
            length = std::min(size - (key + k) % size, count - k);
            f(k, table[(key + k) / size], (key + k) % size, length);
        }
    }

    // The tile's keys (kind 0) or values (kind 1) as words, and what they are to be multiplied by.
    void find(int64_t kind, int64_t kv_head, float* scales) {
        each_run(tile.first, tile.seen, [&](int64_t first, int64_t block, int64_t offset, int64_t length) {
            const int64_t row = a.pool.first_row(block, kind, kv_head) + offset;
            for (int64_t i = 0; i < length; i++) {
                tile.rows[first + i] = Word::of_row(a.pool, row + i, spare + (first + i) * words);
                if (a.pool.scales) scales[first + i] = widen(a.pool.scales[row + i]);
            }
        });
        for (int64_t k = tile.seen; k < KEYS; k++) {
            tile.rows[k] = reinterpret_cast<const char*>(spare + KEYS * words);
            scales[k] = 0;
        }
    }

    // columns: (words, keys)
    void turn_keys(int64_t kv_head) {
        find(0, kv_head, tile.key_scales);
        for (int64_t k = 0; k < tile.seen; k += PART_LANES) {
            fetch_ahead(share_ahead * PART_LANES);
            for (int64_t w = 0; w < words; w += PART_LANES) {
                FloatPart square[PART_LANES];
                for (int i = 0; i < PART_LANES; i++) square[i] = load<FloatPart>(tile.rows[k + i] + w * 4);
                transpose(square);
                for (int i = 0; i < PART_LANES; i++) store(columns + (w + i) * KEYS + k, square[i]);
            }
        }
    }

    // values: (words of keys, numbers)
    void turn_values(int64_t kv_head) {
        find(1, kv_head, tile.value_scales);
        for (int64_t k = 0; k < round_up(tile.seen, LANES); k += Word::NUMBERS) {  // zeros behind the last, as weights are
            fetch_ahead(share_ahead * Word::NUMBERS);
            for (int64_t w = 0; w < words; w += PART_LANES)
                Word::pair(tile.rows + k, w * 4, values + k / Word::NUMBERS * wide + w * Word::NUMBERS);
        }
    }

    // ---- what is fetched before it is needed, in the order in which it lies: so memory is quickest ----

    void look_ahead(int64_t key) {
        ahead.clear();
        next_ahead = 0;
        lines_ahead = 0;
        each_run(key, std::clamp<int64_t>(end - key, 0, KEYS), [&](int64_t, int64_t block, int64_t offset, int64_t length) {
            for (int64_t kind = 0; kind < 2; kind++)
                for (int64_t h = piece.first_head; h < piece.first_head + piece.num_heads; h++) {
                    const char* first = a.pool.address(a.pool.first_row(block, kind, h) + offset);
                    ahead.push_back({first, first + length * a.pool.row_bytes()});
                    lines_ahead += length * a.pool.row_bytes() / 64;
                }
        });
        share_ahead = lines_ahead / (2 * KEYS * piece.num_heads) + 1;  // with each key, and each value
    }

    void fetch_ahead(int64_t lines) {
        while (lines > 0 && next_ahead < ahead.size())
            if (!ahead[next_ahead].fetch(lines)) next_ahead++;
    }

    // ---- a few rows ----

    // Of a head, whose rows begin at `first` among all heads'.
    int64_t some_rows(int64_t first, int64_t row) {
        switch (std::min<int64_t>(rows - row, ROWS_AT_ONCE)) {
            case 1: return few_rows<1>(first, row);
            case 2: return few_rows<2>(first, row);
            case 3: return few_rows<3>(first, row);
            case 4: case 5: return few_rows<4>(first, row);
            default: return few_rows<ROWS_AT_ONCE>(first, row);
        }
    }

    template <int ROWS> int64_t few_rows(int64_t first, int64_t row) {
        const int64_t seen = std::min<int64_t>(tile.seen, position(row + ROWS - 1) + 1 - tile.first);  // by the last of them
        const int64_t width = round_up(seen, LANES), num_words = width / Word::NUMBERS, own = first + row;
        by_words<ROWS>(q + own * words, words, columns, KEYS, words, width, [](int, int64_t) { return FloatPart{}; },
                       [&](int r, int64_t i, FloatPart sum) { store(&tile.scores[r][i], sum); });
        for (int r = 0; r < ROWS; r++) weigh(own + r, position(row + r), r, width);
        by_words<ROWS>(tile.weights[0], KEY_WORDS, values, wide, num_words, wide,
                       [&](int r, int64_t i) { return load<FloatPart>(out + (own + r) * wide + i) * tile.shrink[r]; },
                       [&](int r, int64_t i, FloatPart sum) { store(out + (own + r) * wide + i, sum); });
        return ROWS;
    }

    // From the scores of the r-th of these rows with `width` keys to its weights.
    void weigh(int64_t own, int64_t position, int r, int64_t width) {
        float* scores = tile.scores[r];
        if (a.pool.scales)
            for (int64_t i = 0; i < width; i += PART_LANES)
                store(scores + i, load<FloatPart>(scores + i) * load<FloatPart>(tile.key_scales + i));
        hide(scores, position, width);
        FloatPart most_scores = load<FloatPart>(scores);
        for (int64_t i = PART_LANES; i < width; i += PART_LANES) {
            const FloatPart s = load<FloatPart>(scores + i);
            most_scores = s > most_scores ? s : most_scores;
        }
        const float before = most[own], now = std::max(before, greatest(most_scores) * scale);
        FloatPart total[PARTS];
        for (int part = 0; part < PARTS; part++) total[part] = load<FloatPart>(totals + own * LANES + part * PART_LANES);
        tile.shrink[r] = 1;
        if (now > before) {
            most[own] = now;
            tile.shrink[r] = power_of_two(FloatPart{} + (before - now))[0];
            for (int part = 0; part < PARTS; part++) total[part] *= tile.shrink[r];
        }
        for (int64_t i = 0; i < width; i += LANES) {
            FloatPart weights[PARTS];
            for (int part = 0; part < PARTS; part++) {
                weights[part] = power_of_two(load<FloatPart>(scores + i + part * PART_LANES) * scale - now);
                total[part] += weights[part];
                if (a.pool.scales) weights[part] *= load<FloatPart>(tile.value_scales + i + part * PART_LANES);
            }
            Word::of_weights(load<Floats>(weights), tile.weights[r] + i / Word::NUMBERS);
        }
        for (int part = 0; part < PARTS; part++) store(totals + own * LANES + part * PART_LANES, total[part]);
    }

    // Keys behind the query, or too far before it.
    void hide(float* scores, int64_t position, int64_t width) const {
        const int64_t lowest = a.window ? position - a.window + 1 : 0;
        if (tile.first >= lowest && tile.first + width - 1 <= position) return;
        for (int64_t i = 0; i < width; i++)
            if (tile.first + i < lowest || tile.first + i > position) scores[i] = -std::numeric_limits<float>::infinity();
    }
};

constexpr int64_t FEW = 16;  // queries, for which keys and values take longer to come than to be used

// Where there are enough of them, pieces with few queries have all heads: a block's keys and values lie beside each other.
inline std::vector<Piece> cut(const AttentionCall& a, const Step& step) {
    const int64_t kv_heads = a.pool.kv_heads, heads_of_few = step.sequences < 3 * step.threads ? 1 : kv_heads;
    const int64_t positions = std::clamp<int64_t>(PIECE_ROWS * kv_heads / a.q_heads, 1, POSITIONS);
    std::vector<Piece> pieces;
    for (int64_t s = 0, token = 0; s < step.sequences; token += step.query_lens[s++])
        for (int64_t q = 0, count; q < step.query_lens[s]; q += count) {
            count = std::min(positions, step.query_lens[s] - q);
            const int64_t num_heads = count < FEW ? heads_of_few : 1;
            for (int64_t h = 0; h < kv_heads; h += num_heads)
                pieces.push_back({s, h, num_heads, token + q, step.context_lens[s] - step.query_lens[s] + q, count});
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
