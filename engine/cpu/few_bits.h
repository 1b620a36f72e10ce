// out = before(x) W^T with a matrix in its stored low-bit format; see formats.h.
//
// Rows are quantized at run time to 8 bits with one scale per run of inputs. Each run contributes an integer dot product
// per output, and one or two floats are added to the result:
//
//     scale of the outputs * scale of the row * dot product      minimum of the outputs * sum of the row's run
//
// If all outputs have the same code of zero, it is subtracted from the dot product instead. Rows for 8-bit floats stay in
// bf16; each group's product is summed in fp32 and scaled.
//
// Sums are in the order of the inputs for any number of rows: a row's result does not depend on the other rows. Few rows
// read codes directly from the panel; many rows read an unpacked copy in the cache, where that is faster. Both give
// identical results.
//
// Where AMX is faster, a panel is dequantized to bf16 and rows are not quantized: scales per run would cost more than
// integer tiles save.
#pragma once
#include "formats.h"
#include "matrix.h"

namespace {

// Rows per register tile, which reads the panel or an unpacked copy.
template <class Format>
constexpr int MOST_FEW_BITS_ROWS = PARTS == 1 ? (Format::PLANES > 1 ? 6 : 8) : Format::BITS > 6 && !Format::IS_FLOAT ? 2 : 4;
template <class Format>
constexpr int MOST_COPIED_ROWS = PARTS == 1 && Format::IS_FLOAT ? 12 : MOST_FEW_BITS_ROWS<Format>;

// 8-bit integers need no unpacking. Other formats are read as fast from the panel if a tile has many rows, and codes and
// scales are cheap.
template <class Format>
constexpr bool IS_WORTH_A_COPY = Format::IS_FLOAT || (Format::BITS < 8 && (PARTS > 1 || Format::IS_NESTED));
constexpr int64_t COPIED_INPUTS = 512;  // at a time: their copy fits the L1 cache
// On AVX2, 5 rows of Q4_K take 4.4 ms with a copy and 6.5 without; of Q4_0 4.3 and 3.6.
template <class Format> constexpr int ROWS_WORTH_A_COPY = Format::IS_NESTED ? MOST_FEW_BITS_ROWS<Format> + 1 : 9;

template <int BITS, int RUN, int ZERO> struct RowRun {
    float scale;
    std::conditional_t<ZERO >= 0, int32_t, float> total;  // sum of the run's quantized inputs; times -ZERO if that is a code
    typename Kept<BITS>::Code codes[RUN];
};

// Quantized rows: the runs of one row after the other.
template <int BITS, int RUN, int ZERO> struct RunRows {
    typedef RowRun<BITS, RUN, ZERO> Run;
    int64_t count, runs;
    Run* first;

    RunRows(const ProductCall& p, int64_t count, char* memory = nullptr)
        : count(count), runs(p.inputs / RUN), first(reinterpret_cast<Run*>(memory)) {}
    int64_t bytes() const { return count * runs * sizeof(Run); }

    void prepare(const ProductCall& p, int64_t begin, int64_t end, std::vector<float>& y) const {
        for (int64_t row = begin; row < end; row++) {
            prepared(p, row, y);
            for (int64_t i = 0; i < runs; i++) keep(y.data() + i * RUN, first[row * runs + i]);
        }
    }

    static void keep(const float* y, Run& run) {
        const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
        Floats most{}, none{};
        for (int i = 0; i < RUN; i += LANES) {
            const Floats v = load<Floats>(y + i), size = v < 0.0f ? -v : v;
            most = size > most ? size : most;
            none += v * 0.0f;
        }
        run.scale = std::max(greatest(most), 1e-30f) / 127 + sum(none);  // NaN if an input is not finite
        const float inverse = 1 / run.scale;
        Ints sums{};
        for (int i = 0; i < RUN; i += LANES) {
            const Ints codes = Ints(load<Floats>(y + i) * inverse + magic) - 0x4b400000;
            sums += codes;
            Kept<BITS>::keep(run.codes + i, codes);
        }
        int32_t total = 0;
        for (int i = 0; i < LANES; i++) total += sums[i];
        run.total = ZERO >= 0 ? -ZERO * total : run.scale * total;
    }
};

constexpr int64_t BYTES_AHEAD = 8192;  // prefetch distance, covers the memory latency

template <class Format> int64_t few_bits_panel_bytes(const Format& format, int64_t inputs) {
    return inputs / (format.runs() * Format::RUN) * format.span_bytes();
}

template <class Format>
using RowsOf = std::conditional_t<Format::IS_FLOAT, Rows<Bf16>, RunRows<Format::BITS, Format::RUN, Format::ZERO>>;

// Prefetches a run's codes, and with the first run the header, of the span BYTES_AHEAD later.
template <class Format> inline void fetch_after(const Format& format, const uint8_t* span, int run) {
    const uint8_t *codes = format.run_of(span, run), *line = run ? codes : span;
    for (; line < codes + Format::CODE_BYTES; line += 64) __builtin_prefetch(line + BYTES_AHEAD, 0, 2);
}

// Unpacked panel with one byte per code and plane.
template <class Format> struct Copy {
    static constexpr bool IS_FLOAT = false;
    static constexpr int BITS = Format::BITS, PLANES = Format::PLANES, ZERO = Format::ZERO, RUN = Format::RUN;
    static constexpr int HEAD = (ZERO < 0 ? 2 : 1) * sizeof(Floats), BYTES = HEAD + PLANES * RUN * LANES;

    explicit Copy(const Format&) {}
    static constexpr int runs() { return 1; }
    static constexpr int span_bytes() { return BYTES; }
    static CodePart codes(const uint8_t* span, int, int g, int part, int plane) {
        return load<CodePart>(span + HEAD + plane * (RUN * LANES) + 64 * g + part * PART_BYTES);
    }
    static FloatPart scale(const uint8_t* span, int, int part) { return load<FloatPart>(span + part * PART_BYTES); }
    static FloatPart least(const uint8_t* span, int, int part, FloatPart) {
        return load<FloatPart>(span + sizeof(Floats) + part * PART_BYTES);
    }

    static constexpr int64_t MOST_BYTES = COPIED_INPUTS / RUN * BYTES;
    static void make(const Format& format, const uint8_t* panel, int64_t inputs, uint8_t* copy) {
        for (int64_t span = 0; span < inputs / (format.runs() * RUN); span++, panel += format.span_bytes())
            for (int run = 0; run < format.runs(); run++, copy += BYTES) {
                fetch_after(format, panel, run);
                for (int part = 0; part < PARTS; part++) {
                    const FloatPart scale = format.scale(panel, run, part);
                    store(copy + part * PART_BYTES, scale);
                    if constexpr (ZERO < 0)
                        store(copy + sizeof(Floats) + part * PART_BYTES, format.least(panel, run, part, scale));
                    for (int plane = 0; plane < PLANES; plane++)
#pragma GCC unroll 8
                        for (int g = 0; g < RUN / 4; g++)
                            store(copy + HEAD + plane * (RUN * LANES) + 64 * g + part * PART_BYTES,
                                  format.codes(panel, run, g, part, plane));
                }
            }
    }
};

// Unpacked panel of 8-bit floats: each group's scales, then its inputs as bf16.
template <class Format> struct WordsCopy {
    static constexpr bool IS_FLOAT = true;
    static constexpr int RUN = Format::RUN, RUN_BYTES = RUN * LANES * sizeof(bf16);
    int group_runs;

    explicit WordsCopy(const Format& format) : group_runs(format.group_runs) {}
    int runs() const { return group_runs; }
    int span_bytes() const { return sizeof(Floats) + group_runs * RUN_BYTES; }
    static void words(const uint8_t* span, int run, int g, int part, WordPart (&pairs)[2]) {
        const uint8_t* from = span + sizeof(Floats) + run * RUN_BYTES + 128 * g + part * PART_BYTES;
        pairs[0] = load<WordPart>(from), pairs[1] = load<WordPart>(from + 64);
    }
    static FloatPart scale(const uint8_t* span, int, int part) { return load<FloatPart>(span + part * PART_BYTES); }

    static constexpr int64_t MOST_BYTES = COPIED_INPUTS / RUN * (sizeof(Floats) + RUN_BYTES);
    static void make(const Format& format, const uint8_t* panel, int64_t inputs, uint8_t* copy) {
        for (int64_t span = 0; span < inputs / (format.runs() * RUN); span++, panel += format.span_bytes())
            for (int run = 0; run < format.runs(); run++) {
                fetch_after(format, panel, run);
                for (int part = 0; part < PARTS; part++) {
                    if (run % format.group_runs == 0) store(copy + part * PART_BYTES, format.scale(panel, run, part));
                    uint8_t* to = copy + (run % format.group_runs ? 0 : sizeof(Floats)) + part * PART_BYTES;
                    for (int g = 0; g < RUN / 4; g++) {
                        WordPart pairs[2];
                        format.words(panel, run, g, part, pairs);
                        store(to + 128 * g, pairs[0]), store(to + 128 * g + 64, pairs[1]);
                    }
                }
                copy += (run % format.group_runs ? 0 : sizeof(Floats)) + RUN_BYTES;
            }
    }
};

template <class Format> using CopyOf = std::conditional_t<Format::IS_FLOAT, WordsCopy<Format>, Copy<Format>>;
template <class Format> constexpr bool COMES_FROM_MEMORY = true;
template <class Format> constexpr bool COMES_FROM_MEMORY<Copy<Format>> = false;
template <class Format> constexpr bool COMES_FROM_MEMORY<WordsCopy<Format>> = false;

// Adds the products of rows from `row` on, inputs [first, end), with a panel from that input on, run by run.
template <class Format, int ROWS, class Rows>
inline void add_runs(const Format& format, const Rows& rows, int64_t row, int64_t first, int64_t end, const uint8_t* panel,
                     FloatPart (&sums)[ROWS][PARTS]) {
    const int runs = format.runs();
    const auto *x = rows.first + row * rows.runs + first / Format::RUN, *last = x + (end - first) / Format::RUN;
    for (; x < last; panel += format.span_bytes())
        for (int run = 0; run < runs; run++, x++) {
            if constexpr (COMES_FROM_MEMORY<Format>) fetch_after(format, panel, run);
            IntPart whole[Format::PLANES][ROWS][PARTS] = {};
            if constexpr (Format::ZERO >= 0)
                for (int r = 0; r < ROWS; r++)
                    for (int i = 0; i < PARTS; i++) whole[0][r][i] += x[r * rows.runs].total;
            dots<Format::BITS, Format::RUN / 4>(
                whole, [&](int g, int part, int plane) { return format.codes(panel, run, g, part, plane); },
                [&](int r) { return x[r * rows.runs].codes; });
            for (int i = 0; i < PARTS; i++) {
                const FloatPart scale = format.scale(panel, run, i);
                for (int r = 0; r < ROWS; r++) {
                    IntPart sum = whole[0][r][i];
                    if constexpr (Format::PLANES == 2) sum = (sum << 7) + whole[1][r][i];
                    sums[r][i] += __builtin_convertvector(sum, FloatPart) * (scale * x[r * rows.runs].scale);
                }
                if constexpr (Format::ZERO < 0) {
                    const FloatPart least = format.least(panel, run, i, scale);
                    for (int r = 0; r < ROWS; r++) sums[r][i] += least * x[r * rows.runs].total;
                }
            }
        }
}

// With 8-bit floats. Also summed by run, because with one row several runs at a time hide the latency.
template <class Format, int ROWS>
inline void add_runs(const Format& format, const Rows<Bf16>& rows, int64_t row, int64_t first, int64_t end, const uint8_t* panel,
                     FloatPart (&sums)[ROWS][PARTS]) {
    const int runs = format.runs();
    const Bf16::Input *x = rows.x + row * rows.stride + first, *last = x + (end - first);
    for (; x < last; panel += format.span_bytes())
        for (int run = 0; run < runs; run++) {
            if constexpr (COMES_FROM_MEMORY<Format>) fetch_after(format, panel, run);
            FloatPart some[ROWS][PARTS] = {};
#pragma GCC unroll 8
            for (int g = 0; g < Format::RUN / 4; g++, x += 4) {
                WordPart first[PARTS], second[PARTS];
                for (int i = 0; i < PARTS; i++) {
                    WordPart pairs[2];
                    format.words(panel, run, g, i, pairs);
                    first[i] = pairs[0], second[i] = pairs[1];
                }
                Bf16::add<ROWS, PARTS>(some, x, rows.stride, first);
                Bf16::add<ROWS, PARTS>(some, x + 2, rows.stride, second);
            }
            for (int i = 0; i < PARTS; i++) {
                const FloatPart scale = format.scale(panel, run, i);
                for (int r = 0; r < ROWS; r++) sums[r][i] += some[r][i] * scale;
            }
        }
}

// Adds the products of rows [row, end), inputs [first, last), with a panel from that input on, to sums.
template <int MOST, class Format, class Rows>
inline void add_rows(const Format& format, const Rows& rows, int64_t row, int64_t end, int64_t first, int64_t last,
                     const uint8_t* panel, Floats* sums) {
    while (row < end) {
        const int count = first_rows<MOST>(end - row, [&](auto some) {
            FloatPart own[some][PARTS];
            std::memcpy(own, sums, sizeof own);
            add_runs<Format, some>(format, rows, row, first, last, panel, own);
            std::memcpy(sums, own, sizeof own);
        });
        row += count, sums += count;
    }
}

// As add_rows for all inputs, by way of unpacked copies of the panel.
template <class Format, class Rows>
inline void add_copied(const Format& format, const Rows& rows, int64_t row, int64_t end, int64_t inputs, const uint8_t* panel,
                       Floats* sums) {
    typedef CopyOf<Format> Copied;
    alignas(64) uint8_t copy[Copied::MOST_BYTES];
    for (int64_t first = 0, last; first < inputs; first = last) {
        last = std::min(first + COPIED_INPUTS, inputs);
        Copied::make(format, panel, last - first, copy);
        add_rows<MOST_COPIED_ROWS<Format>>(Copied(format), rows, row, end, first, last, copy, sums);
        panel += few_bits_panel_bytes(format, last - first);
    }
}

template <class Format> int64_t few_bits_scratch_bytes(const Format&, const ProductCall& p, int64_t num_rows) {
    return is_by_tiles<Bf16>(p, num_rows) ? Rows<Bf16>(p, num_rows).bytes() : RowsOf<Format>(p, num_rows).bytes();
}

// Dequantizes a part of a group: the numbers of its four inputs. scale: includes the outputs' factors.
template <class Format>
inline void numbers_of(const Format& format, const uint8_t* span, int run, int g, int part, FloatPart scale, FloatPart least,
                       FloatPart (&numbers)[4]) {
    if constexpr (Format::IS_FLOAT) {
        WordPart pairs[2];
        format.words(span, run, g, part, pairs);
        for (int k = 0; k < 4; k++)
            numbers[k] = FloatPart(k % 2 ? pairs[k / 2] & 0xffff0000u : pairs[k / 2] << 16) * scale;
    } else {
        constexpr int ZERO = std::max(0, Format::ZERO);
        const WordPart codes = WordPart(format.codes(span, run, g, part, 0));
        for (int k = 0; k < 4; k++) {
            IntPart whole = IntPart(codes >> 8 * k & 255u) - ZERO;
            if constexpr (Format::PLANES == 2)
                whole = (whole << 7) + IntPart(WordPart(format.codes(span, run, g, part, 1)) >> 8 * k & 255u);
            numbers[k] = __builtin_convertvector(whole, FloatPart) * scale + least;
        }
    }
}

// The scale and minimum of a part of a run. factors: of the panel's outputs, or null.
template <class Format>
inline std::pair<FloatPart, FloatPart> scale_and_least(const Format& format, const uint8_t* span, int run, int part, const float* factors) {
    const FloatPart factor = factors ? load<FloatPart>(factors + part * PART_LANES) : FloatPart{} + 1.0f;
    const FloatPart scale = format.scale(span, run, part);
    if constexpr (Format::ZERO < 0) return {scale * factor, format.least(span, run, part, scale) * factor};
    return {scale * factor, FloatPart{}};
}

#if HAS_TILES

// Dequantizes a panel to the bf16 layout of matrix.h.
template <class Format> void widen_panel(const Format& format, const uint8_t* panel, const float* factors, int64_t inputs, uint32_t* words) {
    for (int64_t span = 0; span < inputs / (format.runs() * Format::RUN); span++, panel += format.span_bytes())
        for (int run = 0; run < format.runs(); run++) {
            const auto [scale, least] = scale_and_least(format, panel, run, 0, factors);
#pragma GCC unroll 8
            for (int g = 0; g < Format::RUN / 4; g++, words += 2 * LANES) {
                Floats numbers[4];
                numbers_of(format, panel, run, g, 0, scale, least, numbers);
                store(words, pairs_of(numbers[0], numbers[1]));
                store(words + LANES, pairs_of(numbers[2], numbers[3]));
            }
        }
}

template <class Format> void multiply_widened(const Format& format, const ProductCall& p, const Step& step, Worker& me) {
    constexpr int64_t WIDENED_BYTES = 128 << 10;  // dequantized at a time
    const int64_t panel_bytes = few_bits_panel_bytes(format, p.inputs), widened_bytes = Rows<Bf16>::panel_bytes(p);
    const Rows<Bf16> rows = prepared_rows<Rows<Bf16>>(p, step.tokens, panel_bytes, me);
    const int64_t most_panels = std::max<int64_t>(2, WIDENED_BYTES / widened_bytes / 2 * 2);
    std::vector<Floats>& memory = me.desk.copy;
    memory.resize(std::max<size_t>(memory.size(), most_panels * widened_bytes / sizeof(Floats)));
    char* copy = reinterpret_cast<char*>(memory.data());
    each_tiled_block(p, rows, most_panels, me, [&](int64_t row, int64_t last_row, int64_t panel, int64_t last) {
        for (int64_t i = panel; i < last; i++)
            widen_panel(format, static_cast<const uint8_t*>(p.panels) + i * panel_bytes, p.scales ? p.scales + i * LANES : nullptr,
                        p.inputs, reinterpret_cast<uint32_t*>(copy + (i - panel) * widened_bytes));
        tiled_rows_of<Bf16>(p, rows, row, last_row, panel, last, copy);
    });
}

#endif

template <class Format> void multiply_few_bits(const Format& format, const ProductCall& p, const Step& step, Worker& me) {
#if HAS_TILES
    if (is_by_tiles<Bf16>(p, step.tokens)) return multiply_widened(format, p, step, me);
#endif
    const int64_t panels = round_up(p.outputs, LANES) / LANES, panel_bytes = few_bits_panel_bytes(format, p.inputs);
    const auto rows = prepared_rows<RowsOf<Format>>(p, step.tokens, panel_bytes, me);
    for (int64_t row = 0; row < rows.count; row += BLOCK_ROWS) {
        const int64_t end = std::min(row + BLOCK_ROWS, rows.count);
        const bool is_copied = IS_WORTH_A_COPY<Format> && end - row >= ROWS_WORTH_A_COPY<Format>;
        for (int64_t i = me.first(panels); i < me.end(panels); i++) {
            const uint8_t* panel = static_cast<const uint8_t*>(p.panels) + i * panel_bytes;
            Floats sums[BLOCK_ROWS];
            std::fill(sums, sums + (end - row), Floats{});
            if (is_copied) add_copied(format, rows, row, end, p.inputs, panel, sums);
            else add_rows<MOST_FEW_BITS_ROWS<Format>>(format, rows, row, end, 0, p.inputs, panel, sums);
            for (int64_t r = row; r < end; r++) {
                const Floats value = sums[r - row];
                put(p, p.scales ? value * load<Floats>(p.scales + i * LANES) : value, r, i * LANES);
            }
        }
    }
}

// ---- dequantized rows of a matrix, such as token embeddings ----

struct StoredRows {
    int32_t format, span, group;
    const uint8_t *panels, *levels;
    const float* factors;
    int64_t inputs, count;
    const int64_t* rows;  // (count)
    bf16* out;            // (count, inputs)
};

template <class Format> void widen_row(const Format& format, const StoredRows& stored, int64_t row, bf16* out) {
    const uint8_t* span = stored.panels + row / LANES * few_bits_panel_bytes(format, stored.inputs);
    const float* factors = stored.factors ? stored.factors + row / LANES * LANES : nullptr;
    const int part = row % LANES / PART_LANES, lane = row % PART_LANES;
    for (int64_t i = 0; i < stored.inputs; i += format.runs() * Format::RUN, span += format.span_bytes())
        for (int run = 0; run < format.runs(); run++) {
            const auto [scale, least] = scale_and_least(format, span, run, part, factors);
#pragma GCC unroll 8
            for (int g = 0; g < Format::RUN / 4; g++) {
                FloatPart numbers[4];
                numbers_of(format, span, run, g, part, scale, least, numbers);
                for (int k = 0; k < 4; k++) *out++ = narrow(numbers[k][lane]);
            }
        }
}

inline void widen_rows(const StoredRows& stored) {
    with_format(stored, [&](const auto& format) {
        for (int64_t i = 0; i < stored.count; i++) widen_row(format, stored, stored.rows[i], stored.out + i * stored.inputs);
    });
}

}  // namespace
