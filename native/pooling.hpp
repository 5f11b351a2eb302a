// What a trainer does with rows: pool them over bags, and sum gradients per distinct row.
//
// A sum starts with its first term itself, not with zero, and goes on in the order of the ids.
// Gradient sums need `index` to number rows in first-seen order, as dedup gives it: then the
// first id of row u is recognised by u being the next new number, without any flags.
#pragma once

#include "optimizers.hpp"

namespace planaria {
namespace {

// Where a bag's floats begin, in pooled rows [samples, width].
inline size_t place_of(const Bags& bags, size_t bag, size_t feature) {
    return (bag - feature * bags.samples) * bags.width + static_cast<size_t>(bags.columns[feature]);
}

// Calls work(feature, first, last) for the bags first .. last - 1 of each feature in [begin, end).
template <class Work>
inline void by_feature(const Bags& bags, size_t begin, size_t end, Work work) {
    for (size_t bag = begin; bag < end;) {
        const size_t feature = bag / bags.samples;
        const size_t behind = (feature + 1) * bags.samples;
        const size_t last = behind < end ? behind : end;
        work(feature, bag, last);
        bag = last;
    }
}

template <class Size>
inline void pool_bag(const float* values, Size dim, const Bags& bags, Pooling pooling, size_t bag,
                     float* __restrict out) {
    const size_t first = static_cast<size_t>(bags.offsets[bag]);
    const size_t last = static_cast<size_t>(bags.offsets[bag + 1]);
    if (first == last) {
        std::memset(out, 0, dim * 4);
        return;
    }
    for (size_t i = first; i < last; ++i) {
        const float* __restrict row = values + bags.index[i] * dim;
        if (pooling == Pooling::weighted) {
            const float weight = bags.weights[i];
            for (size_t d = 0; d < dim; ++d)
                out[d] = i == first ? weight * row[d] : out[d] + weight * row[d];
        } else if (i == first) {
            copy_words(out, row, dim);
        } else {
            for (size_t d = 0; d < dim; ++d) out[d] += row[d];
        }
    }
    if (pooling == Pooling::mean && last - first > 1) {
        const float count = static_cast<float>(last - first);
        for (size_t d = 0; d < dim; ++d) out[d] /= count;
    }
}

// The bags of a feature go to places that lie a whole row of `out` apart.
void pool(const float* values, size_t dim, const Bags& bags, float* out, size_t prefetch_rows,
          size_t begin, size_t end) {
    size_t asked = static_cast<size_t>(bags.offsets[begin]);
    const size_t n_ids = static_cast<size_t>(bags.offsets[end]);
    with_fixed(dim, [&](auto row_dim) {
        by_feature(bags, begin, end, [&](size_t feature, size_t bag, size_t last) {
            const Pooling pooling = static_cast<Pooling>(bags.poolings[feature]);
            for (; bag < last; ++bag) {
                if (prefetch_rows) {
                    const size_t ahead = static_cast<size_t>(bags.offsets[bag + 1]) + prefetch_rows;
                    for (const size_t upto = ahead < n_ids ? ahead : n_ids; asked < upto; ++asked)
                        prefetch<0>(values + bags.index[asked] * row_dim, row_dim * 4);
                    if (bag + rows_ahead < last)
                        prefetch<1>(out + place_of(bags, bag + rows_ahead, feature), row_dim * 4);
                }
                pool_bag(values, row_dim, bags, pooling, bag, out + place_of(bags, bag, feature));
            }
        });
    });
}

// The quotients of a mean are the same for every id of a bag; so many fit on the stack.
constexpr size_t quotients = 256;

// Adds factor(i) * grad[d], d < dim, to the sum of each row that a bag names. Rows from `next` on
// have no sum yet. Sums begin `stride` floats apart. Returns `next` behind the bag.
template <class Size, class Factor>
inline size_t add_to_rows(const float* __restrict grad, Size dim, const Bags& bags, size_t bag,
                          Factor factor, float* out, size_t stride, size_t begin, size_t end,
                          size_t next) {
    for (int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i) {
        const size_t u = static_cast<size_t>(bags.index[i]);
        const bool is_new = u == next;
        next += is_new;
        if (u < begin || u >= end) continue;
        float* __restrict sum = out + u * stride;
        const float weight = factor(i);
        if (is_new)
            for (size_t d = 0; d < dim; ++d) sum[d] = weight * grad[d];
        else
            for (size_t d = 0; d < dim; ++d) sum[d] += weight * grad[d];
    }
    return next;
}

template <class Size>
inline size_t bag_backward(const float* grad, Size dim, const Bags& bags, Pooling pooling,
                           size_t bag, float* out, size_t begin, size_t end, size_t next) {
    const auto one = [](int64_t) { return 1.0f; };
    if (pooling == Pooling::weighted)
        return add_to_rows(
            grad, dim, bags, bag, [&](int64_t i) { return bags.weights[i]; }, out, dim, begin, end,
            next);
    const int64_t size = bags.offsets[bag + 1] - bags.offsets[bag];
    if (pooling == Pooling::sum || size <= 1)
        return add_to_rows(grad, dim, bags, bag, one, out, dim, begin, end, next);
    const float count = static_cast<float>(size);
    float quotient[quotients];
    size_t behind = next;
    for (size_t from = 0; from < dim; from += quotients) {
        const size_t some = dim - from < quotients ? dim - from : quotients;
        for (size_t d = 0; d < some; ++d) quotient[d] = grad[from + d] / count;
        if (some == dim)  // as many as the compiler knows
            return add_to_rows(quotient, dim, bags, bag, one, out, dim, begin, end, next);
        behind = add_to_rows(quotient, some, bags, bag, one, out + from, dim, begin, end, next);
    }
    return behind;
}

// Each thread passes over all ids and adds those of its own rows, so no two threads write one row
// and the order of additions is that of one thread. The gradients of a feature's bags lie a whole
// row of `grads` apart, where the hardware fetches nothing ahead.
void pool_backward(const float* grads, size_t dim, const Bags& bags, float* out, size_t begin,
                   size_t end) {
    with_fixed(dim, [&](auto row_dim) {
        size_t next = 0;  // rows seen so far, of all threads' rows
        by_feature(bags, 0, bags.n_bags, [&](size_t feature, size_t bag, size_t last) {
            const Pooling pooling = static_cast<Pooling>(bags.poolings[feature]);
            for (; bag < last; ++bag) {
                if (bag + rows_ahead < last)
                    prefetch<0>(grads + place_of(bags, bag + rows_ahead, feature), row_dim * 4);
                next = bag_backward(grads + place_of(bags, bag, feature), row_dim, bags, pooling,
                                    bag, out, begin, end, next);
            }
        });
    });
}

void weight_backward(const float* grads, const float* values, size_t dim, const Bags& bags,
                     float* out, size_t begin, size_t end) {
    by_feature(bags, begin, end, [&](size_t feature, size_t bag, size_t last) {
        for (; bag < last; ++bag) {
            const float* grad = grads + place_of(bags, bag, feature);
            for (int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i)
                out[i] = dot(grad, values + bags.index[i] * dim, dim);
        }
    });
}

// Rows that are summed once are copied; where nearly all are, `out` is streamed. Gradients are read
// in order, but the hardware stops at the end of every page: a fifth of the time without prefetch.
void sum_rows(const float* const* parts, const size_t* part_rows, size_t n_parts,
              const int64_t* inverse, size_t distinct, size_t dim, float* out, size_t begin,
              size_t end) {
    with_fixed(dim, [&](auto row_dim) {
        const int64_t* number = inverse;
        size_t next = 0, n_rows = 0;
        for (size_t p = 0; p < n_parts; ++p) n_rows += part_rows[p];
        const bool stream = distinct * 8 > n_rows * 7 && can_stream(out, distinct, row_dim);
        for (size_t p = 0; p < n_parts; number += part_rows[p], ++p)
            for (size_t i = 0; i < part_rows[p]; ++i) {
                const size_t u = static_cast<size_t>(number[i]);
                const bool is_new = u == next;
                next += is_new;
                if (u < begin || u >= end) continue;
                const float* __restrict grad = parts[p] + i * row_dim;
                float* __restrict sum = out + u * row_dim;
                if (i + rows_ahead < part_rows[p])
                    prefetch<0>(grad + rows_ahead * row_dim, row_dim * 4);
                if (is_new && stream)
                    stream_words(sum, grad, row_dim);
                else if (is_new)
                    copy_words(sum, grad, row_dim);
                else
                    for (size_t d = 0; d < row_dim; ++d) sum[d] += grad[d];
            }
    });
    stream_fence();
}

}  // namespace
}  // namespace planaria
