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
    const Ints bits = __builtin_convertvector(codes, Ints) << 20 & Ints(Words{} + (1u << 31 | 0x7fu << 20));
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

// Store a row; as engine/kernels/fp8.py does if the pool is e4m3.
inline void write_row(const Pool& pool, int64_t row, const bf16* x) {
    const int64_t dim = pool.head_dim, start = row * dim;
    if (!pool.scales) {
        std::memcpy(static_cast<bf16*>(pool.codes) + start, x, dim * sizeof(bf16));
        return;
    }
    float most = 0;
    for (int64_t i = 0; i < dim; i++) {
        const float size = std::fabs(widen(x[i]));
        most = size > most || size != size ? size : most;
    }
    float scale = most / 448.0f;
    scale = scale < 0x1p-120f ? 0x1p-120f : scale;
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    pool.scales[row] = bf16((bits + 0xffff) >> 16);  // up, so that no code exceeds 448
    scale = widen(pool.scales[row]);
    uint8_t* codes = static_cast<uint8_t*>(pool.codes) + start;
    for (int64_t i = 0; i < dim; i++) codes[i] = narrow_e4m3(widen(x[i]) / scale);
}

}  // namespace
