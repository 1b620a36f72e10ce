// Pieces of attention work, taken by idle threads from a shared queue.
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
    const bf16* q;           // (tokens, q heads, head_dim), token stride q_stride
    int64_t q_stride;
    int32_t has_gates;       // each query is followed by its gate, whose sigmoid multiplies the head's output
    bf16* out;               // (tokens, q heads, head_dim)
    int64_t q_heads;
    float scale;             // of scores
    float soft_cap;          // 0: none
    const float* sinks;      // (q heads): a score each without a value, or null
    int64_t window, chunk;   // 0: none; chunk: keys are seen from the start of the query's chunk of positions on
    int32_t by_tiles;        // use AMX (tiles.h) for many queries, if available
    const float* output_basis;  // (kv heads, head_dim, head_dim), or null; see basis.h
};

struct Piece {
    int64_t sequence;
    int64_t first_head, num_heads;  // KV heads
    int64_t token;                  // token in the step of its first query
    int64_t position, count;        // position of its first query, and number of queries
};

constexpr int64_t POSITIONS = HAS_TILES ? 128 : 64, PIECE_ROWS = HAS_TILES ? 512 : 256;  // maximum per piece: queries and outputs fit the L2 cache
constexpr int64_t FEW_QUERIES = 16;  // with these, loading keys and values takes longer than computing

// If there are enough pieces, those with few queries cover all heads, whose keys and values are adjacent in a block.
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
    // Longest first, so that no thread is left with a long piece at the end.
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) { return x.position > y.position; });
    return pieces;
}

}  // namespace
