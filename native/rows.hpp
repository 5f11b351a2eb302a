// Moving whole records: gather, scatter, and the parity update.
#pragma once

#include "gf.hpp"

namespace planaria {
namespace {

// Rows are scattered over gigabytes, so each is a cache miss that the hardware cannot foresee.
// Asking for a row this many rows ahead overlaps those misses.
constexpr size_t rows_ahead = 12;
constexpr size_t cache_line = 64;

// Always inlined: GCC takes a function that only prefetches for one without effects, and drops
// the calls.
template <int for_writing>
[[gnu::always_inline]] inline void prefetch(const void* row, size_t bytes) {
    const char* at = static_cast<const char*>(row);
    for (size_t offset = 0; offset < bytes; offset += cache_line)
        __builtin_prefetch(at + offset, for_writing);
    __builtin_prefetch(at + bytes - 1, for_writing);  // a row may start in mid-line
}

// A size that the compiler knows. Rows are short, so loop counters and tails cost a good part of
// their time: a quarter in XOR and GF, a fifth in the optimizers.
template <size_t size>
struct Fixed {
    constexpr operator size_t() const { return size; }
};

// Calls work(size), with a Fixed one where it is a usual one.
template <class Work>
inline void with_fixed(size_t size, Work work) {
    switch (size) {
        case 16:
            return work(Fixed<16>());
        case 32:
            return work(Fixed<32>());
        case 64:
            return work(Fixed<64>());
        case 128:
            return work(Fixed<128>());
        default:
            return work(size);
    }
}

// Inlined: with a call of memcpy per row, a gather takes a quarter longer.
template <class Size>
inline void copy_words(void* to, const void* from, Size words) {
    const auto* source = static_cast<const uint8_t*>(from);
    auto* target = static_cast<uint8_t*>(to);
    const size_t bytes = words * 4;
    size_t at = 0;
    for (; at + Vector::bytes <= bytes; at += Vector::bytes)
        Vector::load(source + at).store(target + at);
    std::memcpy(target + at, source + at, bytes - at);
}

// Written past the cache: a line that is written whole need not be read first, which is a third of
// a copy's traffic. Worth it only where so much is written that it would not stay in the cache.
constexpr size_t stream_bytes = size_t{8} << 20;

inline bool can_stream(const void* to, size_t rows, size_t words) {
    return rows * words * 4 >= stream_bytes && words * 4 % Vector::bytes == 0 &&
           reinterpret_cast<uintptr_t>(to) % 16 == 0;
}

template <class Size>
inline void stream_words(void* to, const void* from, Size words) {
    for (size_t at = 0; at < words * 4; at += Vector::bytes)
        Vector::load(static_cast<const uint8_t*>(from) + at).stream(static_cast<uint8_t*>(to) + at);
}

void gather(const uint32_t* records, size_t words, const int64_t* index, uint32_t* out,
            size_t width, size_t begin, size_t end) {
    with_fixed(width, [&](auto row_width) {
        for (size_t i = begin; i < end; ++i) {
            if (i + rows_ahead < end)
                prefetch<0>(records + index[i + rows_ahead] * words, row_width * 4);
            copy_words(out + i * row_width, records + index[i] * words, row_width);
        }
    });
}

void scatter(uint32_t* records, size_t words, const int64_t* index, const uint32_t* values,
             size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i)
        std::memcpy(records + index[i] * words, values + i * words, words * 4);
}

template <class Size>
inline void xor_rows(uint32_t* records, Size words, const int64_t* index, const uint32_t* delta,
                     size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        if (i + rows_ahead < end) prefetch<1>(records + index[i + rows_ahead] * words, words * 4);
        xor_bytes(reinterpret_cast<uint8_t*>(records + index[i] * words),
                  reinterpret_cast<const uint8_t*>(delta + i * words), words * 4);
    }
}

// A prefetch is done with only when its page has been found, and few rows that are multiplied fit
// among the instructions that the CPU has under way: page after page would be looked for alone.
// So the first lines of some rows are asked for at once. XOR's rows are short enough, and GFNI's.
constexpr size_t rows_together = Vector::bytes == 64 ? 1 : 4;

template <class Size>
inline void mul_add_rows(uint32_t* records, Size words, const int64_t* index, const uint8_t* coef,
                         const uint32_t* delta, size_t begin, size_t end) {
    const auto record = [&](size_t i) {
        return reinterpret_cast<uint8_t*>(records + index[i < end ? i : end - 1] * words);
    };
    for (size_t i = begin; i < end; ++i) {
        if ((i - begin) % rows_together == 0)
            for (size_t ahead = i + rows_ahead; ahead < i + rows_ahead + rows_together; ++ahead)
                __builtin_prefetch(record(ahead), 1);
        prefetch<1>(record(i + rows_ahead - rows_together), words * 4);
        mul_add_bytes(record(i), reinterpret_cast<const uint8_t*>(delta + i * words), coef[i],
                      words * 4);
    }
}

void mul_add(uint32_t* records, size_t words, const int64_t* index, const uint8_t* coef,
             const uint32_t* delta, size_t begin, size_t end) {
    with_fixed(words, [&](auto row_words) {
        if (coef)
            mul_add_rows(records, row_words, index, coef, delta, begin, end);
        else
            xor_rows(records, row_words, index, delta, begin, end);
    });
}

}  // namespace
}  // namespace planaria
