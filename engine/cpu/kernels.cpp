// Entry points for Python: `run` executes a list of kernel calls with one team of threads. Argument structs match
// engine/cpu/structs.py.
#include <omp.h>

#include "attention.h"
#include "causal_conv.h"
#include "choice.h"
#include "draft_draws.h"
#include "few_bits.h"
#include "gated_norm.h"
#include "matrix.h"
#include "norm.h"
#include "recurrence.h"
#include "rotary.h"
#include "wire.h"

namespace {

template <class Arguments> const Arguments& as(const Kind* call) { return *reinterpret_cast<const Arguments*>(call); }

void perform(const Kind* call, const Step& step, Worker& me) {
    switch (*call) {
        case MULTIPLY_BF16: return multiply<Bf16>(as<ProductCall>(call), step, me);
        case MULTIPLY_INT8: return multiply<Int8>(as<ProductCall>(call), step, me);
        case MULTIPLY_FEW_BITS:
            return with_format(as<ProductCall>(call),
                               [&](const auto& format) { multiply_few_bits(format, as<ProductCall>(call), step, me); });
        case ROTATE: return rotate(as<RotaryCall>(call), step, me);
        case ATTEND: return attend(as<AttentionCall>(call), step, me);
        case ADD_NORM: return add_norm(as<AddNormCall>(call), step, me);
        case CONVOLVE: return convolve(as<ConvCall>(call), step, me);
        case RECUR: return recur(as<RecurrenceCall>(call), step, me);
        case GATED_NORM: return gated_norm(as<GatedNormCall>(call), step, me);
    }
}

// Returns the multiplications of a product; other calls are not counted.
int64_t work(const Kind* call, const Step& step) {
    if (*call > MULTIPLY_FEW_BITS) return 0;
    return step.tokens * as<ProductCall>(call).outputs * as<ProductCall>(call).inputs;
}

int64_t scratch_bytes(const Kind* call, const Step& step) {
    switch (*call) {
        case MULTIPLY_BF16: return Rows<Bf16>(as<ProductCall>(call), step.tokens).bytes();
        case MULTIPLY_INT8: return Rows<Int8>(as<ProductCall>(call), step.tokens).bytes();
        case MULTIPLY_FEW_BITS:
            return with_format(as<ProductCall>(call), [&](const auto& format) {
                return few_bits_scratch_bytes(format, as<ProductCall>(call), step);
            });
        default: return 0;
    }
}

// Returns the memory that this thread reads first, or most likely, in the call.
Ahead ahead_of(const Kind* call, const Worker& me) {
    switch (*call) {
        case MULTIPLY_BF16: return panels_ahead(as<ProductCall>(call), Rows<Bf16>::panel_bytes(as<ProductCall>(call)), me);
        case MULTIPLY_INT8: return panels_ahead(as<ProductCall>(call), Rows<Int8>::panel_bytes(as<ProductCall>(call)), me);
        case MULTIPLY_FEW_BITS:
            return with_format(as<ProductCall>(call), [&](const auto& format) {
                const ProductCall& p = as<ProductCall>(call);
                return panels_ahead(p, few_bits_panel_bytes(format, p.inputs), me);
            });
        default: return {};
    }
}

}  // namespace

constexpr int64_t WORTH_SHARING = 1 << 18;  // minimum multiplications of a run; each barrier costs a few microseconds

extern "C" void run(const Kind* const* calls, int64_t count, const Step* step) {
    int64_t most = 0, total = 0;
    for (int64_t i = 0; i < count; i++) {
        most = std::max(most, scratch_bytes(calls[i], *step));
        total += work(calls[i], *step);
    }
    static thread_local std::vector<Floats> scratch;  // kept across runs, because first touches are slow
    scratch.resize(std::max<size_t>(scratch.size(), most / sizeof(Floats) + 1));
    Team team(reinterpret_cast<char*>(scratch.data()));
    const bool is_small = total && total < WORTH_SHARING;
#pragma omp parallel num_threads(is_small ? 1 : step->threads)
    {
        static thread_local Desk desk;
        Worker me(team, omp_get_thread_num(), omp_get_num_threads(), desk);
        for (int64_t i = 0; i < count; i++) {
            perform(calls[i], *step, me);
            if (i + 1 < count) me.wait(ahead_of(calls[i + 1], me));
        }
    }
}

extern "C" bool may_use_tiles_here() { return may_use_tiles(); }

extern "C" void widen_stored_rows(const StoredRows* stored) { widen_rows(*stored); }

extern "C" void choose(const TokenChoices* choices) { choose_rows(*choices); }

extern "C" void draw_drafts(const DraftDraws* draws) { draw_all_drafts(*draws); }

// Single-threaded: called on a link's thread while the others compute.
extern "C" void pack_wire(const Wire* wire) { pack(*wire); }
extern "C" void unpack_wire(const Wire* wire) { unpack(*wire); }
extern "C" void add_up_payload(Payload* payload) { add_up(*payload); }
