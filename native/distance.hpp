// How far records have moved from their saved copies, in the fixed order of additions of LaneSums.
#pragma once

#include "optimizers.hpp"

namespace planaria {
namespace {

template <class Size>
inline float squared_distance(const uint32_t* a, const uint32_t* b, Size dim) {
    LaneSums sums;
    float moved[lanes];
    size_t d = 0;
    for (; d + lanes <= dim; d += lanes) {
        for (size_t l = 0; l < lanes; ++l) moved[l] = as_float(a[d + l]) - as_float(b[d + l]);
        sums.add_products(moved, moved);
    }
    if (d < dim) {
        for (float& lane : moved) lane = 0.0f;
        for (size_t l = 0; d + l < dim; ++l) moved[l] = as_float(a[d + l]) - as_float(b[d + l]);
        sums.add_products(moved, moved);
    }
    const float sum = sums.fold();
    // One NaN for all: its bits are compared when rows are ranked.
    return sum == sum ? sum : __builtin_nanf("");
}

void row_distances(const uint32_t* records, size_t words, const uint32_t* saved, size_t saved_words,
                   size_t dim, float* out, size_t begin, size_t end) {
    with_fixed(dim, [&](auto row_dim) {
        for (size_t i = begin; i < end; ++i)
            out[i] = squared_distance(records + i * words, saved + i * saved_words, row_dim);
    });
}

}  // namespace
}  // namespace planaria
