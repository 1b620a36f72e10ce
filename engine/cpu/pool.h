// View of one layer of a rank's KV pool: codes (blocks, 2, kv heads, block size, head dim), bf16, or 8 bits with a bf16
// scale per row.
#pragma once
#include <cmath>

#include "vectors.h"

namespace {

enum class Coding : int32_t { PLAIN, E4M3, INT8 };  // PLAIN: unquantized

struct PoolView {
    void* codes;
    bf16* scales;   // null: the codes are plain bf16
    Coding coding;
    int64_t kv_heads, block_size, head_dim;

    // Returns the first row (in units of head_dim) of a block's keys (kv 0) or values (kv 1) of one head.
    int64_t first_row(int64_t block, int64_t kv, int64_t head) const {
        return ((block * 2 + kv) * kv_heads + head) * block_size;
    }
    int64_t row_bytes() const { return head_dim * (coding == Coding::PLAIN ? sizeof(bf16) : 1); }
    const char* address(int64_t row) const { return static_cast<const char*>(codes) + row * row_bytes(); }
};

// Codings: `widen` is exact; `narrow` rounds to nearest, ties to even, values of magnitude up to MOST or NaN.
struct E4m3Codes {
    static constexpr float MOST = 448;

    // The bits of e4m3 at the top of a float are the same number with an exponent that is 120 too small.
    static Floats widen(Bytes codes) {
        const Ints bits = ::widen(codes) << 20 & Ints(Words{} + (1u << 31 | 0x7fu << 20));
        return Floats(bits) * 0x1p120f;
    }
    static Bytes narrow(Floats x) {
        const Words bits = Words(x), sign = bits & 0x80000000u, size = bits ^ sign;
        const Words normal = (size + ((uint32_t(7 - 127) << 23) + 0x7ffff) + (size >> 20 & 1)) >> 20;
        const Words tiny = Words(Floats(size) + 16384.0f) - (141u << 23);  // below 2^-6: multiples of 2^-9
        Words code = size < Words{} + (121u << 23) ? tiny : normal;
        code = size >= Words{} + (1087u << 20) ? Words{} + 0x7f : code;  // 480 and beyond, NaN
        return ::narrow(Ints(code | sign >> 24));
    }
};

struct Int8Codes {
    static constexpr float MOST = 127;

    static Floats widen(Bytes codes) { return __builtin_convertvector(::widen(codes), Floats); }
    static Bytes narrow(Floats x) {  // adding 1.5 * 2^23 leaves the nearest integer in the low bits; NaN becomes 0
        const Floats magic = all(12582912.0f);
        const Ints whole = Ints(x + magic) - Ints(magic);
        return ::narrow(x == x ? whole : Ints{});
    }
};

// Calls f with the coding's type, which must not be PLAIN.
template <class F> inline auto with_coding(Coding coding, F f) {
    return coding == Coding::INT8 ? f(Int8Codes{}) : f(E4m3Codes{});
}

// Quantizes a row and returns its scale, as in engine/kernels/quant/row_quantization.py.
template <class Codes> inline bf16 quantize_row(const bf16* x, int64_t dim, uint8_t* codes) {
    uint16_t most = 0;  // magnitudes order like their bits, NaN last
    for (int64_t i = 0; i < dim; i++) {
        const uint16_t size = x[i] & 0x7fff;
        most = size > most ? size : most;
    }
    float scale = widen(bf16(most)) / Codes::MOST;
    scale = scale < 0x1p-120f ? 0x1p-120f : scale;
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    const bf16 rounded_up = bf16((bits + 0xffff) >> 16);  // so that no code exceeds MOST
    scale = widen(rounded_up);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(codes + i, Codes::narrow(widen(load<Halves>(x + i)) / scale));
    for (; i < dim; i++) codes[i] = Codes::narrow(all(widen(x[i]) / scale))[0];
    return rounded_up;
}

template <class Codes> inline void widen_row(const uint8_t* codes, float scale, int64_t dim, bf16* to) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(to + i, narrow(Codes::widen(load<Bytes>(codes + i)) * scale));
    for (; i < dim; i++) to[i] = narrow(Codes::widen(Bytes{} + int8_t(codes[i]))[0] * scale);
}

// Stores a row, quantized if the pool has 8 bits.
inline void write_row(const PoolView& pool, int64_t row, const bf16* x) {
    const int64_t dim = pool.head_dim, start = row * dim;
    if (pool.coding == Coding::PLAIN) {
        std::memcpy(static_cast<bf16*>(pool.codes) + start, x, dim * sizeof(bf16));
        return;
    }
    uint8_t* codes = static_cast<uint8_t*>(pool.codes) + start;
    pool.scales[row] = with_coding(pool.coding, [&](auto coding) { return quantize_row<decltype(coding)>(x, dim, codes); });
}

}  // namespace
