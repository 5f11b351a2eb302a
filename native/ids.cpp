#include "ids.hpp"

#include <algorithm>
#include <string>

namespace planaria {
namespace {

constexpr size_t ids_ahead = 16;
constexpr size_t marks_ahead = 48;

// Buckets for n keys at a load of at most one half; a bucket is the top bits of a product.
int shift_for(size_t n) {
    int bits = 4;
    while ((size_t{1} << bits) < 2 * n) ++bits;
    return 64 - bits;
}

// Two multiplications: with one, ids in arithmetic progression can fall into few buckets.
inline size_t bucket_of(int64_t id, int shift) {
    uint64_t x = static_cast<uint64_t>(id) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 32) * 0x94d049bb133111ebu;
    return x >> shift;
}

}  // namespace

void check_range(const int64_t* index, size_t n, size_t limit, const char* what) {
    bool wrong = false;
    for (size_t i = 0; i < n; ++i) wrong |= static_cast<uint64_t>(index[i]) >= limit;
    if (!wrong) return;
    for (size_t i = 0; i < n; ++i)
        if (static_cast<uint64_t>(index[i]) >= limit)
            throw RowError(std::string(what) + "[" + std::to_string(i) + "] is " +
                           std::to_string(index[i]) + "; it must be at least 0 and below " +
                           std::to_string(limit));
}

void check_distinct(const int64_t* index, size_t n, size_t limit, const char* what) {
    // One bit per record, kept between calls and left all zero, costs 1/2000 of 256-byte records.
    static thread_local std::vector<uint64_t> kept;
    if (kept.size() * 64 < limit) kept.resize(limit / 64 + 1);
    uint64_t* const marks = kept.data();  // a thread_local looked up per id would cost more
    size_t i = 0;
    for (; i < n; ++i) {
        if (i + marks_ahead < n) __builtin_prefetch(&marks[index[i + marks_ahead] / 64], 1);
        uint64_t& word = marks[index[i] / 64];
        const uint64_t bit = uint64_t{1} << index[i] % 64;
        if (word & bit) break;
        word |= bit;
    }
    // In order where that is less to write than the marks of so many ids. After an error always:
    // were the index written by somebody else meanwhile, stray marks would stay for ever.
    if (i < n || limit / 64 < 4 * n)
        std::fill(kept.begin(), kept.end(), 0);
    else
        for (size_t j = 0; j < n; ++j) marks[index[j] / 64] = 0;
    if (i < n) {
        throw RowError(std::string(what) + "[" + std::to_string(i) + "] is " +
                       std::to_string(index[i]) +
                       ", which stands there already; sum what "
                       "belongs to one row before the call");
    }
}

Dedup::Dedup(size_t capacity, size_t first) : shift_(shift_for(capacity)), count_(first) {
    if (capacity > INT32_MAX) throw ArgumentError("more than 2^31 ids in one call; split them");
    table_.assign(size_t{1} << (64 - shift_), -1);
}

void Dedup::add(const int64_t* ids, size_t n, int64_t* unique, int64_t* inverse) {
    const size_t mask = table_.size() - 1;
    for (size_t i = 0; i < n; ++i) {
        if (i + ids_ahead < n)
            __builtin_prefetch(&table_[bucket_of(ids[i + ids_ahead], shift_)], 1);
        size_t bucket = bucket_of(ids[i], shift_);
        int32_t number;
        while ((number = table_[bucket]) >= 0 && unique[number] != ids[i])
            bucket = (bucket + 1) & mask;
        if (number < 0) {
            number = table_[bucket] = static_cast<int32_t>(count_);
            unique[count_++] = ids[i];
        }
        inverse[i] = number;
    }
}

namespace {

// Where a table has few more rows than the batch has ids for it, its numbers are looked up by row:
// half the time of a hash, whose table would be as large.
constexpr size_t rows_per_id = 4;

// What Dedup does, for ids below the size of `number`, which holds -1 for those not yet seen.
size_t number_by_row(const int64_t* ids, size_t n, int32_t* number, size_t count, int64_t* unique,
                     int64_t* inverse) {
    for (size_t i = 0; i < n; ++i) {
        int32_t& known = number[ids[i]];
        if (known < 0) {
            known = static_cast<int32_t>(count);
            unique[count++] = ids[i];
        }
        inverse[i] = known;
    }
    return count;
}

// The first id of a feature that its table does not have, or n.
size_t find_outside(const int64_t* ids, size_t n, int64_t limit) {
    bool wrong = false;
    for (size_t i = 0; i < n; ++i)
        wrong |= static_cast<uint64_t>(ids[i]) >= static_cast<uint64_t>(limit);
    if (!wrong) return n;
    size_t at = 0;
    while (static_cast<uint64_t>(ids[at]) < static_cast<uint64_t>(limit)) ++at;
    return at;
}

}  // namespace

int64_t number_rows(const Features& features, int64_t* rows, int64_t* inverse, int64_t* offsets) {
    std::vector<int32_t> number;
    size_t count = 0, done = 0;
    offsets[0] = 0;
    for (size_t f = 0; f < features.n;) {
        // The features of one table; tables have no row in common, so each is numbered by itself.
        size_t behind = f, n_ids = 0;
        const int64_t first_row = features.first_rows[f], limit = features.limits[f];
        for (; behind < features.n && features.first_rows[behind] == first_row; ++behind)
            n_ids += features.last(behind) - features.first(behind);
        const bool by_row = static_cast<size_t>(limit) <= rows_per_id * n_ids;
        Dedup hashed(by_row ? 0 : n_ids, count);
        if (by_row) number.assign(limit, -1);
        const size_t before = count;
        for (; f < behind; ++f) {
            const int64_t* ids = features.ids + features.first(f);
            const size_t n = features.last(f) - features.first(f);
            const size_t outside = find_outside(ids, n, limit);
            if (outside < n) return -1 - static_cast<int64_t>(done + outside);
            if (by_row) {
                count = number_by_row(ids, n, number.data(), count, rows, inverse + done);
            } else {
                hashed.add(ids, n, rows, inverse + done);
                count = hashed.count();
            }
            const int64_t* bags = features.offsets + features.keys[f] * features.samples;
            int64_t* out = offsets + f * features.samples;
            for (size_t s = 1; s <= features.samples; ++s)
                out[s] = static_cast<int64_t>(done) + bags[s] - bags[0];
            done += n;
        }
        for (size_t u = before; u < count; ++u) rows[u] += first_row;
    }
    return static_cast<int64_t>(count);
}

RowFinder::RowFinder(const int64_t* index, size_t n) : index_(index), shift_(shift_for(n)) {
    if (n > INT32_MAX) throw ArgumentError("more than 2^31 rows in one call; split them");
    table_.assign(size_t{1} << (64 - shift_), -1);
    const size_t mask = table_.size() - 1;
    for (size_t i = 0; i < n; ++i) {
        size_t bucket = bucket_of(index[i], shift_);
        while (table_[bucket] >= 0) bucket = (bucket + 1) & mask;
        table_[bucket] = static_cast<int32_t>(i);
    }
}

int64_t RowFinder::find(int64_t row) const {
    const size_t mask = table_.size() - 1;
    size_t bucket = bucket_of(row, shift_);
    while (table_[bucket] >= 0 && index_[table_[bucket]] != row) bucket = (bucket + 1) & mask;
    return table_[bucket];
}

void partition(const Places& places, const int64_t* rows, size_t n, int64_t* order, int64_t* index,
               int64_t* counts) {
    // Where row i goes, packed with its record number, so that the divisions are done once.
    std::vector<std::pair<int32_t, int64_t>> found(n);
    std::vector<int64_t> next(places.n_places + 1, 0);
    for (size_t i = 0; i < n; ++i) {
        const uint64_t row = static_cast<uint64_t>(rows[i]);
        const uint64_t stripe = row / static_cast<uint64_t>(places.k);
        const uint64_t slot = stripe / static_cast<uint64_t>(places.groups);
        const uint64_t member = (stripe - slot * places.groups) * places.k + row % places.k;
        found[i] = {places.place[member],
                    places.region[member] * places.slots + static_cast<int64_t>(slot)};
        ++next[found[i].first + 1];
    }
    for (int64_t p = 0; p < places.n_places; ++p) {
        counts[p] = next[p + 1];
        next[p + 1] += next[p];
    }
    for (size_t i = 0; i < n; ++i) {
        const int64_t at = next[found[i].first]++;
        order[at] = static_cast<int64_t>(i);
        index[at] = found[i].second;
    }
}

void share_out(const Holders& holders, const int64_t* index, size_t n, int64_t* order, int64_t* out,
               int64_t* counts) {
    static thread_local std::vector<int64_t> kept;  // the regions: one division for each record
    if (kept.size() < n) kept.resize(n);
    int64_t* const regions = kept.data();
    const auto r = static_cast<int64_t>(holders.r), slots = static_cast<int64_t>(holders.slots);
    std::fill_n(counts, holders.count, 0);
    for (size_t i = 0; i < n; ++i) {
        regions[i] = static_cast<int64_t>(static_cast<uint64_t>(index[i]) / holders.slots);
        for (int64_t m = regions[i] * r; m < (regions[i] + 1) * r; ++m) ++counts[holders.holder[m]];
    }
    std::vector<int64_t> next(holders.count + 1, 0);
    for (size_t h = 0; h < holders.count; ++h) next[h + 1] = next[h] + counts[h];
    for (size_t i = 0; i < n; ++i)
        for (int64_t m = regions[i] * r; m < (regions[i] + 1) * r; ++m) {
            const int64_t at = next[holders.holder[m]]++;
            order[at] = static_cast<int64_t>(i);
            out[at] = index[i] + (holders.region[m] - regions[i]) * slots;
        }
}

}  // namespace planaria
