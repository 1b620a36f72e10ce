// Recurrence of a matrix per head: gated delta rule and Mamba-2. Formulas: engine/kernels/recurrent/linear_recurrence.py.
// Short sequences advance token by token, reading each state from memory once; longer ones in chunks of sixteen.
#pragma once
#include "numbers.h"
#include "team.h"

namespace {

struct RecurrenceCall {
    Kind kind;
    int32_t is_fp32;                                      // rows, dt, beta and out; otherwise they are bf16
    int32_t is_delta;
    const void* rows;                                     // (tokens, channels), token stride row_stride
    int64_t row_stride;
    const void* dt;                                       // (tokens, heads), token stride dt_stride
    int64_t dt_stride;
    const void* beta;                                     // the same; of the delta rule
    int64_t beta_stride;
    const float *rates, *dt_bias, *skips;                 // (heads); skips may be null
    float min_dt, max_dt;
    int64_t heads, key_heads, key_dim, value_dim;         // key_dim: a multiple of 8; value_dim: of 16
    int64_t query_offset, key_offset, value_offset;       // channels
    void* out;                                            // (tokens, heads, value_dim)
    float* states;                                        // (slots, heads, key_dim, value_dim), slot stride state_stride
    int64_t state_stride;
};

constexpr int64_t CHUNK = LANES, LONGEST_RUN = 16;
constexpr int MOST_VECTORS = PARTS == 1 ? 4 : 2, SUM_ROWS = PARTS == 1 ? 4 : 2;  // sums that fit the registers
// For two rows of sums. Whole rows of a state of 128 features are read at 1.25 times the speed of half rows.
constexpr int RUN_VECTORS = PARTS == 1 ? 8 : 2;

// sums[r] += sum over d of a[r, d] b[d], for vectors b of NV times sixteen columns.
template <int ROWS, int NV>
inline void add_products(Floats (&sums)[ROWS][NV], const float* a, int64_t a_row, int64_t a_step, const float* b,
                         int64_t b_step, int64_t depth) {
    for (int64_t d = 0; d < depth; d++, a += a_step, b += b_step) {
        Floats right[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; n++) right[n] = load<Floats>(b + n * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const Floats left = all(a[r * a_row]);
#pragma GCC unroll 8
            for (int n = 0; n < NV; n++) sums[r][n] += left * right[n];
        }
    }
}

// One head of one sequence, or some columns of its state.
template <class Number> class HeadRecurrence {
public:
    HeadRecurrence(const RecurrenceCall& c, const Step& step, Desk& desk, int64_t head, int64_t first, int64_t columns)
        : c(c), step(step), head(head), first(first), columns(columns), width(round_up(c.key_dim, LANES)) {
        const int64_t numbers = 3 * CHUNK * width + 2 * CHUNK * CHUNK + 3 * CHUNK * MOST_VECTORS * LANES;
        desk.state.resize(std::max<size_t>(desk.state.size(), c.key_dim * columns / LANES));
        desk.chunk.resize(std::max<size_t>(desk.chunk.size(), numbers / LANES));
        state = reinterpret_cast<float*>(desk.state.data());
        keys = reinterpret_cast<float*>(desk.chunk.data());
        queries = keys + CHUNK * width;
        by_feature = queries + CHUNK * width;
        key_scores = by_feature + CHUNK * width;
        query_scores = key_scores + CHUNK * CHUNK;
        known = query_scores + CHUNK * CHUNK;
        u = known + 2 * CHUNK * MOST_VECTORS * LANES;
    }

    void advance(int64_t token, int64_t count, int64_t read) {
        if (count <= LONGEST_RUN) return run(token, count, read);
        load_state(read);
        for (int64_t end = token + count, n; token < end; token += n) {
            for (n = 1; n < std::min(CHUNK, end - token) && step.state_writes[token + n - 1] < 0;) n++;
            read_chunk(token, n);
            score(n);
            each_block<MOST_VECTORS>([&](auto vectors, int64_t column) { update<vectors()>(token, n, column); });
            if (const int64_t write = step.state_writes[token + n - 1]; write >= 0) store_state(write);
        }
    }

private:
    struct Gate {
        double log_decay;
        float factor;  // beta, or dt
    };

    const RecurrenceCall& c;
    const Step& step;
    const int64_t head, first, columns, width;  // width: of rows of keys and queries
    float *state;                                // (key_dim, columns)
    float *keys, *queries;                       // (CHUNK, width)
    float *by_feature;                           // (width, CHUNK): keys
    float *key_scores, *query_scores;            // (CHUNK, CHUNK): products with keys, decayed
    float *known, *u;                            // (2 CHUNK, block), (CHUNK, block)
    float past[CHUNK], rest[CHUNK], factor[CHUNK];

    float* slot(int64_t index) const {
        return c.states + index * c.state_stride + head * c.key_dim * c.value_dim + first;
    }
    const Number* row(int64_t token, int64_t offset) const {
        return static_cast<const Number*>(c.rows) + token * c.row_stride + offset;
    }
    const Number* values(int64_t token) const { return row(token, c.value_offset + head * c.value_dim + first); }
    Number* out(int64_t token) const {
        return static_cast<Number*>(c.out) + (token * c.heads + head) * c.value_dim + first;
    }

    template <int MOST, class Block> void each_block(const Block& block, int64_t column = 0) const {
        for (; column + MOST * LANES <= columns; column += MOST * LANES) block(std::integral_constant<int, MOST>(), column);
        if constexpr (MOST > 1) each_block<(MOST > MOST_VECTORS ? MOST_VECTORS : 1)>(block, column);
    }

    Gate gate(int64_t token) const {
        const auto at = [&](const void* of, int64_t stride) { return one(static_cast<const Number*>(of)[token * stride + head]); };
        float dt = softplus(at(c.dt, c.dt_stride) + c.dt_bias[head]), factor;
        if (c.is_delta) factor = as_stored<Number>(1.0f / (1.0f + std::exp(-at(c.beta, c.beta_stride))));
        else factor = dt = std::min(std::max(dt, c.min_dt), c.max_dt);
        return {-double(c.rates[head] * dt), factor};
    }

    // Reads a key or a query, padded with zeros to `width`.
    void read_row(int64_t token, int64_t offset, float scale, float* to) const {
        const Number* const x = row(token, offset + head / (c.heads / c.key_heads) * c.key_dim);
        Floats squares{};
        for (int64_t i = 0; i < width; i += LANES) {
            const Floats v = wide(x + i, c.key_dim - i);
            squares += v * v;
            store(to + i, v);
        }
        if (!c.is_delta) return;
        scale /= std::sqrt(sum(squares) + 1e-6f);
        for (int64_t i = 0; i < width; i += LANES) store(to + i, load<Floats>(to + i) * scale);
    }
    void read_key(int64_t token, float* to) const { read_row(token, c.key_offset, 1.0f, to); }
    void read_query(int64_t token, float* to) const { read_row(token, c.query_offset, 1.0f / std::sqrt(float(c.key_dim)), to); }

    void run(int64_t token, int64_t count, int64_t read) {
        const float* from = read < 0 ? nullptr : slot(read);
        int64_t from_step = c.value_dim;
        for (int64_t end = token + count; token < end; token++) {
            const int64_t write = step.state_writes[token];
            float* to = write >= 0 ? slot(write) : token + 1 < end ? state : nullptr;
            const int64_t to_step = write >= 0 ? c.value_dim : columns;
            read_key(token, keys);
            read_query(token, queries);
            const Gate now = gate(token);
            const float decay = std::exp(now.log_decay);
            each_block<RUN_VECTORS>([&](auto vectors, int64_t column) {
                const auto at = [&](auto* place) { return place ? place + column : nullptr; };
                one_token<vectors()>(token, column, now.factor, decay, at(from), from_step, at(to), to_step);
            });
            from = to;
            from_step = to_step;
        }
    }

    template <int NV>
    void one_token(int64_t token, int64_t column, float factor, float decay, const float* from, int64_t from_step, float* to,
                   int64_t to_step) const {
        Floats products[2][NV]{}, change[NV];
        // Keys and queries are adjacent rows of a matrix.
        if (from) add_products(products, keys, queries - keys, 1, from, from_step, c.key_dim);
        Floats matches{};
        for (int64_t i = 0; i < width; i += LANES) matches += load<Floats>(keys + i) * load<Floats>(queries + i);
        const float match = sum(matches), skip = c.skips ? c.skips[head] : 0.0f;
        for (int n = 0; n < NV; n++) {
            const Floats v = wide(values(token) + column + n * LANES);
            change[n] = factor * (c.is_delta ? v - decay * products[0][n] : v);
            put(out(token) + column + n * LANES, decay * products[1][n] + match * change[n] + skip * v);
        }
        if (!to) return;
        for (int64_t k = 0; k < c.key_dim; k++) {
            const Floats key = all(keys[k]);
#pragma GCC unroll 8
            for (int n = 0; n < NV; n++) {
                Floats v = key * change[n];
                if (from) v += decay * load<Floats>(from + k * from_step + n * LANES);
                store(to + k * to_step + n * LANES, v);
            }
        }
    }

    void load_state(int64_t read) {
        if (read < 0) std::fill_n(state, c.key_dim * columns, 0.0f);
        else
            for (int64_t k = 0; k < c.key_dim; k++) std::copy_n(slot(read) + k * c.value_dim, columns, state + k * columns);
    }
    void store_state(int64_t write) const {
        for (int64_t k = 0; k < c.key_dim; k++) std::copy_n(state + k * columns, columns, slot(write) + k * c.value_dim);
    }

    // Reads n tokens; rows after them become zero.
    void read_chunk(int64_t token, int64_t n) {
        double sums[CHUNK], total = 0;
        std::fill_n(keys, 3 * CHUNK * width, 0.0f);
        for (int64_t i = 0; i < n; i++) {
            const Gate now = gate(token + i);
            sums[i] = total += now.log_decay;
            factor[i] = now.factor;
            read_key(token + i, keys + i * width);
            read_query(token + i, queries + i * width);
            for (int64_t k = 0; k < c.key_dim; k++) by_feature[k * CHUNK + i] = keys[i * width + k];
        }
        std::fill_n(key_scores, 2 * CHUNK * CHUNK, 0.0f);
        for (int64_t i = 0; i < n; i++) {
            past[i] = std::exp(sums[i]);
            rest[i] = std::exp(total - sums[i]);
            // Decays between tokens, until `score` multiplies them.
            for (int64_t j = 0; j <= i; j++) query_scores[i * CHUNK + j] = float(sums[i] - sums[j]);
        }
        for (int64_t i = n; i < CHUNK; i++) past[i] = rest[i] = factor[i] = 0;
    }

    void score(int64_t n) {
        Ints lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        for (int64_t i = 0; i < n; i += SUM_ROWS) {
            Floats by_key[SUM_ROWS][1]{}, by_query[SUM_ROWS][1]{};
            if (c.is_delta) add_products(by_key, keys + i * width, width, 1, by_feature, CHUNK, c.key_dim);
            add_products(by_query, queries + i * width, width, 1, by_feature, CHUNK, c.key_dim);
            for (int64_t r = 0; r < SUM_ROWS; r++) {
                const Floats decays = exponential(load<Floats>(query_scores + (i + r) * CHUNK));
                const Ints last = lane - lane + int32_t(i + r);
                store(query_scores + (i + r) * CHUNK, lane <= last ? decays * by_query[r][0] : Floats{});
                store(key_scores + (i + r) * CHUNK, lane < last ? decays * by_key[r][0] * factor[i + r] : Floats{});
            }
        }
    }

    // Computes the outputs of n tokens for NV vectors of columns, and the state after them.
    template <int NV> void update(int64_t token, int64_t n, int64_t column) {
        constexpr int64_t BLOCK = NV * LANES;
        float* const block = state + column;
        const float skip = c.skips ? c.skips[head] : 0.0f;
        for (int64_t i = c.is_delta ? 0 : CHUNK; i < CHUNK + n; i += SUM_ROWS) {
            if (i < CHUNK && i >= n) continue;
            Floats sums[SUM_ROWS][NV]{};
            add_products(sums, keys + i * width, width, 1, block, columns, c.key_dim);
            for (int r = 0; r < SUM_ROWS; r++)
                for (int v = 0; v < NV; v++) store(known + (i + r) * BLOCK + v * LANES, sums[r][v]);
        }
        for (int64_t i = 0; i < n; i++) solve<NV>(token, i, column);
        for (int64_t i = 0; i < n; i += SUM_ROWS) {
            Floats sums[SUM_ROWS][NV]{};
            add_products(sums, query_scores + i * CHUNK, CHUNK, 1, u, BLOCK, std::min<int64_t>(i + SUM_ROWS, n));
            for (int64_t r = 0; r < SUM_ROWS && i + r < n; r++)
                for (int v = 0; v < NV; v++) {
                    const Floats old = load<Floats>(known + (CHUNK + i + r) * BLOCK + v * LANES);
                    const Floats x = wide(values(token + i + r) + column + v * LANES);
                    put(out(token + i + r) + column + v * LANES, sums[r][v] + past[i + r] * old + skip * x);
                }
        }
        for (int64_t i = 0; i < n; i++)
            for (int v = 0; v < NV; v++) {
                float* const change = u + i * BLOCK + v * LANES;
                store(change, load<Floats>(change) * rest[i]);
            }
        for (int64_t k = 0; k < c.key_dim; k += SUM_ROWS) {
            Floats sums[SUM_ROWS][NV];
            for (int r = 0; r < SUM_ROWS; r++)
                for (int v = 0; v < NV; v++) sums[r][v] = past[n - 1] * load<Floats>(block + (k + r) * columns + v * LANES);
            add_products(sums, keys + k, 1, width, u, BLOCK, n);
            for (int r = 0; r < SUM_ROWS; r++)
                for (int v = 0; v < NV; v++) store(block + (k + r) * columns + v * LANES, sums[r][v]);
        }
    }

    // Computes row i of u from the rows before it.
    template <int NV> void solve(int64_t token, int64_t i, int64_t column) {
        constexpr int64_t BLOCK = NV * LANES;
        Floats row[NV];
        for (int v = 0; v < NV; v++) {
            const Floats x = wide(values(token + i) + column + v * LANES);
            row[v] = factor[i] * (c.is_delta ? x - past[i] * load<Floats>(known + i * BLOCK + v * LANES) : x);
        }
        for (int64_t j = 0; c.is_delta && j < i; j++) {
            const Floats score = all(key_scores[i * CHUNK + j]);
            for (int v = 0; v < NV; v++) row[v] -= score * load<Floats>(u + j * BLOCK + v * LANES);
        }
        for (int v = 0; v < NV; v++) store(u + i * BLOCK + v * LANES, row[v]);
    }
};

template <class Number> void recur_heads(const RecurrenceCall& c, const Step& step, Worker& me) {
    const int64_t blocks = round_up(c.value_dim, MOST_VECTORS * LANES) / (MOST_VECTORS * LANES), heads = step.sequences * c.heads;
    // Columns are split only if there are too few heads for the threads, because each part reads keys and queries again.
    const int64_t parts = std::clamp<int64_t>(2 * me.threads / std::max<int64_t>(heads, 1), 1, blocks);
    int64_t sequence = 0, token = 0;
    for (int64_t item; (item = me.take()) < heads * parts;) {
        for (; sequence < item / (c.heads * parts); sequence++) token += step.query_lens[sequence];
        if (!step.query_lens[sequence]) continue;
        const int64_t head = item / parts % c.heads, part = item % parts;
        const int64_t first = blocks * part / parts * MOST_VECTORS * LANES;
        const int64_t end = std::min(blocks * (part + 1) / parts * MOST_VECTORS * LANES, c.value_dim);
        HeadRecurrence<Number>(c, step, me.desk, head, first, end - first)
            .advance(token, step.query_lens[sequence], step.state_reads[sequence]);
    }
}

inline void recur(const RecurrenceCall& c, const Step& step, Worker& me) {
    if (c.is_fp32) recur_heads<float>(c, step, me);
    else recur_heads<bf16>(c, step, me);
}

}  // namespace
