// View of one layer of a rank's KV pool: codes (blocks, 2, kv heads, block size, head dim), bf16, or 8 bits with a bf16
// scale per row, or 4 bits with a bf16 scale and zero per rotated row. Formats: engine/kernels/quant/row_quantization.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "hadamard.h"
#include "vectors.h"

namespace {

enum class Coding : int32_t { PLAIN, E4M3, INT8, INT4 };  // PLAIN: unquantized

struct PoolView {
    void* codes;
    void* scales;   // bf16; INT4: pairs of scale and zero; null: the codes are plain bf16
    Coding coding;
    int32_t is_windowed;  // blocks and slots are those of layers with a window; see Step
    int64_t kv_heads, block_size, head_dim;

    // Returns the first row (in units of head_dim) of a block's keys (kv 0) or values (kv 1) of one head.
    int64_t first_row(int64_t block, int64_t kv, int64_t head) const {
        return ((block * 2 + kv) * kv_heads + head) * block_size;
    }
    int64_t row_bytes() const {
        return coding == Coding::PLAIN ? head_dim * sizeof(bf16) : coding == Coding::INT4 ? head_dim / 2 : head_dim;
    }
    const char* address(int64_t row) const { return static_cast<const char*>(codes) + row * row_bytes(); }
    bool is_rotated() const { return coding == Coding::INT4; }  // and its rows have zeros
    float scale(int64_t row) const { return widen(static_cast<const bf16*>(scales)[is_rotated() ? 2 * row : row]); }
    float zero(int64_t row) const { return widen(static_cast<const bf16*>(scales)[2 * row + 1]); }
};

// Codings of a byte per number: `widen` is exact; `narrow` rounds to nearest, ties to even, values of magnitude up to MOST
// or NaN.
struct Bytewise {
    typedef bf16 Scale;
    static Bytes sixteen(const uint8_t* codes, int64_t i) { return load<Bytes>(codes + i); }  // from number i on
    static int8_t one(const uint8_t* codes, int64_t i) { return int8_t(codes[i]); }
};

struct E4m3Codes : Bytewise {
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

struct Int8Codes : Bytewise {
    static constexpr float MOST = 127;

    static Floats widen(Bytes codes) { return __builtin_convertvector(::widen(codes), Floats); }
    static Bytes narrow(Floats x) {  // adding 1.5 * 2^23 leaves the nearest integer in the low bits; NaN becomes 0
        const Floats magic = all(12582912.0f);
        const Ints whole = Ints(x + magic) - Ints(magic);
        return ::narrow(x == x ? whole : Ints{});
    }
};

// Two codes per byte, the first in the low bits; widened without the row's zero.
struct Int4Codes {
    struct Scale {
        bf16 scale, zero;
    };

    static Bytes sixteen(const uint8_t* codes, int64_t i) {
        typedef uint64_t Two __attribute__((vector_size(16)));
        const Bytes order = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
        const uint64_t eight = load<uint64_t>(codes + i / 2);
        return __builtin_shuffle(Bytes(Two{eight, eight >> 4}) & 15, order) - 8;
    }
    static int8_t one(const uint8_t* codes, int64_t i) { return int8_t((codes[i / 2] >> (i & 1) * 4 & 15) - 8); }
    static uint64_t pairs(Bytes codes) {  // the inverse of `sixteen`
        typedef uint16_t Eight __attribute__((vector_size(16)));
        typedef uint8_t Packed __attribute__((vector_size(8)));
        const Eight both = Eight(codes + 8);
        return uint64_t(__builtin_convertvector(both | both >> 4, Packed));
    }
    static Floats widen(Bytes codes) { return Int8Codes::widen(codes); }
};

// Calls f with the coding's type, which must not be PLAIN.
template <class F> inline void with_coding(Coding coding, const F& f) {
    switch (coding) {
        case Coding::INT4: return f(Int4Codes{});
        case Coding::INT8: return f(Int8Codes{});
        default: return f(E4m3Codes{});
    }
}

// Widens a row of codes: put(i, sixteen numbers) from number i on. The last ones may be beyond the row, and undefined.
template <class Codes, class Put> inline void widen_codes(const uint8_t* codes, int64_t dim, const Put& put) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) put(i, Codes::widen(Codes::sixteen(codes, i)));
    if (i == dim) return;
    Bytes rest{};
    for (int64_t k = i; k < dim; k++) rest[k - i] = Codes::one(codes, k);
    put(i, Codes::widen(rest));
}

inline bf16 scale_of(float size, float most) {
    float scale = size / most;
    scale = scale < 0x1p-120f ? 0x1p-120f : scale;
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    return bf16((bits + 0xffff) >> 16);  // rounded up, so that no code exceeds `most`
}

// Returns room for a row in fp32, one per thread.
inline float* room_for_row(int64_t dim) {
    static thread_local std::vector<float> room;
    room.resize(std::max<size_t>(room.size(), round_up(dim, LANES)));
    return room.data();
}

// Quantizes a row and returns its scale.
template <class Codes> inline typename Codes::Scale quantize_row(const bf16* x, int64_t dim, uint8_t* codes) {
    uint16_t most = 0;  // magnitudes order like their bits, NaN last
    for (int64_t i = 0; i < dim; i++) {
        const uint16_t size = x[i] & 0x7fff;
        most = size > most ? size : most;
    }
    const bf16 rounded_up = scale_of(widen(bf16(most)), Codes::MOST);
    const float scale = widen(rounded_up);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(codes + i, Codes::narrow(widen(load<Halves>(x + i)) / scale));
    for (; i < dim; i++) codes[i] = Codes::narrow(all(widen(x[i]) / scale))[0];
    return rounded_up;
}

template <> inline Int4Codes::Scale quantize_row<Int4Codes>(const bf16* x, int64_t dim, uint8_t* codes) {
    float* y = room_for_row(dim);
    widen_numbers(x, dim, y);
    rotate_row(y, dim);
    std::fill(y + dim, y + round_up(dim, LANES), y[0]);
    Floats least = all(y[0]), most = least, nothing{};  // nothing: NaN if a number is not finite
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats some = load<Floats>(y + i);
        least = some < least ? some : least;
        most = some > most ? some : most;
        nothing += some - some;
    }
    const float low = -greatest(-least);
    const bf16 scale = scale_of(greatest(most) - low + sum(nothing), 15), zero = narrow(low + 8 * widen(scale));
    for (int64_t i = 0; i < dim; i += LANES) {
        Floats steps = (load<Floats>(y + i) - widen(zero)) / widen(scale);
        steps = steps > 7.0f ? all(7.0f) : steps;
        steps = steps < -8.0f ? all(-8.0f) : steps;
        const uint64_t eight = Int4Codes::pairs(Int8Codes::narrow(steps));
        std::memcpy(codes + i / 2, &eight, std::min<int64_t>(dim - i, LANES) / 2);
    }
    return {scale, zero};
}

template <class Codes> inline void widen_row(const uint8_t* codes, bf16 scale, int64_t dim, bf16* to) {
    widen_codes<Codes>(codes, dim, [&](int64_t i, Floats x) {
        const Halves numbers = narrow(x * widen(scale));
        if (i + LANES <= dim) store(to + i, numbers);
        else std::memcpy(to + i, &numbers, (dim - i) * sizeof(bf16));
    });
}
template <class Codes> inline void widen_row(const uint8_t* codes, Int4Codes::Scale scale, int64_t dim, bf16* to) {
    float* y = room_for_row(dim);
    widen_codes<Codes>(codes, dim, [&](int64_t i, Floats x) { store(y + i, x * widen(scale.scale) + widen(scale.zero)); });
    unrotate_row(y, dim);
    narrow_numbers(y, dim, to);
}

// Stores a row, quantized if the pool has scales.
inline void write_row(const PoolView& pool, int64_t row, const bf16* x) {
    uint8_t* codes = static_cast<uint8_t*>(pool.codes) + row * pool.row_bytes();
    if (pool.coding == Coding::PLAIN) {
        std::memcpy(codes, x, pool.row_bytes());
        return;
    }
    with_coding(pool.coding, [&](auto coding) {
        typedef decltype(coding) Codes;
        static_cast<typename Codes::Scale*>(pool.scales)[row] = quantize_row<Codes>(x, pool.head_dim, codes);
    });
}

}  // namespace
