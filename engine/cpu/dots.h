// Dot products of unsigned bytes (a matrix's codes) and signed bytes (a row's codes), with the best available instructions.
//
// A group is four inputs. Its codes are 64 bytes, four for each of 16 outputs, of which a register holds a part; the row
// has four bytes, which are broadcast to all outputs. Results are exact integers, identical on all paths:
//
//     VNNI, ARM     dot products of four bytes into 32 bits
//     AVX-512, AVX2 pairs of bytes accumulated in 16 bits until full, then pairs of those into 32;
//                   8-bit codes would overflow: even and odd inputs are processed separately as 16 bits
//     else          portable vectors
#pragma once
#include <algorithm>
#include <type_traits>

#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef uint8_t CodePart __attribute__((vector_size(64 / PARTS)));  // part of a group
typedef int16_t ShortPart __attribute__((vector_size(64 / PARTS)));
typedef uint16_t UnsignedPart __attribute__((vector_size(64 / PARTS)));

inline int32_t four_bytes(const void* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
template <int> inline IntPart add_fours(IntPart sum, CodePart codes, int32_t row) {
#ifdef __AVX512VNNI__
    return IntPart(_mm512_dpbusd_epi32(__m512i(sum), __m512i(codes), _mm512_set1_epi32(row)));
#else
    return IntPart(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(codes), _mm256_set1_epi32(row)));
#endif
}
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define HAS_PAIRS
#ifdef __AVX512BW__
inline ShortPart pairs(CodePart codes, int32_t row) {
    return ShortPart(_mm512_maddubs_epi16(__m512i(codes), _mm512_set1_epi32(row)));
}
inline IntPart pairs(ShortPart x, int32_t row) { return IntPart(_mm512_madd_epi16(__m512i(x), _mm512_set1_epi32(row))); }
#else
inline ShortPart pairs(CodePart codes, int32_t row) {
    return ShortPart(_mm256_maddubs_epi16(__m256i(codes), _mm256_set1_epi32(row)));
}
inline IntPart pairs(ShortPart x, int32_t row) { return IntPart(_mm256_madd_epi16(__m256i(x), _mm256_set1_epi32(row))); }
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
template <int BITS> inline IntPart add_fours(IntPart sum, CodePart codes, int32_t row) {
    const int8x16_t four = int8x16_t(vdupq_n_s32(row));
    if constexpr (BITS < 8) return IntPart(vdotq_s32(int32x4_t(sum), int8x16_t(codes), four));  // the codes fit signed bytes
#ifdef __ARM_FEATURE_MATMUL_INT8
    return IntPart(vusdotq_s32(int32x4_t(sum), uint8x16_t(codes), four));
#else  // codes minus 128, plus 128 times the sum of the row
    const int32x4_t half = vdotq_s32(int32x4_t(sum), vdupq_n_s8(64), four);
    return IntPart(vdotq_s32(vdotq_s32(half, vdupq_n_s8(64), four), int8x16_t(codes ^ 128), four));
#endif
}
#else
template <int> inline IntPart add_fours(IntPart sum, CodePart codes, int32_t row) {
    for (int k = 0; k < 4; k++) sum += IntPart(WordPart(codes) >> (8 * k) & 255u) * int32_t(int8_t(row >> (8 * k)));
    return sum;
}
#endif

// Adds the products of words, each a pair of 16-bit integers, with one pair.
inline IntPart add_short_pairs(IntPart sum, WordPart words, int32_t pair) {
#if defined(__AVX512VNNI__)
    return IntPart(_mm512_dpwssd_epi32(__m512i(sum), __m512i(words), _mm512_set1_epi32(pair)));
#elif defined(__AVX512BW__)
    return sum + IntPart(_mm512_madd_epi16(__m512i(words), _mm512_set1_epi32(pair)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + IntPart(_mm256_madd_epi16(__m256i(words), _mm256_set1_epi32(pair)));
#else
    return sum + (IntPart(words << 16) >> 16) * int32_t(int16_t(pair)) + (IntPart(words) >> 16) * (pair >> 16);
#endif
}

// Keeps compilers from reordering the sums so that all of them are live at once and registers spill.
template <class V> inline void in_order(V& sum) {
#if defined(__AVX2__)
    asm("" : "+v"(sum));
#endif
}

// Layout of a row's codes for weights of BITS bits: the four codes of a group are adjacent.
template <int BITS> struct Kept {
#ifdef HAS_PAIRS
    static constexpr bool IS_SPLIT = BITS > 6;  // even inputs before odd ones, as 16 bits
#else
    static constexpr bool IS_SPLIT = BITS > 8;
#endif
    typedef std::conditional_t<IS_SPLIT, int16_t, int8_t> Code;

    static void keep(Code* kept, Ints codes) {  // sixteen inputs
        if constexpr (IS_SPLIT) {
            typedef int16_t Shorts __attribute__((vector_size(32)));
            const Shorts order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
            store(kept, __builtin_shuffle(__builtin_convertvector(codes, Shorts), order));
        } else {
            store(kept, narrow(codes));
        }
    }
};

// Adds the products of GROUPS groups to sums[row][part]. codes(group, part): a part of a group of the matrix; row_of(row):
// the row's first group.
template <int BITS, int GROUPS, int ROWS, class Codes, class RowOf>
inline void dots(IntPart (&sums)[ROWS][PARTS], const Codes& codes, const RowOf& row_of) {
#ifdef HAS_PAIRS
    if constexpr (Kept<BITS>::IS_SPLIT) {
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; g++)
            for (int i = 0; i < PARTS; i++) {
                const UnsignedPart both = UnsignedPart(codes(g, i));
                const ShortPart even = ShortPart(both & 255), odd = ShortPart(both >> 8);
                for (int r = 0; r < ROWS; r++) {
                    sums[r][i] += pairs(even, four_bytes(row_of(r) + 4 * g));
                    sums[r][i] += pairs(odd, four_bytes(row_of(r) + 4 * g + 2));
                    in_order(sums[r][i]);
                }
            }
    } else {
        constexpr int ROOM = 32767 / (2 * 127 * ((1 << BITS) - 1)), AT_ONCE = std::min(ROOM, GROUPS);  // groups that fit 16 bits
        static_assert(GROUPS % AT_ONCE == 0);
#pragma GCC unroll 8
        for (int begin = 0; begin < GROUPS; begin += AT_ONCE) {
            ShortPart some[ROWS][PARTS];
#pragma GCC unroll 8
            for (int i = 0; i < AT_ONCE; i++) {
                const int g = begin + i;
                CodePart part[PARTS];
                for (int p = 0; p < PARTS; p++) part[p] = codes(g, p);
                for (int r = 0; r < ROWS; r++) {
                    const int32_t row = four_bytes(row_of(r) + 4 * g);
                    for (int p = 0; p < PARTS; p++) {
                        some[r][p] = i == 0 ? pairs(part[p], row) : some[r][p] + pairs(part[p], row);
                        in_order(some[r][p]);
                    }
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < PARTS; i++) sums[r][i] += pairs(some[r][i], 0x00010001);
        }
    }
#else
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++)
        for (int i = 0; i < PARTS; i++) {
            const CodePart part = codes(g, i);
            for (int r = 0; r < ROWS; r++) sums[r][i] = add_fours<BITS>(sums[r][i], part, four_bytes(row_of(r) + 4 * g));
        }
#endif
}

// As dots with codes of 16 bits. words(group, part, pairs): a part of a group, first its even inputs, then its odd ones.
template <int GROUPS, int ROWS, class Words, class RowOf>
inline void wide_dots(IntPart (&sums)[ROWS][PARTS], const Words& words, const RowOf& row_of) {
    constexpr bool IS_SHORT = ROWS * PARTS <= 4;  // so few sums that two of each hide latency
    IntPart odd[ROWS][PARTS] = {}, (&others)[ROWS][PARTS] = IS_SHORT ? odd : sums;
#pragma GCC unroll 16
    for (int g = 0; g < GROUPS; g++)
        for (int i = 0; i < PARTS; i++) {
            WordPart pairs[2];
            words(g, i, pairs);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) sums[r][i] = add_short_pairs(sums[r][i], pairs[0], four_bytes(row_of(r) + 4 * g));
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
                others[r][i] = add_short_pairs(others[r][i], pairs[1], four_bytes(row_of(r) + 4 * g + 2));
        }
    for (int r = 0; r < ROWS && IS_SHORT; r++)
        for (int i = 0; i < PARTS; i++) sums[r][i] += odd[r][i];
}

}  // namespace
