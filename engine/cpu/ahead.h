// Software prefetch of the memory that a thread reads next.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// A run of cache lines; lines before `line` are already prefetched.
struct Ahead {
    const char *line = nullptr, *end = nullptr;

    // Prefetches up to `lines` lines and subtracts them. Returns false when the run is exhausted.
    bool fetch(int64_t& lines) {
        const int64_t some = std::min<int64_t>(lines, (end - line + 63) / 64);
        lines -= some;
#pragma GCC unroll 8
        for (const char* last = line + some * 64; line < last; line += 64) __builtin_prefetch(line, 0, 2);
        return line < end;
    }
};

// Several runs. Callers prefetch a few lines at a time, because line fill buffers are few.
class Fetches {
public:
    bool has_any() const { return !runs.empty(); }
    void clear() { runs.clear(), at = 0; }
    void add(const char* first, const char* end) {
        if (has_any() && runs.back().end == first) runs.back().end = end;
        else runs.push_back({first, end});
    }
    void fetch(int64_t lines) {
        while (lines > 0 && at < runs.size())
            if (!runs[at].fetch(lines)) at++;
    }
    void fetch_all() { fetch(INT64_MAX); }

private:
    std::vector<Ahead> runs;
    size_t at = 0;  // first run that is not exhausted
};

}  // namespace
