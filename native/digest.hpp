// The digest of logical contents: a sum of hashes of (row, record), so that it depends neither on
// the order of records nor on which server holds them.
#pragma once

#include "random.hpp"

namespace planaria {
namespace {

// Two chains per record with different multipliers make 128 bits. Words are taken as 64-bit
// pairs, an odd last one padded with zero.
void digest(const uint32_t* records, size_t words, const uint64_t* keys, uint64_t sums[2],
            size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        if (keys[i] == ~uint64_t{0}) continue;
        const uint32_t* record = records + i * words;
        uint64_t first = mix(keys[i] + golden), second = mix(keys[i] + 2 * golden);
        for (size_t w = 0; w < words; w += 2) {
            uint64_t word = record[w];
            if (w + 1 < words) word |= static_cast<uint64_t>(record[w + 1]) << 32;
            first = (first ^ word) * 0xbf58476d1ce4e5b9u;
            first ^= first >> 32;
            second = (second ^ word) * 0x94d049bb133111ebu;
            second ^= second >> 29;
        }
        sums[0] += mix(first);
        sums[1] += mix(second);
    }
}

}  // namespace
}  // namespace planaria
