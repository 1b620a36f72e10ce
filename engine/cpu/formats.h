// Storage formats of low-bit matrices, and how products read them.
//
// Panels of 16 outputs, as in matrix.h. A panel is a sequence of spans. A span covers the inputs that share one header:
// first the header, then the codes in units of 32 inputs. A unit has eight groups of four inputs; code j (0..63) of group
// g belongs to input j % 4 of output j / 4:
//
//     4 bits         byte 64 (g / 2) + j, low half where g is even
//     fifth bit      byte j of 64 more, bit g
//     bits 5, 6      byte 64 (g / 4) + j of 128 more, bits 2 (g % 4) and on
//     8 bits         byte 64 g + j; 8-bit floats: in the order of Float8
//
// A run is 32 inputs (16 for Q6_K and NVFP4, up to 64 for LEVELS), for which quantized activations have one scale. A scale of weights covers one run or
// more: weight = (scale * code + minimum) * factor of the output. Codes take the bits of the file; 6-bit scales of K formats
// and 4-bit zeros take 8, and 16-bit scales of some formats take 32.
#pragma once
#include "dots.h"

namespace {

enum FormatName : int32_t {
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, INT4, INT4_F32, INT8, INT8_F32, NVFP4, MXFP4, LEVELS, FP8, MXFP8
};

// ---- header numbers of a part's outputs ----

inline FloatPart floats_of(HalfPart halves) {  // fp16
#if defined(__AVX512F__)
    return FloatPart(_mm512_cvtph_ps(__m256i(halves)));
#elif defined(__F16C__) && defined(__AVX2__)
    return FloatPart(_mm256_cvtph_ps(__m128i(halves)));
#else  // shifted to fp32, the number has an exponent that is 112 too small
    const WordPart bits = __builtin_convertvector(halves, WordPart);
    return FloatPart((bits & 0x7fff) << 13) * 0x1p112f * FloatPart((bits >> 15 << 31) | 0x3f800000u);
#endif
}
inline FloatPart halves(const uint8_t* of_outputs, int part) { return floats_of(load<HalfPart>(of_outputs + part * PART_LANES * 2)); }

typedef uint8_t BytePart __attribute__((vector_size(16 / PARTS)));

struct Half {
    static constexpr int BYTES = 2;
    static FloatPart read(const uint8_t* of_outputs, int part) { return halves(of_outputs, part); }
};
struct Single {
    static constexpr int BYTES = 4;
    static FloatPart read(const uint8_t* of_outputs, int part) { return load<FloatPart>(of_outputs + part * PART_LANES * 4); }
};
struct E4m3 {  // times 2^-8: the exponent is read as that of fp16
    static constexpr int BYTES = 1;
    static FloatPart read(const uint8_t* of_outputs, int part) {
        const HalfPart wide = __builtin_convertvector(load<BytePart>(of_outputs + part * PART_LANES), HalfPart);
        return floats_of((wide & 127) << 7 | (wide & 128) << 8);
    }
};
struct E8m0 {  // 2^-127 is read as 0
    static constexpr int BYTES = 1;
    static FloatPart read(const uint8_t* of_outputs, int part) {
        const HalfPart wide = __builtin_convertvector(load<BytePart>(of_outputs + part * PART_LANES), HalfPart);
        return FloatPart(__builtin_convertvector(wide, WordPart) << 23);
    }
};

template <class Byte> inline FloatPart byte_floats(const Byte* of_outputs, int part) {
    const Byte* from = of_outputs + part * PART_LANES;
#ifdef __AVX512F__
    const __m128i bytes = load<__m128i>(from);
    return FloatPart(_mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes)));
#else
    FloatPart floats;
    for (int i = 0; i < PART_LANES; i++) floats[i] = from[i];
    return floats;
#endif
}

// ---- codes of a part of group g of a unit ----

constexpr int PART_BYTES = 64 / PARTS;

inline CodePart nibbles(const uint8_t* unit, int g, int part) {
    const UnsignedPart two = load<UnsignedPart>(unit + g / 2 * 64 + part * PART_BYTES);
    return CodePart(g % 2 ? two >> 4 : two) & 15;
}
inline CodePart fifth_bits(const uint8_t* high, int g, int part) {
    const UnsignedPart eight = load<UnsignedPart>(high + part * PART_BYTES);
    return CodePart(g < 4 ? eight << (4 - g) : eight >> (g - 4)) & 16;
}
inline CodePart upper_bits(const uint8_t* high, int g, int part) {
    const UnsignedPart four = load<UnsignedPart>(high + g / 4 * 64 + part * PART_BYTES);
    return CodePart(g % 4 < 2 ? four << (4 - 2 * (g % 4)) : four >> (2 * (g % 4) - 4)) & 48;
}

// Sixteen bytes, for lookups.
struct Table {
    CodePart bytes;

    explicit Table(const uint8_t* of_codes) {
        for (int i = 0; i < 64 / PARTS; i++) bytes[i] = of_codes[i % 16];
    }
    CodePart operator[](CodePart indices) const {
#if defined(__AVX512BW__)
        return CodePart(_mm512_shuffle_epi8(__m512i(bytes), __m512i(indices)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return CodePart(_mm256_shuffle_epi8(__m256i(bytes), __m256i(indices)));
#elif defined(__ARM_NEON)
        return CodePart(vqtbl1q_u8(uint8x16_t(bytes), uint8x16_t(indices)));
#else
        CodePart found;
        for (int i = 0; i < 64 / PARTS; i++) found[i] = bytes[indices[i] & 15];
        return found;
#endif
    }
};

// ---- kinds of codes: BITS of a code as it is multiplied, STORED as it lies in memory ----

struct Nibbles {
    static constexpr bool IS_FLOAT = false;
    static constexpr int BITS = 4, STORED = 4;
    explicit Nibbles(const uint8_t*) {}
    static CodePart codes(const uint8_t* run, int g, int part) { return nibbles(run, g, part); }
};
struct FiveBits {
    static constexpr bool IS_FLOAT = false;
    static constexpr int BITS = 5, STORED = 5;
    explicit FiveBits(const uint8_t*) {}
    static CodePart codes(const uint8_t* run, int g, int part) {
        return nibbles(run, g, part) | fifth_bits(run + 64 * 4, g, part);
    }
};
struct EightBits {
    static constexpr bool IS_FLOAT = false;
    static constexpr int BITS = 8, STORED = 8;
    explicit EightBits(const uint8_t*) {}
    static CodePart codes(const uint8_t* run, int g, int part) { return load<CodePart>(run + 64 * g + part * PART_BYTES); }
};
// Twice the numbers of E2M1, plus 12.
struct E2m1 {
    static constexpr bool IS_FLOAT = false;
    static constexpr int BITS = 5, STORED = 4;
    static constexpr uint8_t NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    Table numbers{NUMBERS};
    explicit E2m1(const uint8_t*) {}
    CodePart codes(const uint8_t* run, int g, int part) const { return numbers[nibbles(run, g, part)]; }
};
// Any sixteen numbers, as integers of 14 bits and a sign.
struct Levels {
    static constexpr bool IS_FLOAT = false;
    static constexpr int BITS = 15, STORED = 4;

    // levels: the lower bytes of all numbers, then the upper ones.
    explicit Levels(const uint8_t* levels) : low(levels), high(levels + 16) {
#ifdef __AVX512BW__
        for (int i = 0; i < 32; i++) numbers[i] = uint16_t(levels[i % 16] | levels[i % 16 + 16] << 8);
#endif
    }

    // A group's inputs as two pairs of 16 bits per output: 0 and 2, 1 and 3.
    void words(const uint8_t* run, int g, int part, WordPart (&pairs)[2]) const {
#ifdef __AVX512BW__
        const UnsignedPart four = load<UnsignedPart>(run + g / 2 * 64);  // the look-up ignores the other codes
        pairs[0] = WordPart(_mm512_permutexvar_epi16(__m512i(four >> g % 2 * 4), __m512i(numbers)));
        pairs[1] = WordPart(_mm512_permutexvar_epi16(__m512i(four >> (8 + g % 2 * 4)), __m512i(numbers)));
#else
        const CodePart codes = nibbles(run, g, part);
        const UnsignedPart lower = UnsignedPart(low[codes]), upper = UnsignedPart(high[codes]);
        pairs[0] = WordPart((lower & 255) | upper << 8);
        pairs[1] = WordPart(lower >> 8 | (upper & 0xff00));
#endif
    }

private:
    Table low, high;
#ifdef __AVX512BW__
    UnsignedPart numbers;  // twice
#endif
};

// One byte of the bf16 with the size of each 8-bit float.
struct alignas(64) Bf16OfSizes {
    uint8_t bytes[128];
    constexpr explicit Bf16OfSizes(int shift) : bytes() {
        constexpr int SMALL[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // below the normal range
        for (int size = 0; size < 128; size++) bytes[size] = uint8_t((size < 8 ? SMALL[size] : (size << 4) + 0x3c00) >> shift);
    }
};

// 8-bit floats (e4m3 without NaN), which are exact in bf16. Of each 16 bytes, the first eight belong to the first two of the
// inputs of four outputs.
struct Float8 {
    static constexpr bool IS_FLOAT = true;
    static constexpr int BITS = 8, STORED = 8;
    explicit Float8(const uint8_t*) {}

    // A group's inputs as two pairs of bf16 per output.
    void words(const uint8_t* run, int g, int part, WordPart (&pairs)[2]) const {
        const CodePart codes = load<CodePart>(run + 64 * g + part * PART_BYTES), sizes = codes & 127;
#ifdef __AVX512VBMI__
        const auto look_up = [&](const Bf16OfSizes& of) {
            return CodePart(_mm512_permutex2var_epi8(load<__m512i>(of.bytes), __m512i(codes), load<__m512i>(of.bytes + 64)));
        };
        const CodePart low = look_up(LOW), high = look_up(HIGH);
#else
        const auto is_small = sizes < 8;
        const CodePart low = is_small ? low_of_small[sizes] : CodePart(UnsignedPart(sizes) << 4) & 240;
        const CodePart high = is_small ? high_of_small[sizes] : (CodePart(UnsignedPart(sizes) >> 4) & 15) + 60;
#endif
        interleave(low, high | (codes ^ sizes), pairs, std::make_integer_sequence<int, 64 / PARTS>());
    }

private:
    template <int... I>
    static void interleave(CodePart low, CodePart high, WordPart (&pairs)[2], std::integer_sequence<int, I...>) {
        constexpr int ALL = 64 / PARTS;
        pairs[0] = WordPart(__builtin_shufflevector(low, high, (I / 16 * 16 + I % 16 / 2 + I % 2 * ALL)...));
        pairs[1] = WordPart(__builtin_shufflevector(low, high, (I / 16 * 16 + I % 16 / 2 + 8 + I % 2 * ALL)...));
    }
#ifdef __AVX512VBMI__
    static constexpr Bf16OfSizes LOW{0}, HIGH{8};
#else
    Table low_of_small{Bf16OfSizes(0).bytes}, high_of_small{Bf16OfSizes(8).bytes};
#endif
};

// ---- the formats ----

constexpr int HALVES = 2 * LANES, UNIT = 32, NIBBLES = 16 * UNIT / 2, FIFTHS = 16 * UNIT / 8, UPPERS = 16 * UNIT / 4;
// Zero of a format: the code of zero, or a number per output in the header.
constexpr int MINIMUM = -1, ZERO_CODE = -2;  // an fp16 that is added; a byte that is subtracted from the codes

// Codes with scales, and zeros if they differ, per `group` inputs. Header: the scales of its groups, then their zeros.
template <class Number, class Scale, int ZERO_, int RUN_ = 32> struct Grouped : Number {
    static constexpr bool IS_NESTED = false, HAS_POWERS = std::is_same_v<Scale, E8m0>;  // scales are powers of two
    static constexpr int ZERO = ZERO_, RUN = RUN_, CODE_BYTES = 2 * Number::STORED * RUN;
    static constexpr int ZERO_BYTES = ZERO == MINIMUM ? 2 : ZERO == ZERO_CODE ? 1 : 0;
    int num_runs, group_runs, scale_bytes, head;  // of a span; of a group

    Grouped(int span, int group, const uint8_t* levels)
        : Number(levels), num_runs(span / RUN), group_runs(group / RUN), scale_bytes(span / group * LANES * Scale::BYTES),
          head(scale_bytes + span / group * LANES * ZERO_BYTES) {}
    int runs() const { return num_runs; }
    int span_bytes() const { return head + num_runs * CODE_BYTES; }
    const uint8_t* run_of(const uint8_t* span, int run) const { return span + head + run * CODE_BYTES; }

    CodePart codes(const uint8_t* span, int run, int g, int part) const { return Number::codes(run_of(span, run), g, part); }
    void words(const uint8_t* span, int run, int g, int part, WordPart (&pairs)[2]) const {
        Number::words(run_of(span, run), g, part, pairs);
    }
    FloatPart scale(const uint8_t* span, int run, int part) const {
        return Scale::read(span + run / group_runs * (LANES * Scale::BYTES), part);
    }
    FloatPart least(const uint8_t* span, int run, int part, FloatPart scale) const {
        const uint8_t* zeros = span + scale_bytes + run / group_runs * (LANES * ZERO_BYTES);
        if constexpr (ZERO == MINIMUM) return halves(zeros, part);
        else return -(scale * byte_floats(zeros, part));
    }
};

// Q4_K and Q5_K: two floats per 256 inputs, multiplied by two integers per run.
template <int BITS_> struct Nested {
    static constexpr bool IS_FLOAT = false, IS_NESTED = true, HAS_POWERS = false;
    static constexpr int BITS = BITS_, ZERO = MINIMUM, RUN = 32, RUNS = 256 / RUN;
    static constexpr int LEASTS = 2 * HALVES + RUNS * LANES, HEAD = LEASTS + RUNS * LANES, CODE_BYTES = 2 * BITS * UNIT;
    static constexpr int runs() { return RUNS; }
    static constexpr int span_bytes() { return HEAD + RUNS * CODE_BYTES; }
    static const uint8_t* run_of(const uint8_t* span, int run) { return span + HEAD + run * CODE_BYTES; }

    static CodePart codes(const uint8_t* span, int run, int g, int part) {
        const uint8_t* unit = run_of(span, run);
        if constexpr (BITS == 5) return nibbles(unit, g, part) | fifth_bits(unit + NIBBLES, g, part);
        else return nibbles(unit, g, part);
    }
    static FloatPart scale(const uint8_t* span, int run, int part) {
        return halves(span, part) * byte_floats(span + 2 * HALVES + run * LANES, part);
    }
    static FloatPart least(const uint8_t* span, int run, int part, FloatPart) {
        return -(halves(span + HALVES, part) * byte_floats(span + LEASTS + run * LANES, part));
    }
};

// Q6_K: one float per 256 inputs, and a signed integer per run of 16.
struct SixBits {
    static constexpr bool IS_FLOAT = false, IS_NESTED = true, HAS_POWERS = false;
    static constexpr int BITS = 6, ZERO = 32, RUN = 16, RUNS = 256 / RUN;
    static constexpr int HEAD = HALVES + RUNS * LANES, CODE_BYTES = (NIBBLES + UPPERS) / 2;
    static constexpr int runs() { return RUNS; }
    static constexpr int span_bytes() { return HEAD + RUNS * CODE_BYTES; }
    static const uint8_t* run_of(const uint8_t* span, int run) { return span + HEAD + run * CODE_BYTES; }

    static CodePart codes(const uint8_t* span, int run, int g, int part) {
        const uint8_t* unit = run_of(span, run / 2 * 2);
        return nibbles(unit + run % 2 * (NIBBLES / 2), g, part) | upper_bits(unit + NIBBLES + run % 2 * (UPPERS / 2), g, part);
    }
    static FloatPart scale(const uint8_t* span, int run, int part) {
        return halves(span, part) * byte_floats(reinterpret_cast<const int8_t*>(span) + HALVES + run * LANES, part);
    }
};

template <class Call, class Work> inline auto with_format(const Call& call, const Work& work) {
    const auto grouped = [&](auto* format) {
        return work(std::remove_pointer_t<decltype(format)>(call.span, call.group, call.levels));
    };
    switch (FormatName(call.format)) {
        case Q4_0: return grouped((Grouped<Nibbles, Half, 8>*)nullptr);
        case Q4_1: return grouped((Grouped<Nibbles, Half, MINIMUM>*)nullptr);
        case Q5_0: return grouped((Grouped<FiveBits, Half, 16>*)nullptr);
        case Q5_1: return grouped((Grouped<FiveBits, Half, MINIMUM>*)nullptr);
        case Q8_0: return grouped((Grouped<EightBits, Half, 128>*)nullptr);
        case Q4_K: return work(Nested<4>());
        case Q5_K: return work(Nested<5>());
        case Q6_K: return work(SixBits());
        case INT4: return grouped((Grouped<Nibbles, Half, ZERO_CODE>*)nullptr);
        case INT4_F32: return grouped((Grouped<Nibbles, Single, ZERO_CODE>*)nullptr);
        case INT8: return grouped((Grouped<EightBits, Half, ZERO_CODE>*)nullptr);
        case INT8_F32: return grouped((Grouped<EightBits, Single, ZERO_CODE>*)nullptr);
        case NVFP4: return grouped((Grouped<E2m1, E4m3, 12, 16>*)nullptr);
        case MXFP4: return grouped((Grouped<E2m1, E8m0, 12>*)nullptr);
        case LEVELS:
            if (call.group % 64) return grouped((Grouped<Levels, Single, 0>*)nullptr);
            return grouped((Grouped<Levels, Single, 0, 64>*)nullptr);
        case FP8: return grouped((Grouped<Float8, Single, 0>*)nullptr);
        default: return grouped((Grouped<Float8, E8m0, 0>*)nullptr);
    }
}

}  // namespace
