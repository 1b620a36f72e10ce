// out = before(x) W^T with a matrix in its stored low-bit format; see formats.h.
//
// Rows are quantized at run time to 8 bits with one scale per run of inputs. Each run contributes an integer dot product
// per output (12 bits and a sign where weights take 16 bits), and one or two floats are added to the result:
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
// integer tiles save. Drafts do not count as rows there, because they must not change an answer.
#pragma once
#include "formats.h"
#include "matrix.h"

namespace {

// Formats that are multiplied in words, pairs of 16 bits.
template <class Format> constexpr bool IS_WIDE = !Format::IS_FLOAT && (Format::BITS > 8);
template <class Format> constexpr bool HAS_WORDS = Format::IS_FLOAT || IS_WIDE<Format>;

// Rows per register tile, which reads the panel or an unpacked copy.
template <class Format>
constexpr int MOST_FEW_BITS_ROWS = PARTS == 1 ? 8 : Format::BITS > 6 && !Format::IS_FLOAT ? 2 : 4;
template <class Format>
constexpr int MOST_COPIED_ROWS = PARTS == 1 && Format::IS_FLOAT ? 12 : MOST_FEW_BITS_ROWS<Format>;

// 8-bit integers need no unpacking. Other formats are read as fast from the panel if a tile has many rows, and codes and
// scales are cheap.
template <class Format>
constexpr bool IS_WORTH_A_COPY = HAS_WORDS<Format> || (Format::BITS < 8 && (PARTS > 1 || Format::IS_NESTED));
constexpr int64_t COPIED_INPUTS = 512;  // at a time: their copy fits the L1 cache
// With many rows, at a time: their copies and sums fit the L2 cache, beside the rows' inputs.
constexpr int64_t COPIED_PANELS = 12, COPIED_ROWS = 512;
// On AVX2, 5 rows of Q4_K take 4.4 ms with a copy and 6.5 without; of Q4_0 4.3 and 3.6.
template <class Format> constexpr int ROWS_WORTH_A_COPY = Format::IS_NESTED ? MOST_FEW_BITS_ROWS<Format> + 1 : 9;

template <int BITS, int RUN, int ZERO> struct RowRun {
    float scale;
    std::conditional_t<ZERO >= 0, int32_t, float> total;  // sum of the run's quantized inputs; times -ZERO if that is a code
    typename Kept<BITS>::Code codes[RUN];
};

// Quantized rows: the runs of one row after the other.
template <int BITS, int RUN, int ZERO> struct RunRows {
    static constexpr float MOST = BITS > 8 ? 4095 : 127;  // a run's dot product fits 32 bits
    typedef RowRun<BITS, RUN, ZERO> Run;
    int64_t count, runs;
    Run* first;

    RunRows(const ProductCall& p, int64_t count, char* memory = nullptr)
        : count(count), runs(p.inputs / RUN), first(reinterpret_cast<Run*>(memory)) {}
    const Run* at(int64_t row, int64_t input) const { return first + row * runs + input / RUN; }
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
        run.scale = std::max(greatest(most), 1e-30f) / MOST + sum(none);  // NaN if an input is not finite
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

// Unpacked panel with one or two bytes per code.
template <class Format> struct Copy {
    static constexpr bool IS_FLOAT = false;
    static constexpr int BITS = Format::BITS, ZERO = Format::ZERO, RUN = Format::RUN, GROUP_BYTES = IS_WIDE<Format> ? 128 : 64;
    static constexpr int HEAD = (ZERO < 0 ? 2 : 1) * sizeof(Floats), BYTES = HEAD + RUN / 4 * GROUP_BYTES;

    explicit Copy(const Format&) {}
    static constexpr int runs() { return 1; }
    static constexpr int span_bytes() { return BYTES; }
    static CodePart codes(const uint8_t* span, int, int g, int part) {
        return load<CodePart>(span + HEAD + GROUP_BYTES * g + part * PART_BYTES);
    }
    static void words(const uint8_t* span, int, int g, int part, WordPart (&pairs)[2]) {
        const uint8_t* from = span + HEAD + GROUP_BYTES * g + part * PART_BYTES;
        pairs[0] = load<WordPart>(from), pairs[1] = load<WordPart>(from + 64);
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
#pragma GCC unroll 8
                    for (int g = 0; g < RUN / 4; g++) {
                        uint8_t* to = copy + HEAD + GROUP_BYTES * g + part * PART_BYTES;
                        if constexpr (IS_WIDE<Format>) {
                            WordPart pairs[2];
                            format.words(panel, run, g, part, pairs);
                            store(to, pairs[0]), store(to + 64, pairs[1]);
                        } else {
                            store(to, format.codes(panel, run, g, part));
                        }
                    }
                }
            }
    }
};

// Unpacked panel of 8-bit floats as bf16: each group's scales, then its inputs. IS_SCALED: scales, which are powers of two, are
// multiplied into the inputs instead, which stay exact within the range of bf16.
template <class Format, bool IS_SCALED> struct WordsCopy {
    static constexpr bool IS_FLOAT = true;
    static constexpr int RUN = Format::RUN, RUN_BYTES = RUN * LANES * sizeof(bf16), HEAD = IS_SCALED ? 0 : sizeof(Floats);
    int group_runs;

    explicit WordsCopy(const Format& format) : group_runs(format.group_runs) {}
    int runs() const { return group_runs; }
    int span_bytes() const { return HEAD + group_runs * RUN_BYTES; }
    static void words(const uint8_t* span, int run, int g, int part, WordPart (&pairs)[2]) {
        const uint8_t* from = span + HEAD + run * RUN_BYTES + 128 * g + part * PART_BYTES;
        pairs[0] = load<WordPart>(from), pairs[1] = load<WordPart>(from + 64);
    }
    static FloatPart scale(const uint8_t* span, int, int part) { return load<FloatPart>(span + part * PART_BYTES); }

    static constexpr int64_t MOST_BYTES = COPIED_INPUTS / RUN * (HEAD + RUN_BYTES);
    static void make(const Format& format, const uint8_t* panel, int64_t inputs, uint8_t* copy) {
        for (int64_t span = 0; span < inputs / (format.runs() * RUN); span++, panel += format.span_bytes())
            for (int run = 0; run < format.runs(); run++, copy += RUN_BYTES) {
                fetch_after(format, panel, run);
                if (run % format.group_runs == 0) {
                    for (int part = 0; part < PARTS && !IS_SCALED; part++)
                        store(copy + part * PART_BYTES, format.scale(panel, run, part));
                    copy += HEAD;
                }
                for (int part = 0; part < PARTS; part++) {
                    const FloatPart scale = format.scale(panel, run, part);
                    for (int g = 0; g < RUN / 4; g++) {
                        WordPart pairs[2];
                        format.words(panel, run, g, part, pairs);
                        for (int k = 0; k < 2; k++)
                            store(copy + 128 * g + 64 * k + part * PART_BYTES, IS_SCALED ? times(pairs[k], scale) : pairs[k]);
                    }
                }
            }
    }

private:
    static WordPart times(WordPart pairs, FloatPart scale) {
        const WordPart first = WordPart(FloatPart(pairs << 16) * scale), second = WordPart(FloatPart(pairs & 0xffff0000u) * scale);
        return first >> 16 | (second & 0xffff0000u);
    }
};

// Sums of products that are added up by group change so rarely that they need no registers.
template <class Format> constexpr bool IS_BY_GROUP = false;
template <class Number, class Scale, int ZERO, int RUN>
constexpr bool IS_BY_GROUP<Grouped<Number, Scale, ZERO, RUN>> = Number::IS_FLOAT && !Grouped<Number, Scale, ZERO, RUN>::HAS_POWERS;

// A format whose runs are unpacked for a first tile of rows, and written to a copy for the other tiles meanwhile: between
// products, unpacking takes little time. Each run must be read once, in order.
template <class Format, class Copied> struct Copying : Format {
    mutable uint8_t* copy;

    Copying(const Format& format, uint8_t* copy) : Format(format), copy(copy) {}
    void words(const uint8_t* span, int run, int g, int part, WordPart (&pairs)[2]) const {
        Format::words(span, run, g, part, pairs);
        int at = Copied::HEAD + 128 * g;
        if constexpr (Format::IS_FLOAT) at += run % Format::group_runs * Copied::RUN_BYTES;
        store(copy + at + part * PART_BYTES, pairs[0]), store(copy + at + 64 + part * PART_BYTES, pairs[1]);
    }
    FloatPart scale(const uint8_t* span, int run, int part) const {
        const FloatPart scale = Format::scale(span, run, part);
        store(copy + part * PART_BYTES, scale);
        if (part == PARTS - 1 && is_last(run)) copy += Copied(*this).span_bytes();
        return scale;
    }

private:
    bool is_last(int run) const {
        if constexpr (Format::IS_FLOAT) return IS_BY_GROUP<Format> || (run + 1) % Format::group_runs == 0;
        return true;
    }
};

template <class Format, bool IS_SCALED> constexpr bool IS_BY_GROUP<WordsCopy<Format, IS_SCALED>> = IS_BY_GROUP<Format>;
template <class Format, class Copied> constexpr bool IS_BY_GROUP<Copying<Format, Copied>> = IS_BY_GROUP<Format>;

// With many rows it pays to multiply scales into the inputs.
template <class Format, bool HAS_MANY_ROWS>
using CopyOf = std::conditional_t<Format::IS_FLOAT, WordsCopy<Format, HAS_MANY_ROWS && Format::HAS_POWERS>, Copy<Format>>;
template <class Format> constexpr bool COMES_FROM_MEMORY = true;
template <class Format> constexpr bool COMES_FROM_MEMORY<Copy<Format>> = false;
template <class Format, bool IS_SCALED> constexpr bool COMES_FROM_MEMORY<WordsCopy<Format, IS_SCALED>> = false;

// Prefetches a run of a row, or results, which come from L3 if many rows share copies.
inline void fetch_run(const void* x, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(x) + at, 0, 2);
}

// Adds the products of rows from `row` on, inputs [first, end), with a panel from that input on, run by run. next: a row to
// prefetch, with copies.
template <class Format, int ROWS, class Rows>
inline void add_runs(const Format& format, const Rows& rows, int64_t row, int64_t next, int64_t first, int64_t end, const uint8_t* panel,
                     FloatPart (&sums)[ROWS][PARTS]) {
    const int runs = format.runs();
    const auto *x = rows.at(row, first), *last = rows.at(row, end), *ahead = rows.at(next, first);
    for (; x < last; panel += format.span_bytes())
        for (int run = 0; run < runs; run++, x++) {
            if constexpr (COMES_FROM_MEMORY<Format>) fetch_after(format, panel, run);
            else fetch_run(ahead++, sizeof *ahead);
            IntPart whole[ROWS][PARTS] = {};
            if constexpr (Format::ZERO > 0)
                for (int r = 0; r < ROWS; r++)
                    for (int i = 0; i < PARTS; i++) whole[r][i] += x[r * rows.runs].total;
            const auto row_of = [&](int r) { return x[r * rows.runs].codes; };
            if constexpr (IS_WIDE<Format>)
                wide_dots<Format::RUN / 4>(
                    whole, [&](int g, int part, WordPart(&pairs)[2]) { format.words(panel, run, g, part, pairs); }, row_of);
            else
                dots<Format::BITS, Format::RUN / 4>(
                    whole, [&](int g, int part) { return format.codes(panel, run, g, part); }, row_of);
            for (int i = 0; i < PARTS; i++) {
                const FloatPart scale = format.scale(panel, run, i);
                for (int r = 0; r < ROWS; r++)
                    sums[r][i] += __builtin_convertvector(whole[r][i], FloatPart) * (scale * x[r * rows.runs].scale);
                if constexpr (Format::ZERO < 0) {
                    const FloatPart least = format.least(panel, run, i, scale);
                    for (int r = 0; r < ROWS; r++) sums[r][i] += least * x[r * rows.runs].total;
                }
            }
        }
}

template <class Format> constexpr bool IS_SCALED = false;
template <class Format> constexpr bool IS_SCALED<WordsCopy<Format, true>> = true;

// Adds the products of a run's inputs from `x` on.
template <class Format, int ROWS>
inline void add_run(const Format& format, const Bf16::Input* x, int64_t stride, const uint8_t* span, int run, FloatPart (&some)[ROWS][PARTS]) {
    const auto add = [&](int g) {
        WordPart first[PARTS], second[PARTS];
        for (int i = 0; i < PARTS; i++) {
            WordPart pairs[2];
            format.words(span, run, g, i, pairs);
            first[i] = pairs[0], second[i] = pairs[1];
        }
        Bf16::add<ROWS, PARTS>(some, x + 4 * g, stride, first);
        Bf16::add<ROWS, PARTS>(some, x + 4 * g + 2, stride, second);
    };
    if constexpr (!COMES_FROM_MEMORY<Format>) {  // unrolled further, it takes up to 15 % longer
#pragma GCC unroll 2
        for (int g = 0; g < Format::RUN / 4; g++) add(g);
    } else {
#pragma GCC unroll 8
        for (int g = 0; g < Format::RUN / 4; g++) add(g);
    }
}

// With 8-bit floats. Also summed by run, because with one row several runs at a time hide the latency; then by group, unless
// scales are powers of two, whose products may be scaled before or after they are added.
template <class Format, int ROWS>
inline void add_runs(const Format& format, const Rows<Bf16>& rows, int64_t row, int64_t next, int64_t first, int64_t end, const uint8_t* panel,
                     FloatPart (&sums)[ROWS][PARTS]) {
    const int runs = format.runs(), group_runs = IS_BY_GROUP<Format> ? format.group_runs : 1;
    const Bf16::Input *x = rows.at(row, first), *last = rows.at(row, end);
    const int64_t to_next = rows.at(next, 0) - rows.at(row, 0);
    for (; x < last; panel += format.span_bytes())
        for (int run = 0; run < runs;) {
            const int begin = run;
            FloatPart group[ROWS][PARTS] = {};
            for (const int end = run + group_runs; run < end; run++, x += Format::RUN) {
                if constexpr (COMES_FROM_MEMORY<Format>) fetch_after(format, panel, run);
                else fetch_run(x + to_next, Format::RUN * sizeof *x);
                FloatPart some[ROWS][PARTS] = {};
                add_run(format, x, rows.stride, panel, run, some);
                for (int r = 0; r < ROWS; r++)
                    for (int i = 0; i < PARTS; i++) group[r][i] = IS_BY_GROUP<Format> ? group[r][i] + some[r][i] : some[r][i];
            }
            for (int i = 0; i < PARTS; i++) {
                const FloatPart scale = IS_SCALED<Format> ? FloatPart{} : format.scale(panel, begin, i);
                for (int r = 0; r < ROWS; r++) sums[r][i] += IS_SCALED<Format> ? group[r][i] : group[r][i] * scale;
            }
        }
}

inline void put_scaled(const ProductCall& p, Floats value, int64_t row, int64_t panel) {
    put(p, p.scales ? value * load<Floats>(p.scales + panel * LANES) : value, row, panel * LANES);
}

// Adds the products of rows [row, end), inputs [first, last), with a panel from that input on, to sums.
template <int MOST, class Format, class Rows>
inline void add_rows(const Format& format, const Rows& rows, int64_t row, int64_t end, int64_t next, int64_t first, int64_t last,
                     const uint8_t* panel, Floats* sums) {
    while (row < end) {
        const int count = first_rows<MOST>(end - row, [&](auto some) {
            constexpr int ROWS = some;
            typedef FloatPart Sums[ROWS][PARTS];
            Sums& all = *reinterpret_cast<Sums*>(sums);
            if constexpr (IS_BY_GROUP<Format>) {
                add_runs<Format, ROWS>(format, rows, row, next, first, last, panel, all);
            } else {
                Sums own;
#pragma GCC unroll 16  // not a call of memcpy
                for (int r = 0; r < ROWS; r++)
                    for (int i = 0; i < PARTS; i++) own[r][i] = all[r][i];
                add_runs<Format, ROWS>(format, rows, row, next, first, last, panel, own);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
                    for (int i = 0; i < PARTS; i++) all[r][i] = own[r][i];
            }
        });
        row += count, sums += count;
    }
}

// Products of rows [row, end) with panels [panel, last) by way of unpacked copies, which all of the rows use.
template <class Copied, class Format, class Rows>
inline void multiply_copied(const Format& format, const ProductCall& p, const Rows& rows, int64_t row, int64_t end, int64_t panel,
                            int64_t last, std::vector<Floats>& memory) {
    constexpr int MOST = MOST_COPIED_ROWS<Format>;
    const int64_t panel_bytes = few_bits_panel_bytes(format, p.inputs), width = last - panel;
    const int64_t num_sums = round_up(end - row, MOST) * width;
    memory.resize(std::max<size_t>(memory.size(), num_sums + width * Copied::MOST_BYTES / sizeof(Floats)));
    Floats* const sums = memory.data();  // of MOST rows, panel by panel; then of the next ones
    uint8_t* const copies = reinterpret_cast<uint8_t*>(sums + num_sums);
    std::fill(sums, sums + num_sums, Floats{});
    const uint8_t* from = static_cast<const uint8_t*>(p.panels) + panel * panel_bytes;
    for (int64_t first = 0, until; first < p.inputs; first = until) {
        until = std::min(first + COPIED_INPUTS, p.inputs);
        Floats* some = sums;
        int64_t r = row;
        if constexpr (HAS_WORDS<Format> && !IS_SCALED<Copied>)
            if (width == 1 && r + MOST < end) {  // a constant number of rows, so that only one more loop is compiled
                add_rows<MOST>(Copying<Format, Copied>(format, copies), rows, r, r + MOST, r, first, until, from, some);
                r += MOST, some += MOST;
            }
        if (r == row)
            for (int64_t i = 0; i < width; i++)
                Copied::make(format, from + i * panel_bytes, until - first, copies + i * Copied::MOST_BYTES);
        for (; r < end; r += MOST)
            for (int64_t i = 0; i < width; i++, some += MOST)
                add_rows<MOST>(Copied(format), rows, r, std::min(r + MOST, end), std::min(r + MOST + i, end - 1), first, until,
                               copies + i * Copied::MOST_BYTES, some);
        from += few_bits_panel_bytes(format, until - first);
    }
    for (int64_t r = row; r < end; r++) {
        const int64_t bytes = p.is_wide ? sizeof(float) : sizeof(bf16), later = std::min(r + 8, end - 1);
        fetch_run(static_cast<const char*>(p.out) + (later * p.out_stride + panel * LANES) * bytes, width * LANES * bytes);
        for (int64_t i = 0; i < width; i++) {
            const int64_t at = r - row;
            put_scaled(p, sums[(at / MOST * width + i) * MOST + at % MOST], r, panel + i);
        }
    }
}

template <class Format> int64_t few_bits_scratch_bytes(const Format&, const ProductCall& p, const Step& step) {
    return is_by_tiles<Bf16>(p, step.undrafted) ? Rows<Bf16>(p, step.tokens).bytes() : RowsOf<Format>(p, step.tokens).bytes();
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
    } else if constexpr (IS_WIDE<Format>) {
        WordPart pairs[2];
        format.words(span, run, g, part, pairs);
        for (int k = 0; k < 4; k++)
            numbers[k] = __builtin_convertvector(IntPart(k < 2 ? pairs[k] << 16 : pairs[k - 2]) >> 16, FloatPart) * scale;
    } else {
        constexpr int ZERO = std::max(0, Format::ZERO);
        const WordPart codes = WordPart(format.codes(span, run, g, part));
        for (int k = 0; k < 4; k++)
            numbers[k] = __builtin_convertvector(IntPart(codes >> 8 * k & 255u) - ZERO, FloatPart) * scale + least;
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
    if (is_by_tiles<Bf16>(p, step.undrafted)) return multiply_widened(format, p, step, me);
#endif
    const int64_t panels = round_up(p.outputs, LANES) / LANES, panel_bytes = few_bits_panel_bytes(format, p.inputs);
    const auto rows = prepared_rows<RowsOf<Format>>(p, step.tokens, panel_bytes, me);
    if (IS_WORTH_A_COPY<Format> && rows.count >= ROWS_WORTH_A_COPY<Format>) {
        const bool are_many = rows.count > BLOCK_ROWS;
        for (int64_t row = 0, end; row < rows.count; row = end) {
            end = std::min(row + COPIED_ROWS, rows.count);
            for (int64_t i = me.first(panels), last; i < me.end(panels); i = last) {
                last = std::min(i + (are_many ? COPIED_PANELS : 1), me.end(panels));
                if (are_many) multiply_copied<CopyOf<Format, true>>(format, p, rows, row, end, i, last, me.desk.copy);
                else multiply_copied<CopyOf<Format, false>>(format, p, rows, row, end, i, last, me.desk.copy);
            }
        }
        return;
    }
    for (int64_t row = 0; row < rows.count; row += BLOCK_ROWS) {
        const int64_t end = std::min(row + BLOCK_ROWS, rows.count);
        for (int64_t i = me.first(panels); i < me.end(panels); i++) {
            const uint8_t* panel = static_cast<const uint8_t*>(p.panels) + i * panel_bytes;
            Floats sums[BLOCK_ROWS];
            std::fill(sums, sums + (end - row), Floats{});
            add_rows<MOST_FEW_BITS_ROWS<Format>>(format, rows, row, end, row, 0, p.inputs, panel, sums);
            for (int64_t r = row; r < end; r++) put_scaled(p, sums[r - row], r, i);
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
