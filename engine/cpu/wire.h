// Copies between a pool and a segment's payload, one layer at a time; and the checksum of a payload.
//
// Payload rows are ordered (token, kv, head): keys, then values. A raw payload has the pool's own bytes, of any dtype. A
// quantized one has codes and scales as a pool of that coding, from and to a bf16 pool. Single-threaded: called on a link's thread
// while the others compute.
#pragma once
#include <algorithm>

#include "pool.h"

namespace {

struct Wire {
    PoolView pool;           // scales and coding are ignored
    Coding coding;           // of the payload; PLAIN: raw
    int64_t row_bytes;       // of the payload; raw: of the pool too
    void* codes;             // (tokens, 2, heads) rows
    void* scales;            // (tokens, 2, heads), or null for a raw payload
    const int64_t* slots;    // (tokens)
    int64_t tokens, first_head, heads;
};

inline void copy_row(uint8_t* to, const uint8_t* from, int64_t num_bytes) {
    int64_t i = 0;
    for (; i + 64 <= num_bytes; i += 64) store(to + i, load<Ints>(from + i));
    std::memcpy(to + i, from + i, num_bytes - i);
}

// Calls f(payload row, pool row) for each. Tokens adjacent in a block form one run of the pool.
template <class F> inline void for_each_row(const Wire& w, F f) {
    for (int64_t token = 0, count; token < w.tokens; token += count) {
        const int64_t block = w.slots[token] / w.pool.block_size, offset = w.slots[token] % w.pool.block_size;
        const int64_t most = std::min(w.pool.block_size - offset, w.tokens - token);
        for (count = 1; count < most && w.slots[token + count] == w.slots[token] + count;) count++;
        for (int64_t kv = 0; kv < 2; kv++)
            for (int64_t head = 0; head < w.heads; head++) {
                const int64_t place = w.pool.first_row(block, kv, w.first_head + head) + offset;
                for (int64_t i = 0; i < count; i++) f(((token + i) * 2 + kv) * w.heads + head, place + i);
            }
    }
}

inline void pack(const Wire& w) {
    uint8_t* codes = static_cast<uint8_t*>(w.codes);
    const uint8_t* pool = static_cast<const uint8_t*>(w.pool.codes);
    const int64_t dim = w.pool.head_dim;
    if (w.coding == Coding::PLAIN)
        return for_each_row(w, [&](int64_t row, int64_t place) {
            copy_row(codes + row * w.row_bytes, pool + place * w.row_bytes, w.row_bytes);
        });
    with_coding(w.coding, [&](auto coding) {
        typedef decltype(coding) Codes;
        for_each_row(w, [&](int64_t row, int64_t place) {
            const bf16* x = reinterpret_cast<const bf16*>(pool) + place * dim;
            static_cast<typename Codes::Scale*>(w.scales)[row] = quantize_row<Codes>(x, dim, codes + row * w.row_bytes);
        });
    });
}

inline void unpack(const Wire& w) {
    const uint8_t* codes = static_cast<const uint8_t*>(w.codes);
    uint8_t* pool = static_cast<uint8_t*>(w.pool.codes);
    const int64_t dim = w.pool.head_dim;
    if (w.coding == Coding::PLAIN)
        return for_each_row(w, [&](int64_t row, int64_t place) {
            copy_row(pool + place * w.row_bytes, codes + row * w.row_bytes, w.row_bytes);
        });
    with_coding(w.coding, [&](auto coding) {
        typedef decltype(coding) Codes;
        for_each_row(w, [&](int64_t row, int64_t place) {
            bf16* to = reinterpret_cast<bf16*>(pool) + place * dim;
            widen_row<Codes>(codes + row * w.row_bytes, static_cast<const typename Codes::Scale*>(w.scales)[row], dim, to);
        });
    });
}

struct Payload {
    const uint8_t* bytes;
    int64_t num_words;  // of 8 bytes
    uint64_t sum;       // result
};

// Computes the sum over i of word[i] * (2 i + 1), as engine/kv/checksum.py defines it.
inline void add_up(Payload& p) {
    typedef uint64_t Longs __attribute__((vector_size(64)));
    constexpr int64_t WORDS = 8;
    Longs sums{}, odd = {1, 3, 5, 7, 9, 11, 13, 15};
    int64_t i = 0;
    for (; i + WORDS <= p.num_words; i += WORDS) {
        sums += load<Longs>(p.bytes + 8 * i) * odd;
        odd += 2 * WORDS;
    }
    p.sum = 0;
    for (int64_t lane = 0; lane < WORDS; lane++) p.sum += sums[lane];
    for (; i < p.num_words; i++) p.sum += load<uint64_t>(p.bytes + 8 * i) * uint64_t(2 * i + 1);
}

}  // namespace
