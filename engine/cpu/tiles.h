// Products by AMX: a tile of 16 rows meets a tile of 16 outputs, 64 bytes of inputs of each at a time, with the sums in
// tiles, too. A panel of matrix.h is laid out as these units want it: sixteen groups of it are a tile.
//
// Whole numbers come out as they do without; sums of bf16 are added up in another order.
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#elif defined(EMULATED_TILES) && defined(__AVX512BF16__)  // by tests, where there are no such units
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#include <algorithm>

#include "product.h"

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;
constexpr int64_t TILED_ROWS = 2 * TILE_ROWS;  // that meet two panels at once: each tile that is loaded serves twice
constexpr int64_t SPARE_TILED_ROWS = HAS_TILES ? TILED_ROWS - 1 : 0;  // beyond the last one, at which tiles may look

#if HAS_TILES

struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES};
    uint8_t rows[16] = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS};
};

alignas(64) constexpr TileShapes ALL_WHOLE;  // no local one: compilers believe that only its first bytes are read

// The system has to be asked once for a process, before anybody uses them. False: it does not let us.
inline bool may_use_tiles() {
#ifdef EMULATED_TILES
    return true;
#else
    constexpr long ASK_FOR_UNITS = 0x1023, TILE_DATA = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return syscall(SYS_arch_prctl, ASK_FOR_UNITS, TILE_DATA) == 0;
#endif
}

// Rows [row, end) by panels [first, last). Inputs fill whole tiles.
template <class Weights, class Rows>
inline void tiled_rows_of(const ProductCall& p, const Rows& rows, int64_t row, int64_t end, int64_t first, int64_t last) {
    const int64_t row_bytes = rows.stride * sizeof(*rows.x), panel_bytes = row_bytes * TILE_ROWS;
    alignas(64) typename Weights::Sum sums[4][TILE_ROWS];
    for (; row < end; row += TILED_ROWS) {
        const char* x = reinterpret_cast<const char*>(rows.x) + row * row_bytes;
        for (int64_t panel = first; panel < last; panel += 2) {
            const char* w = static_cast<const char*>(p.panels) + panel * panel_bytes;
            const char* next = panel + 1 < last ? w + panel_bytes : w;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t at = 0; at < row_bytes; at += TILE_BYTES) {
                _tile_loadd(4, x + at, row_bytes);
                _tile_loadd(5, x + TILE_ROWS * row_bytes + at, row_bytes);
                _tile_loadd(6, w + at * TILE_ROWS, TILE_BYTES);
                _tile_loadd(7, next + at * TILE_ROWS, TILE_BYTES);
                Weights::add_tiles();
            }
            _tile_stored(0, sums[0], TILE_BYTES);
            _tile_stored(1, sums[1], TILE_BYTES);
            _tile_stored(2, sums[2], TILE_BYTES);
            _tile_stored(3, sums[3], TILE_BYTES);
            for (int64_t r = row; r < std::min(row + TILED_ROWS, end); r++)
                for (int64_t i = panel; i < std::min(panel + 2, last); i++) {
                    const auto sum = sums[(r - row) / TILE_ROWS * 2 + i - panel][(r - row) % TILE_ROWS];
                    put(p, Weights::value(sum, p, i * LANES, rows.scales[r]), r, i * LANES);
                }
        }
    }
}

#else

inline bool may_use_tiles() { return false; }

#endif

}  // namespace
