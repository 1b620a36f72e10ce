// Products with AMX: a tile of 16 rows times a tile of 16 outputs, 64 bytes of inputs at a time, summed in tiles. The panels
// of matrix.h already have the required layout: sixteen groups form a tile.
//
// Integer results equal those without AMX; bf16 sums are accumulated in another order.
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#elif defined(EMULATED_TILES) && defined(__AVX512BF16__)  // for tests on machines without AMX
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#include <algorithm>
#include <type_traits>
#include <utility>

#include "product.h"

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;
constexpr int64_t TILED_ROWS = 2 * TILE_ROWS;  // multiplied with two panels at a time, so that each loaded tile is used twice
constexpr int64_t SPARE_TILED_ROWS = HAS_TILES ? TILED_ROWS - 1 : 0;  // rows past the last one that tiles may read

#if HAS_TILES

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES};
    uint8_t rows[16] = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS};

    // num_rows: rows of the sum tiles and of the input tile.
    constexpr explicit TileShapes(int num_rows) {
        for (int tile = 0; tile <= 4; tile++) rows[tile] = num_rows;
    }
};

// Static, because compilers assume that only the first bytes of a local one are read.
template <int... N> struct Shapes { static constexpr TileShapes OF_ROWS[] = {TileShapes(N + 1)...}; };
template <int... N> constexpr const TileShapes* shapes(std::integer_sequence<int, N...>) { return Shapes<N...>::OF_ROWS; }

// Requests AMX permission from the system, once per process, before first use. Returns false if denied.
inline bool may_use_tiles() {
#ifdef EMULATED_TILES
    return true;
#else
    constexpr long ASK_FOR_UNITS = 0x1023, TILE_DATA = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return syscall(SYS_arch_prctl, ASK_FOR_UNITS, TILE_DATA) == 0;
#endif
}

inline void zero_four() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// RAII: configures AMX for this thread.
class TileUnits {
public:
    ~TileUnits() {
        if (are_used) _tile_release();
    }
    // num_rows: with fewer rows than a tile has, the rest is neither read nor computed.
    void use(int64_t num_rows = TILE_ROWS) {
        if (are_used) return;
        constexpr const TileShapes* OF_ROWS = shapes(std::make_integer_sequence<int, TILE_ROWS>());
        _tile_loadconfig(OF_ROWS + std::min<int64_t>(num_rows, TILE_ROWS) - 1);
        are_used = true;
    }

private:
    bool are_used = false;
};

// Writes finished sums while the next ones are computed: AMX leaves the vector units free.
template <class Weights, class Rows> class Results {
public:
    Results(const ProductCall& p, const Rows& rows) : p(p), rows(rows) {}

    // Takes the sums of rows [row, end) and panels [panel, last) from the tiles. Earlier results must have been written.
    void take(int64_t row, int64_t end, int64_t panel, int64_t last) {
        first_row = at_row = row, end_row = end, first_panel = at_panel = panel, end_panel = last;
        _tile_stored(0, sums[0], TILE_BYTES);
        _tile_stored(1, sums[1], TILE_BYTES);
        _tile_stored(2, sums[2], TILE_BYTES);
        _tile_stored(3, sums[3], TILE_BYTES);
    }

    void put_some(int64_t count) {
        for (; count > 0 && at_row < end_row; count--) {
            const int64_t r = at_row - first_row, i = at_panel - first_panel;
            const auto sum = sums[r / TILE_ROWS * 2 + i][r % TILE_ROWS];
            put(p, Weights::value(sum, p, at_panel * LANES, rows.scales[at_row]), at_row, at_panel * LANES);
            if (++at_panel == end_panel) at_panel = first_panel, at_row++;
        }
    }
    void put_all() { put_some(INT64_MAX); }

private:
    const ProductCall& p;
    const Rows& rows;
    alignas(64) typename Weights::Sum sums[4][TILE_ROWS];
    int64_t first_row, at_row = 0, end_row = 0, first_panel, at_panel = 0, end_panel;
};

// The operands are tile names, which cannot be variables.
#define ADD_TILE(SUM, X, W) \
    if constexpr (std::is_same_v<Sum, Floats>) _tile_dpbf16ps(SUM, X, W); \
    else _tile_dpbusd(SUM, X, W)

// Multiplies two tiles of rows with two panels. meanwhile(at): called for each 64 bytes of inputs.
template <class Sum, class F>
inline void two_by_two(const char* x, int64_t stride, const char* w, const char* next, int64_t bytes, const F& meanwhile) {
    const char* below = x + TILE_ROWS * stride;
    for (int64_t at = 0; at < bytes; at += TILE_BYTES) {
        _tile_loadd(4, x + at, stride);
        _tile_loadd(6, w + at * TILE_ROWS, TILE_BYTES);
        ADD_TILE(0, 4, 6);
        _tile_loadd(7, next + at * TILE_ROWS, TILE_BYTES);
        ADD_TILE(1, 4, 7);
        _tile_loadd(5, below + at, stride);
        ADD_TILE(2, 5, 6);
        ADD_TILE(3, 5, 7);
        meanwhile(at);
    }
}

// Multiplies one tile of rows with four panels, the maximum that fits.
template <class Sum, class F>
inline void one_by_four(const char* x, int64_t stride, const char* const (&w)[4], int64_t bytes, const F& meanwhile) {
    for (int64_t at = 0; at < bytes; at += TILE_BYTES) {
        const int64_t place = at * TILE_ROWS;
        _tile_loadd(4, x + at, stride);
        _tile_loadd(5, w[0] + place, TILE_BYTES);
        ADD_TILE(0, 4, 5);
        _tile_loadd(6, w[1] + place, TILE_BYTES);
        ADD_TILE(1, 4, 6);
        _tile_loadd(7, w[2] + place, TILE_BYTES);
        ADD_TILE(2, 4, 7);
        _tile_loadd(5, w[3] + place, TILE_BYTES);
        ADD_TILE(3, 4, 5);
        meanwhile(at);
    }
}

#undef ADD_TILE

// Multiplies TILES tiles of rows (pairs of bf16, as words) with two tile widths of words.
template <int TILES> struct Tiles {
    static void load(const float* sums, int64_t stride) {
        _tile_loadd(0, sums, stride * 4);
        _tile_loadd(1, sums + LANES, stride * 4);
        if constexpr (TILES == 1) return;
        _tile_loadd(2, sums + TILE_ROWS * stride, stride * 4);
        _tile_loadd(3, sums + TILE_ROWS * stride + LANES, stride * 4);
    }
    static void store(float* sums, int64_t stride) {
        _tile_stored(0, sums, stride * 4);
        _tile_stored(1, sums + LANES, stride * 4);
        if constexpr (TILES == 1) return;
        _tile_stored(2, sums + TILE_ROWS * stride, stride * 4);
        _tile_stored(3, sums + TILE_ROWS * stride + LANES, stride * 4);
    }
    // words: (num_words, 2 LANES), in two columns as in words.h. num_words: a multiple of the tile width.
    static void add(const uint32_t* rows, int64_t stride, const uint32_t* words, int64_t height, int64_t num_words) {
        const char *x = reinterpret_cast<const char*>(rows), *first = reinterpret_cast<const char*>(words);
        const char* second = first + height * TILE_BYTES;
        if constexpr (TILES == 2) return two_by_two<Floats>(x, stride * 4, first, second, num_words * 4, [](int64_t) {});
        for (int64_t at = 0; at < num_words * 4; at += TILE_BYTES) {
            _tile_loadd(4, x + at, stride * 4);
            _tile_loadd(6, first + at * TILE_ROWS, TILE_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, second + at * TILE_ROWS, TILE_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
};

// Prefetches tiles two ahead, because tile loads hide less latency than line-by-line loads. Saves 4 to 25 % of the time of
// products with 5 to 32 rows.
inline void fetch_tiles(const char* const (&w)[4], int count, int64_t at, int64_t bytes) {
    constexpr int64_t AHEAD = 2 * TILE_BYTES;
    const int64_t next = at + AHEAD < bytes ? 0 : (count - 1) * bytes;  // at the end of a panel, continue with the next ones
    for (int i = 0; i < count; i++)
#pragma GCC unroll 16
        for (int line = 0; line < TILE_ROWS; line++)
            __builtin_prefetch(w[i] + (at + AHEAD + next) * TILE_ROWS + line * TILE_BYTES, 0, 2);
}

// Multiplies rows [row, end) by panels [first, last), the first one at `panels`. Inputs fill whole tiles.
template <class Weights, class Rows>
inline void tiled_rows_of(const ProductCall& p, const Rows& rows, int64_t row, int64_t end, int64_t first, int64_t last,
                          const char* panels) {
    const int64_t stride = rows.stride * sizeof(*rows.x), row_bytes = rows.groups * 4, panel_bytes = row_bytes * TILE_ROWS;
    const auto address = [&](int64_t panel) { return panels + (std::min(panel, last - 1) - first) * panel_bytes; };
    const int64_t at_once = (4 * TILE_ROWS * TILE_BYTES + row_bytes - 1) / row_bytes;
    Results<Weights, Rows> results(p, rows);
    const int64_t begin = row;
    for (; row < end; row += TILED_ROWS) {
        const char* x = reinterpret_cast<const char*>(rows.x) + row * stride;
        const bool is_tall = end - row > TILE_ROWS;
        const int wide = is_tall ? 2 : 4;
        for (int64_t panel = first; panel < last; panel += wide) {
            const char* const w[4] = {address(panel), address(panel + 1), address(panel + 2), address(panel + 3)};
            const auto meanwhile = [&](int64_t at) {
                results.put_some(at_once);
                if (row == begin) fetch_tiles(w, wide, at, row_bytes);  // other rows find them in the cache
            };
            zero_four();
            if (is_tall) two_by_two<typename Weights::Sum>(x, stride, w[0], w[1], row_bytes, meanwhile);
            else one_by_four<typename Weights::Sum>(x, stride, w, row_bytes, meanwhile);
            results.take(row, std::min(row + TILED_ROWS, end), panel, std::min(panel + wide, last));
        }
    }
    results.put_all();
}

#else

inline bool may_use_tiles() { return false; }

class TileUnits {};

#endif

}  // namespace
