// Which rows a save should take, and what they were before. One thread, no SIMD levels: like
// ids.hpp, these are bound by memory, and none of them computes with floats.
#pragma once

#include <cstddef>
#include <cstdint>

namespace planaria {

// counters[index[i]] += 1, up to 2^32 - 1
void count_accesses(uint32_t* counters, const int64_t* index, size_t n);
// counters[index[i]] = 0
void reset_counters(uint32_t* counters, const int64_t* index, size_t n);

// The `count` rows with the highest scores, lower rows first among equals; out ascends.
// count <= n.
void top_rows(const uint32_t* scores, size_t n, size_t count, int64_t* out);

// A random sample of the rows that were used lately; all memory is the caller's.
struct Sample {
    uint32_t* entries;  // [capacity], the first `filled` are rows in the sample
    size_t capacity;
    uint8_t* bitmap;     // a bit per row: is it in the sample?
    size_t rows;         // bits of the bitmap
    uint64_t* progress;  // accesses seen, rows put in, filled; the first two never start over
};

// Puts the row of every second access in, unless it is there; when full, for a random other one.
// filled <= capacity < 2^32, and every index is below rows.
void sample_accesses(const Sample& sample, uint64_t seed, const int64_t* index, size_t n);

// How many bits of [first, stop) are set.
size_t count_marked(const uint8_t* bitmap, size_t first, size_t stop);
// Which ones, ascending; out has room for them all.
void marked(const uint8_t* bitmap, size_t first, size_t stop, int64_t* out);

// Sets the bit of each index in [first, stop) and writes the positions in `index` of those that
// had not been set; returns how many.
size_t mark_new(uint8_t* bitmap, size_t first, size_t stop, const int64_t* index, size_t n,
                size_t* positions);

}  // namespace planaria
