// What is done with ids before records are touched: checking, dedup, partition. One thread, no
// SIMD levels: these are bound by dependent memory accesses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace planaria {

// Becomes planaria.errors.ArgumentError, RowError and WireError in Python.
struct ArgumentError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct RowError : ArgumentError {
    using ArgumentError::ArgumentError;
};
struct WireError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Throws unless every index is in [0, limit).
void check_range(const int64_t* index, size_t n, size_t limit, const char* what);
// Throws if an index, each below limit, stands twice.
void check_distinct(const int64_t* index, size_t n, size_t limit, const char* what);

// Numbers the distinct ids in first-seen order: unique[inverse[i]] == ids[i]. Returns their count.
// Several parts can be numbered one after the other.
class Dedup {
  public:
    // Numbers from `first` on; `unique` holds what was numbered before, which is not looked for.
    explicit Dedup(size_t capacity, size_t first = 0);
    // unique has room for all ids; inverse[i] is written for each of these n ids.
    void add(const int64_t* ids, size_t n, int64_t* unique, int64_t* inverse);
    size_t count() const { return count_; }

  private:
    std::vector<int32_t> table_;  // number of the id in this bucket, or -1
    int shift_;
    size_t count_;
};

// The features of a batch that lie in one arena, and the ids that they are taken from: those of
// `key` and a sample are ids[offsets[key * samples + sample]] up to the next offset.
struct Features {
    const int64_t* ids;
    const int64_t* offsets;     // [keys * samples + 1], checked
    const int64_t* keys;        // [n]
    const int64_t* limits;      // [n], rows of the feature's table
    const int64_t* first_rows;  // [n], the table's first row in the arena; never falls
    size_t n, samples;

    size_t first(size_t feature) const { return offsets[keys[feature] * samples]; }
    size_t last(size_t feature) const { return offsets[(keys[feature] + 1) * samples]; }
};

// Numbers the distinct arena rows that the features name, in first-seen order: rows, inverse and
// bag offsets of the features one behind the other. Returns how many rows there are, or, if an id
// is not in its table, -1 - its position in `inverse`.
int64_t number_rows(const Features& features, int64_t* rows, int64_t* inverse, int64_t* offsets);

// Finds which rows of `index`, all distinct, a query names.
class RowFinder {
  public:
    RowFinder(const int64_t* index, size_t n);
    // Position in `index`, or -1.
    int64_t find(int64_t row) const;

  private:
    const int64_t* index_;
    std::vector<int32_t> table_;
    int shift_;
};

// Where an arena's rows live: the arithmetic of planaria.layout on plain numbers.
struct Places {
    int64_t rows, k, groups, slots, n_places;
    const int32_t* place;   // [groups, k]
    const int32_t* region;  // [groups, k]
};

// Sorts rows by place, keeping their order within a place. order[j] is the position in `rows` of
// the j-th, index[j] its record number on its place; counts[p] of them are on place p.
void partition(const Places& places, const int64_t* rows, size_t n, int64_t* order, int64_t* index,
               int64_t* counts);

// Who protects the data regions of an owner: r holders each, and which of their regions do.
struct Holders {
    size_t regions, r, count, slots;
    const int32_t* holder;  // [regions, r]
    const int32_t* region;  // [regions, r]
};

// Sorts records by holder, each r times, keeping their order within a holder. order[j] is the
// position in `index` of the j-th, out[j] its record number on its holder; counts[h] of them are
// on holder h.
void share_out(const Holders& holders, const int64_t* index, size_t n, int64_t* order, int64_t* out,
               int64_t* counts);

}  // namespace planaria
