// Threads of a run: static shares, a shared queue of pieces, and a barrier.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "ahead.h"
#include "vectors.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

enum Kind : int32_t { MULTIPLY_BF16, MULTIPLY_INT8, MULTIPLY_FEW_BITS, ROTATE, ATTEND, ADD_NORM, CONVOLVE, RECUR, GATED_NORM };  // operation; first field of every call's arguments

// Angles of one kind of rotation: numbers i and i + pairs of a head are rotated, for i < pairs.
struct Angles {
    const bf16 *cos, *sin;                     // (tokens, pairs)
    int64_t pairs;
};

// Arguments of a step, the same for every layer.
struct Step {
    int64_t tokens;
    int64_t undrafted;  // tokens without drafts, which must not change the order of sums
    int64_t sequences, table_width;
    const int64_t* slots;                      // (tokens)
    const Angles* angles;                      // by kind of rotation
    const int64_t *tables;                     // (sequences, table_width)
    const int64_t *query_lens, *context_lens;  // (sequences)
    const int64_t* state_reads;                // (sequences): slots of the states before their first tokens; -1: zeros
    const int64_t* state_writes;               // (tokens): slots for the states after them; -1: not kept
    const int64_t *window_slots, *window_tables;  // the same as slots and tables, in layers with a window
    int64_t window_width;                      // of window_tables
    int32_t threads;
};

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

struct Team {
    alignas(64) std::atomic<int64_t> next{0};   // next piece of the shared queue
    alignas(64) std::atomic<int32_t> arrived{0};
    alignas(64) std::atomic<uint32_t> round{0};
    char* const scratch;                        // shared by all threads

    explicit Team(char* scratch) : scratch(scratch) {}
};

// Per-thread buffers, kept from one call to the next.
struct Desk {
    std::vector<float> row;
    std::vector<char> kept;
    std::vector<Floats> copy;
    std::vector<Floats> q, sums, out, totals, offsets, most, columns, values, spare, numbers;  // attention.h
    Fetches ahead;                           // attention.h
    std::vector<Floats> state, chunk;        // recurrence.h, causal_conv.h
};

class Worker {
public:
    Team& team;
    const int64_t index, threads;
    Desk& desk;

    Worker(Team& team, int64_t index, int64_t threads, Desk& desk) : team(team), index(index), threads(threads), desk(desk) {}

    int64_t first(int64_t total) const { return total * index / threads; }  // bounds of this thread's share
    int64_t end(int64_t total) const { return total * (index + 1) / threads; }
    int64_t take() { return team.next.fetch_add(1, std::memory_order_relaxed); }

    // Barrier. Short waits (microseconds) prefetch the next call's memory. In longer ones, when another thread has lost its
    // processor, the thread sleeps, which frees its processor and wakes faster than yielding.
    void wait(Ahead ahead = {}) {
        const uint32_t round = team.round.load(std::memory_order_relaxed);
        if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            team.arrived.store(0, std::memory_order_relaxed);
            team.next.store(0, std::memory_order_relaxed);
            team.round.store(round + 1, std::memory_order_release);
#ifdef __cpp_lib_atomic_wait
            team.round.notify_all();
#endif
            return;
        }
        for (int looks = 0; team.round.load(std::memory_order_acquire) == round; looks++) {
            int64_t lines = 4;
            ahead.fetch(lines);
            if (looks < PATIENCE) relax();
            else sleep(round);
        }
    }

private:
    static constexpr int PATIENCE = 2000;  // spins of 20 to 60 ns

    void sleep(uint32_t round) {
#ifdef __cpp_lib_atomic_wait
        team.round.wait(round, std::memory_order_acquire);
#else
        sched_yield();
#endif
    }
};

}  // namespace
