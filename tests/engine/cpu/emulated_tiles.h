// AMX's tiles in memory, as Intel's manual describes the instructions: for processors that have none.
#pragma once
#define EMULATED_TILES
#undef __AMX_TILE__  // all else is as there, too, wherever this is compiled

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>  // before its names mean something else
#endif

extern "C" {
int32_t num_released = 0;  // products that have used tiles, or more: threads may count at once
}

namespace emulated {

constexpr int TILES = 8, ROWS = 16, BYTES = 64;
thread_local char tiles[TILES][ROWS][BYTES];
thread_local int rows_of[TILES];
thread_local bool is_ready = false;

inline void configure(const void* shapes) {  // all are as wide as can be; they begin as zeros
    const uint8_t* bytes = static_cast<const uint8_t*>(shapes);
    is_ready = bytes[0] == 1;
    for (int t = 0; t < TILES; t++) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
        rows_of[t] = bytes[48 + t];
        is_ready = is_ready && row_bytes == BYTES && 0 < rows_of[t] && rows_of[t] <= ROWS;
    }
    std::memset(tiles, 0, sizeof tiles);
}

inline void check() {
    if (!is_ready) __builtin_trap();  // as the processor does
}

inline void zero(int t) {
    check();
    std::memset(tiles[t], 0, sizeof tiles[t]);
}

inline void load(int t, const void* from, int64_t stride) {
    check();
    std::memset(tiles[t], 0, sizeof tiles[t]);
    for (int r = 0; r < rows_of[t]; r++) std::memcpy(tiles[t][r], static_cast<const char*>(from) + r * stride, BYTES);
}

inline void keep(int t, void* to, int64_t stride) {
    check();
    for (int r = 0; r < rows_of[t]; r++) std::memcpy(static_cast<char*>(to) + r * stride, tiles[t][r], BYTES);
}

template <class T> inline T at(int t, int row, int index) {
    T value;
    std::memcpy(&value, tiles[t][row] + index * sizeof(T), sizeof(T));
    return value;
}

inline float wide(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// A sum has the rows of what is multiplied, whose columns are as many as the other's rows.
inline void check(int c, int a, int b) {
    check();
    if (rows_of[c] != rows_of[a] || rows_of[b] != ROWS) __builtin_trap();
}

// Even and odd inputs are added up apart, then together.
inline void add_bf16(int c, int a, int b) {
    check(c, a, b);
    for (int m = 0; m < rows_of[c]; m++) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) {
                even[n] += wide(at<uint16_t>(a, m, 2 * k)) * wide(at<uint16_t>(b, k, 2 * n));
                odd[n] += wide(at<uint16_t>(a, m, 2 * k + 1)) * wide(at<uint16_t>(b, k, 2 * n + 1));
            }
        for (int n = 0; n < 16; n++) {
            const float sum = at<float>(c, m, n) + (even[n] + odd[n]);
            std::memcpy(tiles[c][m] + 4 * n, &sum, 4);
        }
    }
}

// Unsigned bytes of the first by signed ones of the second.
inline void add_int8(int c, int a, int b) {
    check(c, a, b);
    for (int m = 0; m < rows_of[c]; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) {
                int32_t sum = at<int32_t>(c, m, n);
                for (int i = 0; i < 4; i++)
                    sum += int32_t(at<uint8_t>(a, m, 4 * k + i)) * int32_t(at<int8_t>(b, k, 4 * n + i));
                std::memcpy(tiles[c][m] + 4 * n, &sum, 4);
            }
}

}  // namespace emulated

#undef _tile_loadconfig
#define _tile_loadconfig(shapes) emulated::configure(shapes)
#undef _tile_release
#define _tile_release() (emulated::is_ready = false, num_released++)
#undef _tile_zero
#define _tile_zero(t) emulated::zero(t)
#undef _tile_loadd
#define _tile_loadd(t, from, stride) emulated::load(t, from, stride)
#undef _tile_stored
#define _tile_stored(t, to, stride) emulated::keep(t, to, stride)
#undef _tile_dpbf16ps
#define _tile_dpbf16ps(c, a, b) emulated::add_bf16(c, a, b)
#undef _tile_dpbusd
#define _tile_dpbusd(c, a, b) emulated::add_int8(c, a, b)
