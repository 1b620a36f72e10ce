// out = before(x) W^T with a matrix in its stored low-bit format; see formats.h.
//
// Rows are quantized at run time to 8 bits with one scale per run of inputs. Each run contributes an integer dot product
// per output, and two floats are added to the result:
//
//     scale of the outputs * scale of the row * dot product      minimum of the outputs * sum of the row's run
//
// in the order of the inputs for any number of rows: a row's result does not depend on the other rows. Few rows read codes
// directly from the panel; many rows read an unpacked copy with one byte per code in the L1 cache, where that is faster.
// Both give identical results.
//
// Where AMX is faster, a panel is dequantized to bf16 and rows are not quantized: scales per run would cost more than
// integer tiles save.
#pragma once
#include "formats.h"
#include "matrix.h"

namespace {

template <int BITS> constexpr int MOST_FEW_BITS_ROWS = PARTS == 1 ? 8 : BITS == 8 ? 2 : 4;  // rows per register tile

// 8-bit codes need no unpacking. Other formats are read as fast from the panel if a tile has many rows and the scales of a
// run are cheap.
template <class Format> constexpr bool IS_WORTH_A_COPY = Format::BITS < 8 && (PARTS > 1 || Format::SPAN >= 256);
// On AVX2, 5 rows of Q4_K take 4.4 ms with a copy and 6.5 without; of Q4_0 4.3 and 3.6.
template <class Format> constexpr int ROWS_WORTH_A_COPY = Format::SPAN > 32 ? MOST_FEW_BITS_ROWS<Format::BITS> + 1 : 9;

template <int BITS, int RUN> struct RowRun {
    float scale, total;  // total: sum of the run's quantized inputs
    typename Kept<BITS>::Code codes[RUN];
};

// Quantized rows: the runs of one row after the other.
template <int BITS, int RUN> struct RunRows {
    typedef RowRun<BITS, RUN> Run;
    int64_t count, runs;
    Run* first;

    RunRows(const ProductCall& p, int64_t count, char* memory = nullptr)
        : count(count), runs(p.inputs / RUN), first(reinterpret_cast<Run*>(memory)) {}
    int64_t bytes() const { return count * runs * sizeof(Run); }

    void prepare(const ProductCall& p, int64_t begin, int64_t end, std::vector<float>& y) const {
        y.resize(p.inputs);
        for (int64_t row = begin; row < end; row++) {
            prepared(p, row, y.data());
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
        run.total = run.scale * total;
    }
};

constexpr int64_t BYTES_AHEAD = 8192;  // prefetch distance, covers the memory latency

// Prefetches a run's share of the span BYTES_AHEAD later, including the line in which it ends.
template <class Format> inline void fetch_after(const uint8_t* span, int run) {
    constexpr int LINES = (Format::BYTES + 63) / 64, RUNS = Format::SPAN / Format::RUN;
    for (int line = LINES * run / RUNS; line < LINES * (run + 1) / RUNS; line++)
        __builtin_prefetch(span + BYTES_AHEAD + line * 64, 0, 2);
}

// Unpacked panel with one byte per code.
template <int BITS_, int RUN_> struct Copy {
    static constexpr int BITS = BITS_, RUN = RUN_, SPAN = RUN, HEAD = 2 * sizeof(Floats);
    static constexpr int BYTES = HEAD + RUN * LANES;

    static CodePart codes(const uint8_t* span, int, int g, int part) {
        return load<CodePart>(span + HEAD + 64 * g + part * PART_BYTES);
    }
    static FloatPart scale(const uint8_t* span, int, int part) { return load<FloatPart>(span + part * PART_BYTES); }
    static FloatPart least(const uint8_t* span, int, int part, FloatPart) {
        return load<FloatPart>(span + sizeof(Floats) + part * PART_BYTES);
    }

    template <class Format> static void make(const uint8_t* panel, int64_t inputs, uint8_t* copy) {
        for (int64_t span = 0; span < inputs / Format::SPAN; span++, panel += Format::BYTES)
            for (int run = 0; run < Format::SPAN / RUN; run++, copy += BYTES) {
                fetch_after<Format>(panel, run);
                for (int part = 0; part < PARTS; part++) {
                    const FloatPart scale = Format::scale(panel, run, part);
                    store(copy + part * PART_BYTES, scale);
                    store(copy + sizeof(Floats) + part * PART_BYTES, Format::least(panel, run, part, scale));
#pragma GCC unroll 8
                    for (int g = 0; g < RUN / 4; g++)
                        store(copy + HEAD + 64 * g + part * PART_BYTES, Format::codes(panel, run, g, part));
                }
            }
    }
};

template <class Format> constexpr bool COMES_FROM_MEMORY = true;
template <int BITS, int RUN> constexpr bool COMES_FROM_MEMORY<Copy<BITS, RUN>> = false;

template <class Format, int ROWS, class Rows>
inline void few_bits_tile(const ProductCall& p, const Rows& rows, int64_t row, const uint8_t* panel, int64_t output) {
    constexpr int RUNS = Format::SPAN / Format::RUN;
    const auto* x = rows.first + row * rows.runs;
    FloatPart sums[ROWS][PARTS] = {};
    for (int64_t span = 0; span < rows.runs / RUNS; span++, panel += Format::BYTES)
        for (int run = 0; run < RUNS; run++, x++) {
            if constexpr (COMES_FROM_MEMORY<Format>) fetch_after<Format>(panel, run);
            IntPart whole[ROWS][PARTS];
            dots<Format::BITS, Format::RUN / 4>(
                whole, [&](int g, int part) { return Format::codes(panel, run, g, part); },
                [&](int r) { return x[r * rows.runs].codes; });
            for (int i = 0; i < PARTS; i++) {
                const FloatPart scale = Format::scale(panel, run, i), least = Format::least(panel, run, i, scale);
                for (int r = 0; r < ROWS; r++) {
                    sums[r][i] += __builtin_convertvector(whole[r][i], FloatPart) * (scale * x[r * rows.runs].scale);
                    sums[r][i] += least * x[r * rows.runs].total;
                }
            }
        }
    for (int r = 0; r < ROWS; r++) put(p, load<Floats>(&sums[r][0]), row + r, output);
}

// Multiplies rows [row, end) by one panel.
template <class Format, class Rows>
inline void few_bits_panel(const ProductCall& p, const Rows& rows, int64_t row, int64_t end, const uint8_t* panel, int64_t output) {
    while (row < end)
        row += first_rows<MOST_FEW_BITS_ROWS<Format::BITS>>(end - row, [&](auto some) {
            few_bits_tile<Format, some>(p, rows, row, panel, output);
        });
}

// Multiplies rows [row, end) by an unpacked copy of the panel.
template <class Format, class Rows>
inline void few_bits_copy(const ProductCall& p, const Rows& rows, int64_t row, int64_t end, const uint8_t* panel, int64_t output,
                          std::vector<char>& memory) {
    typedef Copy<Format::BITS, Format::RUN> Copied;
    memory.resize(std::max<size_t>(memory.size(), rows.runs * Copied::BYTES));
    uint8_t* copy = reinterpret_cast<uint8_t*>(memory.data());
    Copied::template make<Format>(panel, p.inputs, copy);
    few_bits_panel<Copied>(p, rows, row, end, copy, output);
}

template <class Format> int64_t few_bits_panel_bytes(const ProductCall& p) { return p.inputs / Format::SPAN * Format::BYTES; }

template <class Format> int64_t few_bits_scratch_bytes(const ProductCall& p, int64_t num_rows) {
    return is_by_tiles<Bf16>(p, num_rows) ? Rows<Bf16>(p, num_rows).bytes() : RunRows<Format::BITS, Format::RUN>(p, num_rows).bytes();
}

#if HAS_TILES

// Dequantizes a panel to the bf16 layout of matrix.h.
template <class Format> void widen_panel(const uint8_t* panel, int64_t inputs, uint32_t* words) {
    for (int64_t span = 0; span < inputs / Format::SPAN; span++, panel += Format::BYTES)
        for (int run = 0; run < Format::SPAN / Format::RUN; run++) {
            const Floats scale = Format::scale(panel, run, 0), least = Format::least(panel, run, 0, scale);
#pragma GCC unroll 8
            for (int g = 0; g < Format::RUN / 4; g++, words += 2 * LANES) {
                const Words codes = Words(Format::codes(panel, run, g, 0));
                Floats numbers[4];
                for (int k = 0; k < 4; k++)
                    numbers[k] = __builtin_convertvector(Ints(codes >> 8 * k & 0xffu), Floats) * scale + least;
                store(words, pairs_of(numbers[0], numbers[1]));
                store(words + LANES, pairs_of(numbers[2], numbers[3]));
            }
        }
}

template <class Format> void multiply_widened(const ProductCall& p, const Step& step, Worker& me) {
    constexpr int64_t WIDENED_BYTES = 128 << 10;  // dequantized at a time
    const int64_t panel_bytes = few_bits_panel_bytes<Format>(p), widened_bytes = Rows<Bf16>::panel_bytes(p);
    const Rows<Bf16> rows = prepared_rows<Rows<Bf16>>(p, step.tokens, panel_bytes, me);
    const int64_t most_panels = std::max<int64_t>(2, WIDENED_BYTES / widened_bytes / 2 * 2);
    std::vector<char>& copy = me.desk.copy;
    copy.resize(std::max<size_t>(copy.size(), most_panels * widened_bytes));
    each_tiled_block(p, rows, most_panels, me, [&](int64_t row, int64_t last_row, int64_t panel, int64_t last) {
        for (int64_t i = panel; i < last; i++)
            widen_panel<Format>(static_cast<const uint8_t*>(p.panels) + i * panel_bytes, p.inputs,
                                reinterpret_cast<uint32_t*>(copy.data() + (i - panel) * widened_bytes));
        tiled_rows_of<Bf16>(p, rows, row, last_row, panel, last, copy.data());
    });
}

#endif

template <class Format> void multiply_few_bits(const ProductCall& p, const Step& step, Worker& me) {
#if HAS_TILES
    if (is_by_tiles<Bf16>(p, step.tokens)) return multiply_widened<Format>(p, step, me);
#endif
    typedef RunRows<Format::BITS, Format::RUN> Runs;
    const int64_t panels = round_up(p.outputs, LANES) / LANES, panel_bytes = few_bits_panel_bytes<Format>(p);
    const Runs rows = prepared_rows<Runs>(p, step.tokens, panel_bytes, me);
    for (int64_t row = 0; row < rows.count; row += BLOCK_ROWS) {
        const int64_t end = std::min(row + BLOCK_ROWS, rows.count);
        const bool is_copied = IS_WORTH_A_COPY<Format> && end - row >= ROWS_WORTH_A_COPY<Format>;
        for (int64_t i = me.first(panels); i < me.end(panels); i++) {
            const uint8_t* panel = static_cast<const uint8_t*>(p.panels) + i * panel_bytes;
            if (is_copied) few_bits_copy<Format>(p, rows, row, end, panel, i * LANES, me.desk.copy);
            else few_bits_panel<Format>(p, rows, row, end, panel, i * LANES);
        }
    }
}

// ---- dequantized rows of a matrix, such as token embeddings ----

struct StoredRows {
    int32_t format;
    const uint8_t* panels;
    int64_t inputs, count;
    const int64_t* rows;  // (count)
    bf16* out;            // (count, inputs)
};

template <class Format> void widen_row(const StoredRows& stored, int64_t row, bf16* out) {
    const uint8_t* span = stored.panels + row / LANES * (stored.inputs / Format::SPAN * Format::BYTES);
    const int part = row % LANES / PART_LANES, lane = row % PART_LANES;
    for (int64_t i = 0; i < stored.inputs; i += Format::SPAN, span += Format::BYTES)
        for (int run = 0; run < Format::SPAN / Format::RUN; run++) {
            const FloatPart scale = Format::scale(span, run, part), least = Format::least(span, run, part, scale);
#pragma GCC unroll 8
            for (int g = 0; g < Format::RUN / 4; g++) {
                const CodePart codes = Format::codes(span, run, g, part);
                for (int k = 0; k < 4; k++) *out++ = narrow(scale[lane] * codes[4 * lane + k] + least[lane]);
            }
        }
}

inline void widen_rows(const StoredRows& stored) {
    with_format(stored.format, [&](auto format) {
        for (int64_t i = 0; i < stored.count; i++)
            widen_row<decltype(format)>(stored, stored.rows[i], stored.out + i * stored.inputs);
    });
}

}  // namespace
