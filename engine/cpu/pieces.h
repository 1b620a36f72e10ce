// Attention's work, cut into pieces that whoever is free takes.
#pragma once
#include <algorithm>
#include <vector>

#include "pool.h"
#include "team.h"
#include "tiles.h"

namespace {

struct AttentionCall {
    Kind kind;
    PoolView pool;
    const bf16* q;           // (tokens, q heads, head_dim), a token every q_stride
    int64_t q_stride;
    bf16* out;               // (tokens, q heads, head_dim)
    int64_t q_heads;
    int64_t window;          // 0: none
    int32_t by_tiles;        // many queries by tiles.h, where there are such units
};

struct Piece {
    int64_t sequence;
    int64_t first_head, num_heads;  // of the keys and values
    int64_t token;                  // of the step, of its first query
    int64_t position, count;        // of its queries
};

constexpr int64_t POSITIONS = HAS_TILES ? 128 : 64, PIECE_ROWS = HAS_TILES ? 512 : 256;  // of one piece at most: queries and outputs stay in the second cache
constexpr int64_t FEW_QUERIES = 16;  // for which keys and values take longer to come than to be used

// Where there are enough of them, pieces with few queries have all heads: a block's keys and values lie beside each other.
inline std::vector<Piece> cut(const AttentionCall& a, const Step& step) {
    const int64_t kv_heads = a.pool.kv_heads, heads_of_few = step.sequences < 3 * step.threads ? 1 : kv_heads;
    const int64_t positions = std::clamp<int64_t>(PIECE_ROWS * kv_heads / a.q_heads, 1, POSITIONS);
    std::vector<Piece> pieces;
    for (int64_t s = 0, token = 0; s < step.sequences; token += step.query_lens[s++])
        for (int64_t q = 0, count; q < step.query_lens[s]; q += count) {
            count = std::min(positions, step.query_lens[s] - q);
            const int64_t num_heads = count < FEW_QUERIES ? heads_of_few : 1;
            for (int64_t h = 0; h < kv_heads; h += num_heads)
                pieces.push_back({s, h, num_heads, token + q, step.context_lens[s] - step.query_lens[s] + q, count});
        }
    // The longest first, so that no thread is left with one at the end.
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) { return x.position > y.position; });
    return pieces;
}

}  // namespace
