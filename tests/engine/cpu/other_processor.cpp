// The kernels in a process of another processor, which an emulator runs: for emulated_kernels.py, whose memory it reads
// where a kernel touches it, and to which it writes what a kernel has changed.
//
// What lies at an address there lies here at `here(address)`: whatever that is, the emulator has nothing of its own there.
#include "../../../engine/cpu/kernels.cpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstdio>
#include <string_view>

namespace {

constexpr uint64_t WINDOW = 1ull << 40, FIRST = 2 * WINDOW, CHUNK = 1 << 16;

struct Chunk {
    char *at, *before;  // before: as it came
    uint64_t from, count;
};
Chunk chunks[1 << 14];
int num_chunks, memory;

template <class T> void here(T*& p) {
    const uint64_t address = reinterpret_cast<uint64_t>(p);
    if (address) p = reinterpret_cast<T*>(address % WINDOW + FIRST + (address >= 112 * WINDOW ? WINDOW : 0));
}

void* room() { return mmap(nullptr, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }

// high: what is added to an address here, to have it there, in each of the two windows
uint64_t high[2];

void bring(int, siginfo_t* info, void*) {
    const uint64_t at = reinterpret_cast<uint64_t>(info->si_addr) / CHUNK * CHUNK;
    if (at < FIRST || at >= FIRST + 2 * WINDOW || num_chunks == 1 << 14) _exit(3);
    const int window = at >= FIRST + WINDOW;
    Chunk& chunk = chunks[num_chunks++];
    chunk.at = static_cast<char*>(mmap(reinterpret_cast<void*>(at), CHUNK, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
    chunk.before = static_cast<char*>(room());
    chunk.from = at - FIRST - window * WINDOW + high[window], chunk.count = 0;
    for (uint64_t page = 0; page < CHUNK; page += 4096)
        if (pread(memory, chunk.at + page, 4096, chunk.from + page) == 4096) chunk.count++;
    if (chunk.at == MAP_FAILED || !chunk.count) _exit(4);
    std::memcpy(chunk.before, chunk.at, CHUNK);
}

void give_back() {
    for (; num_chunks; num_chunks--) {
        Chunk& chunk = chunks[num_chunks - 1];
        for (uint64_t i = 0, end; i < CHUNK; i = end) {
            for (end = i; end < CHUNK && chunk.at[end] != chunk.before[end];) end++;
            if (end > i && pwrite(memory, chunk.at + i, end - i, chunk.from + i) != int64_t(end - i)) _exit(5);
            if (end == i) end++;
        }
        munmap(chunk.at, CHUNK), munmap(chunk.before, CHUNK);
    }
}

void here(ProductCall& p) {
    here(p.panels), here(p.scales), here(p.sums), here(p.bias), here(p.norm), here(p.x), here(p.residual), here(p.out);
    here(p.levels), here(p.order);
}
void here(PoolView& pool) { here(pool.codes), here(pool.scales); }
void here(RotaryCall& t) { here(t.pool), here(t.heads), here(t.q_norm), here(t.k_norm); }
void here(AttentionCall& a) { here(a.pool), here(a.q), here(a.out); }
void here(Wire& w) { here(w.pool), here(w.codes), here(w.scales), here(w.slots); }
void here(Step& s) {
    here(s.slots), here(s.cos), here(s.sin), here(s.tables), here(s.query_lens), here(s.context_lens);
    s.threads = 1;  // who touches memory first waits for nobody
}

template <class T> T copy_of(const void* from) {
    T copy = *static_cast<const T*>(from);
    here(copy);
    return copy;
}

union AnyCall {
    Kind kind;
    ProductCall product;
    RotaryCall rotary;
    AttentionCall attention;
};

void run_here(const Kind* const* addresses, int64_t count, const Step* step) {
    std::vector<AnyCall> calls(count);
    std::vector<const Kind*> pointers;
    for (int64_t i = 0; i < count; i++) {
        const Kind* call = addresses[i];
        here(call);
        if (*call == ROTATE) calls[i].rotary = copy_of<RotaryCall>(call);
        else if (*call == ATTEND) calls[i].attention = copy_of<AttentionCall>(call);
        else calls[i].product = copy_of<ProductCall>(call);
        pointers.push_back(&calls[i].kind);
    }
    const Step own = copy_of<Step>(step);
    run(pointers.data(), count, &own);
}

void choose_here(TokenChoices all) {
    here(all.row);
    all.threads = 1;
    ChoiceRow* const row = all.row;
    const int64_t rows = all.rows;
    for (int64_t i = 0; i < rows; i++) {
        ChoiceRow own = row[i];
        RowPenalties penalties;
        here(own.logits);
        if (own.penalties) {
            here(own.penalties);
            penalties = *own.penalties;
            here(penalties.token_ids), here(penalties.taken), here(penalties.bits), here(penalties.begins);
            own.penalties = &penalties;
        }
        all.row = &own, all.rows = 1;
        choose_rows(all);
        row[i].greatest = own.greatest, row[i].most = own.most;
    }
}

}  // namespace

// memory: /proc/PID/mem of who asks
int main(int, char** arguments) {
    memory = open(arguments[1], O_RDWR);
    high[0] = std::strtoull(arguments[2], nullptr, 0), high[1] = std::strtoull(arguments[3], nullptr, 0);
    struct sigaction action = {};
    action.sa_sigaction = bring, action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    char name[32];
    uint64_t a, b, c;
    while (std::scanf("%31s %lu %lu %lu", name, &a, &b, &c) == 4) {
        char* p = reinterpret_cast<char*>(a);
        here(p);
        Step* step = reinterpret_cast<Step*>(c);
        here(step);
        const std::string_view what = name;
        if (what == "run") run_here(reinterpret_cast<const Kind* const*>(p), b, step);
        else if (what == "choose") choose_here(*reinterpret_cast<TokenChoices*>(p));
        else if (what == "pack_wire") pack(copy_of<Wire>(p));
        else if (what == "unpack_wire") unpack(copy_of<Wire>(p));
        else if (what == "widen_stored_rows") {
            StoredRows stored = *reinterpret_cast<StoredRows*>(p);
            here(stored.panels), here(stored.levels), here(stored.factors), here(stored.rows), here(stored.out);
            widen_rows(stored);
        } else {
            Payload payload = *reinterpret_cast<Payload*>(p);
            here(payload.bytes);
            add_up(payload);
            reinterpret_cast<Payload*>(p)->sum = payload.sum;
        }
        give_back();
        std::puts("done");
        std::fflush(stdout);
    }
}
