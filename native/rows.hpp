// Moving whole records: gather, scatter, and the parity update.
#pragma once

#include "gf.hpp"

namespace planaria {
namespace {

// Rows are scattered over gigabytes, so each is a cache miss that the hardware cannot foresee.
// Asking for a row this many rows ahead overlaps those misses.
constexpr size_t rows_ahead = 12;
constexpr size_t cache_line = 64;

template <int for_writing>
inline void prefetch(const void* row, size_t bytes) {
    const char* at = static_cast<const char*>(row);
    for (size_t offset = 0; offset < bytes; offset += cache_line)
        __builtin_prefetch(at + offset, for_writing);
    __builtin_prefetch(at + bytes - 1, for_writing);  // a row may start in mid-line
}

void gather(const uint32_t* records, size_t words, const int64_t* index, uint32_t* out,
            size_t width, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        if (i + rows_ahead < end) prefetch<0>(records + index[i + rows_ahead] * words, width * 4);
        std::memcpy(out + i * width, records + index[i] * words, width * 4);
    }
}

void scatter(uint32_t* records, size_t words, const int64_t* index, const uint32_t* values,
             size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i)
        std::memcpy(records + index[i] * words, values + i * words, words * 4);
}

void mul_add(uint32_t* records, size_t words, const int64_t* index, const uint8_t* coef,
             const uint32_t* delta, size_t begin, size_t end) {
    const size_t bytes = words * 4;
    for (size_t i = begin; i < end; ++i) {
        if (i + rows_ahead < end) prefetch<1>(records + index[i + rows_ahead] * words, bytes);
        mul_add_bytes(reinterpret_cast<uint8_t*>(records + index[i] * words),
                      reinterpret_cast<const uint8_t*>(delta + i * words), coef ? coef[i] : 1,
                      bytes);
    }
}

}  // namespace
}  // namespace planaria
