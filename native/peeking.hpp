// Reading what another process of this machine holds, without its help, and what must be known of
// that: whether it changed meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace planaria {

// Bytes of a process, and where that process counts what it does to them: two words there, a key
// that nobody else has, and the count.
struct Source {
    int64_t process;
    uint64_t at, counter;
    uint64_t key, count;
    uint8_t coef;
};

// out = the sum of coef times source, over GF(2^8). Returns 0; or i + 1 if source i has changed
// since it was counted, or -(i + 1) if it cannot be read or is somebody else's. Then out is
// anything.
int64_t peek(const std::vector<Source>& sources, uint8_t* out, size_t bytes);

// Before bytes are changed that others may read, and afterwards: what is written before it is there
// for whoever sees the new count, and what is written after it is not for who sees the old one.
void count_change(uint64_t& count);

}  // namespace planaria
