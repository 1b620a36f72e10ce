// Memory that a thread will read next, fetched while it does something else.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Lines that follow each other; those before `line` have been asked for.
struct Ahead {
    const char *line = nullptr, *end = nullptr;

    // Asks for so many, and takes them from `lines`; false: nothing is left.
    bool fetch(int64_t& lines) {
        const int64_t some = std::min<int64_t>(lines, (end - line + 63) / 64);
        lines -= some;
#pragma GCC unroll 8
        for (const char* last = line + some * 64; line < last; line += 64) __builtin_prefetch(line, 0, 2);
        return line < end;
    }
};

// Several of these. Who reads much else meanwhile fetches a little at a time: the units that wait for memory are few.
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
    size_t at = 0;  // the first of which something is left
};

}  // namespace
