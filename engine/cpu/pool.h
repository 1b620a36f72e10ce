// One layer of a rank's KV pool: codes (blocks, 2, kv heads, block size, head dim), bf16 or e4m3 with a bf16 scale per row.
#pragma once
#include <cmath>

#include "vectors.h"

namespace {

struct Pool {
    void* codes;
    bf16* scales;  // null: the codes are bf16
    int64_t kv_heads, block_size, head_dim;

    // Where a block's keys (kind 0) or values (kind 1) of one head begin, counted in rows of head_dim.
    int64_t first_row(int64_t block, int64_t kind, int64_t head) const {
        return ((block * 2 + kind) * kv_heads + head) * block_size;
    }
};

// e4m3's bits at the same end of a float are the same number with an exponent that is 120 too small.
inline Floats widen_e4m3(Bytes codes) {
    const Ints bits = widen(codes) << 20 & Ints(Words{} + (1u << 31 | 0x7fu << 20));
    return Floats(bits) * 0x1p120f;
}

// Round to nearest, ties to even. |x| is at most 448 unless it is NaN.
inline uint8_t narrow_e4m3(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits & 0x80000000u;
    bits ^= sign;
    if (bits >= 1087u << 20) return 0x7f;  // 480 and beyond, NaN
    if (bits < 121u << 23) {               // below 2^-6: the float unit rounds to multiples of 2^-9
        const uint32_t magic = 141u << 23;
        float f, m;
        std::memcpy(&f, &bits, 4);
        std::memcpy(&m, &magic, 4);
        f += m;
        std::memcpy(&bits, &f, 4);
        return uint8_t((bits - magic) | sign >> 24);
    }
    bits += (uint32_t(7 - 127) << 23) + 0x7ffff + (bits >> 20 & 1);
    return uint8_t(bits >> 20 | sign >> 24);
}

// A row as floats. `row_floats` has room for whole vectors; what lies beyond head_dim stays as it is.
inline void read_row(const Pool& pool, int64_t row, float* row_floats) {
    const int64_t dim = pool.head_dim, start = row * dim;
    int64_t i = 0;
    if (!pool.scales) {
        const bf16* codes = static_cast<const bf16*>(pool.codes) + start;
        for (; i + LANES <= dim; i += LANES) store(row_floats + i, widen(load<Halves>(codes + i)));
        for (; i < dim; i++) row_floats[i] = widen(codes[i]);
        return;
    }
    const int8_t* codes = static_cast<const int8_t*>(pool.codes) + start;
    const float scale = widen(pool.scales[row]);
    for (; i + LANES <= dim; i += LANES) store(row_floats + i, widen_e4m3(load<Bytes>(codes + i)) * scale);
    for (; i < dim; i++) row_floats[i] = widen_e4m3(Bytes{} + codes[i])[0] * scale;
}

// Sixteen at once.
inline Bytes narrow_e4m3(Floats x) {
    const Words bits = Words(x), sign = bits & 0x80000000u, size = bits ^ sign;
    const Words normal = (size + ((uint32_t(7 - 127) << 23) + 0x7ffff) + (size >> 20 & 1)) >> 20;
    const Words tiny = Words(Floats(size) + 16384.0f) - (141u << 23);
    Words code = size < Words{} + (121u << 23) ? tiny : normal;
    code = size >= Words{} + (1087u << 20) ? Words{} + 0x7f : code;
    return narrow(Ints(code | sign >> 24));
}

// The codes of a row, and their scale, as in engine/kernels/fp8.py.
inline bf16 quantize_row(const bf16* x, int64_t dim, uint8_t* codes) {
    uint16_t most = 0;  // the bits of sizes are in the order of the sizes, and NaN comes last
    for (int64_t i = 0; i < dim; i++) {
        const uint16_t size = x[i] & 0x7fff;
        most = size > most ? size : most;
    }
    float scale = widen(bf16(most)) / 448.0f;
    scale = scale < 0x1p-120f ? 0x1p-120f : scale;
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    const bf16 rounded_up = bf16((bits + 0xffff) >> 16);  // so that no code exceeds 448
    scale = widen(rounded_up);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(codes + i, narrow_e4m3(widen(load<Halves>(x + i)) / scale));
    for (; i < dim; i++) codes[i] = narrow_e4m3(widen(x[i]) / scale);
    return rounded_up;
}

inline void widen_row(const uint8_t* codes, float scale, int64_t dim, bf16* x) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(x + i, narrow(widen_e4m3(load<Bytes>(codes + i)) * scale));
    for (; i < dim; i++) x[i] = narrow(widen_e4m3(Bytes{} + int8_t(codes[i]))[0] * scale);
}

// Store a row, quantised if the pool is e4m3.
inline void write_row(const Pool& pool, int64_t row, const bf16* x) {
    const int64_t dim = pool.head_dim, start = row * dim;
    if (pool.scales)
        pool.scales[row] = quantize_row(x, dim, static_cast<uint8_t*>(pool.codes) + start);
    else
        std::memcpy(static_cast<bf16*>(pool.codes) + start, x, dim * sizeof(bf16));
}

}  // namespace
