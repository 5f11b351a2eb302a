#include "tracking.hpp"

#include <cstring>

#include "mix.hpp"

namespace planaria {
namespace {

constexpr size_t rows_ahead = 16;  // far enough for a miss to be over, near enough to be in cache

inline bool is_set(const uint8_t* bitmap, uint64_t row) {
    return bitmap[row / 8] >> row % 8 & 1;
}

inline uint8_t bit_of(uint64_t row) {
    return static_cast<uint8_t>(1u << row % 8);
}

// Calls each(first row of the word, its 64 bits) for the words of [first, stop), other bits
// cleared. Reads no byte beyond that of bit stop - 1.
template <class Each>
void each_word(const uint8_t* bitmap, size_t first, size_t stop, Each each) {
    for (size_t start = first / 64 * 64; start < stop; start += 64) {
        const size_t bytes = (stop - start + 7) / 8;
        uint64_t word = 0;
        std::memcpy(&word, bitmap + start / 8, bytes < 8 ? bytes : 8);
        if (start < first) word &= ~uint64_t{0} << (first - start);
        if (stop - start < 64) word &= ~(~uint64_t{0} << (stop - start));
        each(start, word);
    }
}

// The lowest score that is among the `count` highest, and how many rows with just that score are.
struct Threshold {
    uint32_t score;
    size_t rows;
};

// Digit by digit from the highest that any score has: how many rows have which digit, among those
// that agree so far. Without branches on scores, which nobody can foresee.
Threshold find_threshold(const uint32_t* scores, size_t n, size_t count) {
    uint32_t all = 1;
    for (size_t i = 0; i < n; ++i) all |= scores[i];
    constexpr unsigned digit_bits = 11;
    // Four tables: most rows share a digit, and a sum that waits for itself is slow.
    static thread_local uint32_t kept[4][1u << digit_bits];
    auto* const rows = kept;  // a thread_local looked up per row would cost more
    uint32_t known = 0;
    for (unsigned shift = 32 - static_cast<unsigned>(__builtin_clz(all)); shift > 0;) {
        const uint64_t unknown = (uint64_t{1} << shift) - 1;
        shift -= shift < digit_bits ? shift : digit_bits;
        const auto highest = static_cast<uint32_t>(unknown >> shift);
        const auto mask = static_cast<uint32_t>(~unknown);
        std::memset(rows, 0, sizeof kept);
        for (size_t i = 0; i < n; ++i)
            rows[i % 4][scores[i] >> shift & highest] += (scores[i] & mask) == known;
        uint32_t digit = highest;
        for (;; --digit) {
            const size_t having =
                size_t{rows[0][digit]} + rows[1][digit] + rows[2][digit] + rows[3][digit];
            if (having >= count || digit == 0) break;
            count -= having;
        }
        known |= digit << shift;
    }
    return {known, count};
}

}  // namespace

void count_accesses(uint32_t* counters, const int64_t* index, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        if (i + rows_ahead < n) __builtin_prefetch(&counters[index[i + rows_ahead]], 1);
        uint32_t& counter = counters[index[i]];
        counter += counter != UINT32_MAX;
    }
}

void reset_counters(uint32_t* counters, const int64_t* index, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        if (i + rows_ahead < n) __builtin_prefetch(&counters[index[i + rows_ahead]], 1);
        counters[index[i]] = 0;
    }
}

void top_rows(const uint32_t* scores, size_t n, size_t count, int64_t* out) {
    if (count == 0) return;
    auto [threshold, equals] = find_threshold(scores, n, count);
    for (size_t row = 0, at = 0; row < n && at < count; ++row) {
        const bool equal = scores[row] == threshold && equals > 0;
        equals -= equal;
        out[at] = static_cast<int64_t>(row);
        at += scores[row] > threshold || equal;
    }
}

void sample_accesses(const Sample& sample, uint64_t seed, const int64_t* index, size_t n) {
    uint64_t accesses = sample.progress[0], insertions = sample.progress[1];
    uint64_t filled = sample.progress[2];
    const uint64_t key = mix(seed + golden);
    for (size_t i = accesses % 2 ? 0 : 1; i < n; i += 2) {
        if (i + 2 * rows_ahead < n)
            __builtin_prefetch(&sample.bitmap[index[i + 2 * rows_ahead] / 8], 1);
        const auto row = static_cast<uint64_t>(index[i]);
        if (is_set(sample.bitmap, row)) continue;
        ++insertions;
        uint64_t slot = filled;
        if (filled < sample.capacity) {
            ++filled;
        } else {
            slot = (mix(key + insertions * golden) >> 32) * sample.capacity >> 32;
            const uint64_t evicted = sample.entries[slot];
            // Whatever the caller did to the entries, no memory outside the bitmap is touched.
            if (evicted < sample.rows)
                sample.bitmap[evicted / 8] &= static_cast<uint8_t>(~bit_of(evicted));
        }
        sample.entries[slot] = static_cast<uint32_t>(row);
        sample.bitmap[row / 8] |= bit_of(row);
    }
    sample.progress[0] = accesses + n;
    sample.progress[1] = insertions;
    sample.progress[2] = filled;
}

size_t count_marked(const uint8_t* bitmap, size_t first, size_t stop) {
    size_t count = 0;
    each_word(bitmap, first, stop, [&](size_t, uint64_t word) {
        count += static_cast<size_t>(__builtin_popcountll(word));
    });
    return count;
}

void marked(const uint8_t* bitmap, size_t first, size_t stop, int64_t* out) {
    each_word(bitmap, first, stop, [&](size_t start, uint64_t word) {
        for (; word; word &= word - 1)
            *out++ = static_cast<int64_t>(start + static_cast<size_t>(__builtin_ctzll(word)));
    });
}

size_t mark_new(uint8_t* bitmap, size_t first, size_t stop, const int64_t* index, size_t n,
                size_t* positions) {
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto row = static_cast<uint64_t>(index[i]);
        if (row < first || row >= stop || is_set(bitmap, row)) continue;
        bitmap[row / 8] |= bit_of(row);
        positions[count++] = i;
    }
    return count;
}

}  // namespace planaria
