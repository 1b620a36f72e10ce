// 32-bit operands of attention. On processors that multiply pairs of bf16, a word is a pair whose products are added;
// elsewhere it is one float.
#pragma once
#include "pool.h"
#include "vectors.h"

namespace {

#ifdef HAS_PAIRS_OF_BF16

struct Word {
    static constexpr int NUMBERS = 2;

    static int64_t count(int64_t dim) { return round_up(dim, 2 * LANES) / 2; }

    static FloatPart add(FloatPart sum, WordPart words, uint32_t word) { return add_pairs(sum, words, word); }

    static void of_numbers(const bf16* x, int64_t dim, uint32_t* words) {
        std::memset(words, 0, count(dim) * 4);
        std::memcpy(words, x, dim * sizeof(bf16));
    }

    // Returns true if the pool's rows can be used as words in place.
    static bool are_in(const PoolView& pool) { return pool.coding == Coding::PLAIN && pool.head_dim % (2 * LANES) == 0; }

    // Converts a row of any other pool to words at `room`, without applying its scale.
    static const char* of_row(const PoolView& pool, int64_t row, uint32_t* room) {
        const int64_t dim = pool.head_dim;
        if (pool.coding == Coding::PLAIN) {
            of_numbers(reinterpret_cast<const bf16*>(pool.address(row)), dim, room);
        } else {
            bf16* x = reinterpret_cast<bf16*>(room);
#ifdef __AVX512BW__
            if (pool.coding == Coding::INT4 && dim % (2 * LANES) == 0) {
                of_nibbles(reinterpret_cast<const uint8_t*>(pool.address(row)), dim, x);
                return reinterpret_cast<const char*>(room);
            }
#endif
            with_coding(pool.coding, [&](auto coding) {
                const uint8_t* codes = reinterpret_cast<const uint8_t*>(pool.address(row));
                widen_codes<decltype(coding)>(codes, dim, [&](int64_t i, Floats y) { store(x + i, upper_half(y)); });
            });
            std::fill(x + dim, x + 2 * count(dim), bf16{});
        }
        return reinterpret_cast<const char*>(room);
    }

    // Pairs two rows: the numbers of a register of words from byte `at` on, even places first, then odd ones, each next to
    // the other row's.
    static void pair(const char* const* rows, int64_t at, WordPart to[NUMBERS]) {
        const WordPart x = load<WordPart>(rows[0] + at), y = load<WordPart>(rows[1] + at);
        to[0] = (x & 0xffffu) | y << 16;
        to[1] = x >> 16 | (y & 0xffff0000u);
    }

    static void of_weights(Floats weights, uint32_t* words) {
        store(words, narrow(weights));
    }

    // Puts sums in the order of `pair` into that of numbers.
    static void in_order(const float* sums, int64_t padded_dim, float* numbers) {
        const Ints order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
        for (int64_t i = 0; i < padded_dim; i += 2 * LANES) {
            Floats even, odd;
            for (int part = 0; part < PARTS; part++) {
                std::memcpy(reinterpret_cast<char*>(&even) + part * sizeof(FloatPart), sums + i + 2 * part * PART_LANES, sizeof(FloatPart));
                std::memcpy(reinterpret_cast<char*>(&odd) + part * sizeof(FloatPart), sums + i + (2 * part + 1) * PART_LANES, sizeof(FloatPart));
            }
            store(numbers + i, __builtin_shuffle(even, odd, order));
            store(numbers + i + LANES, __builtin_shuffle(even, odd, order + 8));
        }
    }

private:
    // For floats that are exact in bf16.
    static Halves upper_half(Floats x) { return halves_of(Words(x) >> 16); }

#ifdef __AVX512BW__
    // Looks up 32 codes of int4 at once, three times as fast as `widen_codes`.
    static void of_nibbles(const uint8_t* codes, int64_t dim, bf16* x) {
        typedef uint16_t Table __attribute__((vector_size(64)));
        const Table numbers = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,   // -8 to -1
                               0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};  // 0 to 7
        for (int64_t i = 0; i < dim; i += 2 * LANES) {
            const Words pairs = Words(_mm512_cvtepu8_epi32(load<__m128i>(codes + i / 2)));
            store(x + i, __builtin_shuffle(numbers, Table((pairs | pairs << 12) & 0x000f000fu)));
        }
    }
#endif
};

#else

struct Word {
    static constexpr int NUMBERS = 1;

    static int64_t count(int64_t dim) { return round_up(dim, LANES); }

    static FloatPart add(FloatPart sum, WordPart words, uint32_t word) {
        float number;
        std::memcpy(&number, &word, 4);
        return sum + FloatPart(words) * number;
    }

    static void of_numbers(const bf16* x, int64_t dim, uint32_t* words) {
        int64_t i = 0;
        for (; i + PART_LANES <= dim; i += PART_LANES) store(words + i, widen_part(x + i));
        for (; i < dim; i++) words[i] = uint32_t(x[i]) << 16;
        std::fill(words + dim, words + count(dim), 0u);
    }

    static bool are_in(const PoolView&) { return false; }

    static const char* of_row(const PoolView& pool, int64_t row, uint32_t* room) {
        const int64_t dim = pool.head_dim;
        if (pool.coding == Coding::PLAIN) {
            of_numbers(reinterpret_cast<const bf16*>(pool.address(row)), dim, room);
        } else {
            with_coding(pool.coding, [&](auto coding) {
                const uint8_t* codes = reinterpret_cast<const uint8_t*>(pool.address(row));
                widen_codes<decltype(coding)>(codes, dim, [&](int64_t i, Floats y) { store(room + i, y); });
            });
            std::fill(room + dim, room + count(dim), 0u);
        }
        return reinterpret_cast<const char*>(room);
    }

    // Returns the words of one row, starting at byte `at`.
    static void pair(const char* const* rows, int64_t at, WordPart to[NUMBERS]) { to[0] = load<WordPart>(rows[0] + at); }

    static void of_weights(Floats weights, uint32_t* words) { store(words, weights); }

    static void in_order(const float* sums, int64_t padded_dim, float* numbers) { std::copy_n(sums, padded_dim, numbers); }
};

#endif

constexpr int ROWS_AT_ONCE = 6;
// Vectors of sums that fit in registers, for few rows.
constexpr int VECTORS_AT_ONCE = REGISTERS == 16 ? 2 : 4;

template <int ROWS, int COUNT, class Begin, class End>
inline void few_vectors(const uint32_t* rows, int64_t stride, const uint32_t* words, int64_t height, int64_t num_words,
                        int64_t at, const Begin& begin, const End& end) {
    FloatPart sums[ROWS][COUNT];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COUNT; c++) sums[r][c] = begin(r, at + c * PART_LANES);
    for (int64_t g = 0; g < num_words; g++) {
        WordPart some[COUNT];
        for (int c = 0; c < COUNT; c++) some[c] = load<WordPart>(words + (at + c * PART_LANES) * height + g * PART_LANES);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COUNT; c++) sums[r][c] = Word::add(sums[r][c], some[c], rows[r * stride + g]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COUNT; c++) end(r, at + c * PART_LANES, sums[r][c]);
}

// Computes the sum of rows (ROWS, num_words; row stride `stride`) times words (num_words, count); `begin` initializes and
// `end` receives it: (row, first lane's place). Words are in columns of one register's width and `height` rows, as for tiles.
template <int ROWS, class Begin, class End>
inline void by_words(const uint32_t* rows, int64_t stride, const uint32_t* words, int64_t height, int64_t num_words,
                     int64_t count, const Begin& begin, const End& end) {
    int64_t at = 0;
    for (; at + VECTORS_AT_ONCE * PART_LANES <= count; at += VECTORS_AT_ONCE * PART_LANES)
        few_vectors<ROWS, VECTORS_AT_ONCE>(rows, stride, words, height, num_words, at, begin, end);
    for (; at < count; at += PART_LANES) few_vectors<ROWS, 1>(rows, stride, words, height, num_words, at, begin, end);
}

}  // namespace
