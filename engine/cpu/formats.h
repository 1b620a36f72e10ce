// Storage formats of low-bit matrices, and how products read them.
//
// Panels of 16 outputs, as in matrix.h. A panel is a sequence of spans. A span covers the inputs that share one header (a
// GGUF block): first the header, then the unsigned codes in units of 32 inputs. A unit has eight groups of four inputs;
// code j (0..63) of group g belongs to input j % 4 of output j / 4:
//
//     4 bits         byte 64 (g / 2) + j, low half where g is even
//     fifth bit      byte j of 64 more, bit g
//     bits 5, 6      byte 64 (g / 4) + j of 128 more, bits 2 (g % 4) and on
//     8 bits         byte 64 g + j
//
// A run covers the inputs that share a scale: weight = scale * code + minimum. Bits equal those of the file (6-bit scales
// of K formats take 8), in another order.
#pragma once
#include "dots.h"

namespace {

enum FormatName : int32_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, GROUPS_OF_32, GROUPS_OF_64, GROUPS_OF_128 };

// ---- header numbers of a part's outputs ----

inline FloatPart halves(const uint8_t* of_outputs, int part) {  // fp16
    const uint8_t* from = of_outputs + part * PART_LANES * 2;
#if defined(__AVX512F__)
    return FloatPart(_mm512_cvtph_ps(load<__m256i>(from)));
#elif defined(__F16C__) && defined(__AVX2__)
    return FloatPart(_mm256_cvtph_ps(load<__m128i>(from)));
#else  // shifted to fp32, the number has an exponent that is 112 too small
    WordPart bits;
    for (int i = 0; i < PART_LANES; i++) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        bits[i] = half;
    }
    return FloatPart((bits & 0x7fff) << 13) * 0x1p112f * FloatPart((bits >> 15 << 31) | 0x3f800000u);
#endif
}

template <class Byte> inline FloatPart bytes(const Byte* of_outputs, int part) {
    const Byte* from = of_outputs + part * PART_LANES;
    FloatPart floats;
    for (int i = 0; i < PART_LANES; i++) floats[i] = from[i];
    return floats;
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

// ---- the formats ----

constexpr int HALVES = 2 * LANES, UNIT = 32, NIBBLES = 16 * UNIT / 2, FIFTHS = 16 * UNIT / 8, UPPERS = 16 * UNIT / 4;

// Blocks of 32 inputs: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0. ZERO: code of zero; -1: each output has a minimum instead.
template <int BITS_, int ZERO> struct Block {
    static constexpr int BITS = BITS_, RUN = 32, SPAN = 32;
    static constexpr int HEAD = ZERO < 0 ? 2 * HALVES : HALVES, BYTES = HEAD + 2 * BITS * UNIT;

    static CodePart codes(const uint8_t* span, int, int g, int part) {
        const uint8_t* unit = span + HEAD;
        if constexpr (BITS == 8) return load<CodePart>(unit + 64 * g + part * PART_BYTES);
        else if constexpr (BITS == 5) return nibbles(unit, g, part) | fifth_bits(unit + NIBBLES, g, part);
        else return nibbles(unit, g, part);
    }
    static FloatPart scale(const uint8_t* span, int, int part) { return halves(span, part); }
    static FloatPart least(const uint8_t* span, int, int part, FloatPart scale) {
        if constexpr (ZERO < 0) return halves(span + HALVES, part);
        else return scale * float(-ZERO);
    }
};

// Q4_K and Q5_K: two floats per 256 inputs, multiplied by two integers per run.
template <int BITS_> struct Nested {
    static constexpr int BITS = BITS_, RUN = 32, SPAN = 256, RUNS = SPAN / RUN;
    static constexpr int LEASTS = 2 * HALVES + RUNS * LANES, HEAD = LEASTS + RUNS * LANES;
    static constexpr int UNIT_BYTES = 2 * BITS * UNIT, BYTES = HEAD + RUNS * UNIT_BYTES;

    static CodePart codes(const uint8_t* span, int run, int g, int part) {
        const uint8_t* unit = span + HEAD + run * UNIT_BYTES;
        if constexpr (BITS == 5) return nibbles(unit, g, part) | fifth_bits(unit + NIBBLES, g, part);
        else return nibbles(unit, g, part);
    }
    static FloatPart scale(const uint8_t* span, int run, int part) {
        return halves(span, part) * bytes(span + 2 * HALVES + run * LANES, part);
    }
    static FloatPart least(const uint8_t* span, int run, int part, FloatPart) {
        return -(halves(span + HALVES, part) * bytes(span + LEASTS + run * LANES, part));
    }
};

// Q6_K: one float per 256 inputs, and a signed integer per run of 16.
struct SixBits {
    static constexpr int BITS = 6, RUN = 16, SPAN = 256, RUNS = SPAN / RUN;
    static constexpr int HEAD = HALVES + RUNS * LANES, UNIT_BYTES = NIBBLES + UPPERS, BYTES = HEAD + SPAN / UNIT * UNIT_BYTES;

    static CodePart codes(const uint8_t* span, int run, int g, int part) {
        const uint8_t* unit = span + HEAD + run / 2 * UNIT_BYTES + run % 2 * (NIBBLES / 2);
        const uint8_t* high = span + HEAD + run / 2 * UNIT_BYTES + NIBBLES + run % 2 * (UPPERS / 2);
        return nibbles(unit, g, part) | upper_bits(high, g, part);
    }
    static FloatPart scale(const uint8_t* span, int run, int part) {
        return halves(span, part) * bytes(reinterpret_cast<const int8_t*>(span) + HALVES + run * LANES, part);
    }
    static FloatPart least(const uint8_t*, int, int, FloatPart scale) { return scale * -32.0f; }
};

// AWQ and GPTQ: a scale and a zero code per INPUTS inputs.
template <int INPUTS> struct Group {
    static constexpr int BITS = 4, RUN = 32, SPAN = INPUTS, HEAD = HALVES + LANES, BYTES = HEAD + SPAN / UNIT * NIBBLES;

    static CodePart codes(const uint8_t* span, int run, int g, int part) { return nibbles(span + HEAD + run * NIBBLES, g, part); }
    static FloatPart scale(const uint8_t* span, int, int part) { return halves(span, part); }
    static FloatPart least(const uint8_t* span, int, int part, FloatPart scale) {
        return -(scale * bytes(span + HALVES, part));
    }
};

template <class Work> inline auto with_format(int32_t name, const Work& work) {
    switch (FormatName(name)) {
        case Q4_0: return work(Block<4, 8>());
        case Q4_1: return work(Block<4, -1>());
        case Q5_0: return work(Block<5, 16>());
        case Q5_1: return work(Block<5, -1>());
        case Q8_0: return work(Block<8, 128>());
        case Q4_K: return work(Nested<4>());
        case Q5_K: return work(Nested<5>());
        case Q6_K: return work(SixBits());
        case GROUPS_OF_32: return work(Group<32>());
        case GROUPS_OF_64: return work(Group<64>());
        default: return work(Group<128>());
    }
}

}  // namespace
