// out = before(x) W^T: a packed matrix times up to a few thousand rows.
//
// A matrix (O outputs, I inputs) is packed into panels of 16 outputs. A panel is a sequence of 32-bit groups of inputs: two
// bf16 or four int8, each group for all 16 outputs:
//
//     panel p, group g:   W[16p][2g] W[16p][2g+1]   W[16p+1][2g] W[16p+1][2g+1]   ...   W[16p+15][2g+1]
//
// Vector lanes are outputs: one load fetches 16 outputs, sums never cross lanes, a panel is read once from start to end, and
// the instructions for bf16 pairs and int8 quads use the same layout.
// Every output is summed over the inputs in one order for any number of rows: a row's result does not depend on the other
// rows.
#pragma once
#include "product.h"
#include "tiles.h"
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

namespace {

constexpr int MOST_ROWS = PARTS == 1 ? 12 : 6;  // rows per register tile

// ---- weight types: storage of a row, and the product of a tile of rows with a few panels ----

struct Bf16 {
    static constexpr int GROUP = 2;
#ifdef HAS_PAIRS_OF_BF16
    typedef bf16 Input;
#else
    typedef float Input;
#endif
    static void keep(const float* y, int64_t inputs, Input* kept, float&) {
#ifdef HAS_PAIRS_OF_BF16
        int64_t i = 0;
        for (; i + LANES <= inputs; i += LANES) store(kept + i, narrow(load<Floats>(y + i)));
        for (; i < inputs; i++) kept[i] = narrow(y[i]);
#else
        std::copy_n(y, inputs, kept);
#endif
    }
    typedef Floats Sum;
    typedef FloatPart SumPart;
    template <int ROWS, int COUNT>
    static inline void add(SumPart (&sums)[ROWS][COUNT], const Input* x, int64_t stride, const WordPart (&w)[COUNT]) {
#ifdef HAS_PAIRS_OF_BF16
        for (int r = 0; r < ROWS; r++) {
            uint32_t pair;
            std::memcpy(&pair, x + r * stride, 4);
            for (int p = 0; p < COUNT; p++) sums[r][p] = add_pairs(sums[r][p], w[p], pair);
        }
#else
        FloatPart half[COUNT];
        for (int p = 0; p < COUNT; p++) half[p] = FloatPart(w[p] << 16);
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < COUNT; p++) sums[r][p] += half[p] * x[r * stride];
        for (int p = 0; p < COUNT; p++) half[p] = FloatPart(w[p] & 0xffff0000u);
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < COUNT; p++) sums[r][p] += half[p] * x[r * stride + 1];
#endif
    }
    static inline Floats value(Sum sum, const ProductCall&, int64_t, float) { return sum; }
};

// Rows are quantized too, each with its own scale: codes of 7 bits and a sign. On units that multiply unsigned by signed
// bytes, they are offset to unsigned.
struct Int8 {
    static constexpr int GROUP = 4;
#ifdef __ARM_FEATURE_DOTPROD
    static constexpr int SHIFT = 0;
#else
    static constexpr int SHIFT = 128;
#endif
    typedef uint8_t Input;
    static void keep(const float* y, int64_t inputs, Input* kept, float& scale) {
        Floats sizes{}, nones{};
        int64_t i = 0;
        for (; i + LANES <= inputs; i += LANES) {
            const Floats v = load<Floats>(y + i), size = v < 0.0f ? -v : v;
            sizes = size > sizes ? size : sizes;
            nones += v * 0.0f;
        }
        float most = greatest(sizes), none = sum(nones);
        for (; i < inputs; i++) most = std::max(most, std::fabs(y[i])), none += y[i] * 0.0f;
        scale = std::max(most, 1e-30f) / 127 + none;  // NaN if an input is not finite
        const float inverse = 1 / scale;
        for (int64_t i = 0; i < inputs; i++) kept[i] = uint8_t(int32_t(y[i] * inverse + 128.5f) - 128 + SHIFT);
    }
    typedef Ints Sum;
    typedef IntPart SumPart;
    template <int ROWS, int COUNT>
    static inline void add(SumPart (&sums)[ROWS][COUNT], const Input* x, int64_t stride, const WordPart (&w)[COUNT]) {
        for (int r = 0; r < ROWS; r++) {
#if defined(__ARM_FEATURE_DOTPROD)
            const int8x16_t four = int8x16_t(vdupq_n_s32(load<int32_t>(x + r * stride)));
            for (int p = 0; p < COUNT; p++)
                sums[r][p] = IntPart(vdotq_s32(int32x4_t(sums[r][p]), int8x16_t(w[p]), four));
#elif defined(__AVX512VNNI__)
            int32_t four;
            std::memcpy(&four, x + r * stride, 4);
            for (int p = 0; p < COUNT; p++)
                sums[r][p] = Ints(_mm512_dpbusd_epi32(__m512i(sums[r][p]), _mm512_set1_epi32(four), __m512i(w[p])));
#else
            for (int k = 0; k < 4; k++)
                for (int p = 0; p < COUNT; p++)
                    sums[r][p] += (IntPart(w[p] << (24 - 8 * k)) >> 24) * int32_t(x[r * stride + k]);
#endif
        }
    }
    static inline Floats value(Sum sum, const ProductCall& p, int64_t first, float scale) {
        const Ints shifted = sum - SHIFT * load<Ints>(p.sums + first);
        return __builtin_convertvector(shifted, Floats) * (load<Floats>(p.scales + first) * scale);
    }
};

// ---- products ----

// Prepared rows: their scales, then their inputs.
template <class Weights> struct Rows {
    typedef typename Weights::Input Input;
    int64_t count, groups, stride;
    float* scales;
    Input* x;

    Rows(const ProductCall& p, int64_t count, char* memory = nullptr)
        : count(count), groups(round_up(p.inputs, Weights::GROUP) / Weights::GROUP), stride(stride_of(groups)), scales(reinterpret_cast<float*>(memory)),
          x(reinterpret_cast<Input*>(memory + scales_bytes())) {}
    int64_t scales_bytes() const { return round_up((count + SPARE_TILED_ROWS) * sizeof(float), 64); }
    // Pads the stride, because rows that are read together would evict each other from the same cache sets.
    static int64_t stride_of(int64_t groups) {
        constexpr int64_t LINE = 64 / sizeof(Input);
        const int64_t inputs = groups * Weights::GROUP;
        return inputs % (2 * LINE) == 0 ? inputs + LINE : inputs;
    }
    static int64_t panel_bytes(const ProductCall& p) { return round_up(p.inputs, Weights::GROUP) / Weights::GROUP * 64; }
    const Input* at(int64_t row, int64_t input) const { return x + row * stride + input; }
    int64_t bytes() const { return scales_bytes() + (count + SPARE_TILED_ROWS) * stride * sizeof(Input); }

    void prepare(const ProductCall& p, int64_t first, int64_t end, std::vector<float>& y) const {
        for (int64_t row = first; row < end; row++) {
            prepared(p, row, y);
            Weights::keep(y.data(), p.inputs, x + row * stride, scales[row]);
            std::fill(x + row * stride + p.inputs, x + row * stride + groups * Weights::GROUP, Input{});
        }
    }
};

// Uses as many panels at a time as registers hold: more sums hide the latency. With AVX-512, a few rows read one panel at a
// time, because memory is read fastest in one stream. (Zen 4, one thread, 1,024 inputs: 1 row 23 GB/s with 8 panels, 31 with
// one; 4 rows 21 and 28; 6 rows 20 and 14.)
template <int ROWS>
constexpr int PANELS_OF = PARTS > 1 ? std::max(1, (REGISTERS - 1) / (PARTS * (ROWS + 1))) : ROWS > 4 ? 30 / (ROWS + 2) : 1;

// Prefetch distance over all panels of a tile; covers the memory latency. (Zen 5, two threads, 12 rows by 134 million
// weights: 10.5 ms without prefetch, 7.4 with 32 lines, 6.8 with 64 to 128.)
constexpr int LINES_AHEAD = 64;

// ahead: a panel to prefetch if FETCHES. Otherwise this tile's own panels are prefetched, which may come from memory.
template <class Weights, int ROWS, int PANELS, bool FETCHES>
inline void tile(const ProductCall& p, const Rows<Weights>& rows, int64_t row, int64_t panel, const char* ahead) {
    constexpr int COUNT = PANELS * PARTS, EACH_AHEAD = LINES_AHEAD / PANELS;
    const int64_t groups = rows.groups;
    const uint32_t* w = static_cast<const uint32_t*>(p.panels) + panel * groups * LANES;
    const typename Weights::Input* x = rows.x + row * rows.stride;
    typename Weights::SumPart sums[ROWS][COUNT] = {};
#pragma GCC unroll 4
    for (int64_t g = 0; g < groups; g++) {
        if constexpr (FETCHES) {
            __builtin_prefetch(ahead + g * 64, 0, 2);
        } else {  // near the end of a tile, prefetch the next one
            const uint32_t* later =
                w + (g + EACH_AHEAD < groups ? g + EACH_AHEAD : (PANELS - 1) * groups + g + EACH_AHEAD) * LANES;
            for (int i = 0; i < PANELS; i++) __builtin_prefetch(later + i * groups * LANES);
        }
        WordPart group[COUNT];
        for (int i = 0; i < COUNT; i++)
            group[i] = load<WordPart>(w + (i / PARTS * groups + g) * LANES + i % PARTS * PART_LANES);
        Weights::template add<ROWS, COUNT>(sums, x + g * Weights::GROUP, rows.stride, group);
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < PANELS; i++) {
            const auto sum = load<typename Weights::Sum>(&sums[r][i * PARTS]);
            put(p, Weights::value(sum, p, (panel + i) * LANES, rows.scales[row + r]), row + r, (panel + i) * LANES);
        }
}

// ahead: panels to prefetch, one with each tile.
template <class Weights, int ROWS, int PANELS = PANELS_OF<ROWS>>
inline void panels(const ProductCall& p, const Rows<Weights>& rows, int64_t row, int64_t first, int64_t end, Ahead& ahead) {
    for (; first + PANELS <= end; first += PANELS)
        if (ahead.line < ahead.end) {
            tile<Weights, ROWS, PANELS, true>(p, rows, row, first, ahead.line);
            ahead.line += Rows<Weights>::panel_bytes(p);
        } else {
            tile<Weights, ROWS, PANELS, false>(p, rows, row, first, nullptr);
        }
    if constexpr (PANELS > 1)
        if (first < end) panels<Weights, ROWS, PANELS / 2>(p, rows, row, first, end, ahead);
}

// The first rows load their panels from memory. While the other rows use them, the next panels are prefetched.
template <class Weights>
inline void rows_of(const ProductCall& p, const Rows<Weights>& rows, int64_t row, int64_t end, int64_t first, int64_t last,
                    Ahead next) {
    Ahead none;
    for (const int64_t begin = row; row < end;)
        row += first_rows<MOST_ROWS>(end - row, [&](auto some) {
            panels<Weights, some>(p, rows, row, first, last, row == begin ? none : next);
        });
}

// Calls f(row, end row, panel, end panel, end of the following panels) for this thread's work: a share of the panels with all
// rows; with many rows, blocks taken from a shared queue, so that a descheduled thread takes fewer.
template <class F>
inline void each_block(int64_t rows, int64_t panels, int64_t rows_at_once, int64_t at_once, Worker& me, const F& f) {
    if (rows <= BLOCK_ROWS) {
        for (int64_t panel = me.first(panels), end = me.end(panels), last; panel < end; panel = last) {
            last = std::min(panel + at_once, end);
            f(0, rows, panel, last, std::min(last + at_once, end));
        }
        return;
    }
    const int64_t across = (panels + at_once - 1) / at_once, blocks = (rows + rows_at_once - 1) / rows_at_once * across;
    for (int64_t i; (i = me.take()) < blocks;) {
        const int64_t row = i / across * rows_at_once, panel = i % across * at_once;
        const int64_t last = std::min(panel + at_once, panels);
        f(row, std::min(row + rows_at_once, rows), panel, last, last);
    }
}

// Size of the panels that all rows of a block use tile by tile; fits the L2 cache.
constexpr int64_t BYTES_AT_ONCE = 320 << 10;

template <class Weights> bool is_by_tiles(const ProductCall& p, int64_t num_rows) {
    return HAS_TILES && p.inputs % (TILE_ROWS * Weights::GROUP) == 0 && num_rows >= std::max<int64_t>(1, p.tile_rows);
}

#if HAS_TILES

// Calls f(row, end row, panel, end panel) for this thread's work, with at most most_panels panels. Processors with AMX have
// 2 MiB of L2 and fill it slowly from L3, so panels should be read once.
template <class Rows, class F>
inline void each_tiled_block(const ProductCall& p, const Rows& rows, int64_t most_panels, Worker& me, const F& f) {
    constexpr int64_t ROWS_BYTES = 1 << 20, PIECES = 6;
    const int64_t panels = round_up(p.outputs, LANES) / LANES;
    const int64_t most_rows = std::max<int64_t>(BLOCK_ROWS, ROWS_BYTES / (rows.groups * 4));
    const int64_t down = (rows.count + most_rows - 1) / most_rows;
    const int64_t rows_at_once = round_up((rows.count + down - 1) / down, TILED_ROWS);
    const int64_t share = panels * down / (PIECES * me.threads);  // small enough that all threads finish together
    const int64_t at_once = std::max<int64_t>(2, std::min(most_panels, share) / 2 * 2);
    TileUnits units;
    units.use(rows.count);
    each_block(rows.count, panels, rows_at_once, at_once, me,
               [&](int64_t row, int64_t last_row, int64_t panel, int64_t last, int64_t) { f(row, last_row, panel, last); });
}

template <class Weights> void multiply_by_tiles(const ProductCall& p, const Rows<Weights>& rows, Worker& me) {
    const int64_t panel_bytes = Rows<Weights>::panel_bytes(p);
    each_tiled_block(p, rows, BYTES_AT_ONCE / panel_bytes, me, [&](int64_t row, int64_t last_row, int64_t panel, int64_t last) {
        tiled_rows_of<Weights>(p, rows, row, last_row, panel, last, static_cast<const char*>(p.panels) + panel * panel_bytes);
    });
}

#endif

template <class Weights> void multiply(const ProductCall& p, const Step& step, Worker& me) {
    const Rows<Weights> rows = prepared_rows<Rows<Weights>>(p, step.tokens, Rows<Weights>::panel_bytes(p), me);
    const int64_t panels = round_up(p.outputs, LANES) / LANES, bytes = Rows<Weights>::panel_bytes(p);
    const int64_t at_once = std::max<int64_t>(2, BYTES_AT_ONCE / bytes / 2 * 2);
#if HAS_TILES
    if (is_by_tiles<Weights>(p, rows.count)) return multiply_by_tiles(p, rows, me);
#endif
    each_block(rows.count, panels, BLOCK_ROWS, at_once, me, [&](int64_t row, int64_t last_row, int64_t panel, int64_t last, int64_t next) {
        const char* memory = static_cast<const char*>(p.panels);
        rows_of(p, rows, row, last_row, panel, last, {memory + last * bytes, memory + next * bytes});
    });
}

}  // namespace
