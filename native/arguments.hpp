// The types of the arrays that cross the boundary, and the checks that only native code can make
// fast enough. Shapes, dtypes and contiguity were checked by planaria/kernels/__init__.py, which
// is the only caller; what nanobind's types and these functions check again is what memory safety
// rests on.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "ids.hpp"
#include "kernels.hpp"
#include "pool.hpp"

namespace nb = nanobind;

namespace planaria {

template <class T, size_t dimensions>
using Array = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;

using Records = Array<uint32_t, 2>;
using ConstRecords = Array<const uint32_t, 2>;
using Index = Array<const int64_t, 1>;
using IndexOut = Array<int64_t, 1>;
using Bytes = Array<uint8_t, 1>;
using ConstBytes = Array<const uint8_t, 1>;
using Floats = Array<const float, 2>;
using FloatsOut = Array<float, 2>;
using Weights = Array<const float, 1>;

// Fewer rows or bytes than this are not worth waking a thread for.
constexpr size_t rows_grain = 1024;
constexpr size_t bytes_grain = 128 << 10;

inline void require(bool holds, const char* otherwise) {
    if (!holds) throw ArgumentError(otherwise);
}

// Dedup's numbering: each new number is the next one, and all m occur.
inline void check_first_seen(const int64_t* inverse, size_t n, size_t m) {
    uint64_t next = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto u = static_cast<uint64_t>(inverse[i]);
        if (u > next || u >= m)
            throw RowError("inverse[" + std::to_string(i) + "] is " + std::to_string(inverse[i]) +
                           "; it must number the rows in first-seen order, as dedup gives it");
        next = std::max(next, u + 1);  // a shorter chain from id to id than a comparison and a sum
    }
    if (next != m)
        throw RowError("inverse names " + std::to_string(next) + " rows, but the result has " +
                       std::to_string(m));
}

inline void check_offsets(const int64_t* offsets, size_t n_bags, size_t n_ids) {
    bool ascending = offsets[0] == 0 && static_cast<uint64_t>(offsets[n_bags]) == n_ids;
    for (size_t b = 0; b < n_bags; ++b) ascending &= offsets[b] <= offsets[b + 1];
    require(ascending, "offsets must start with 0, never fall, and end with the number of ids");
}

}  // namespace planaria
