// What a trainer does with rows: pool them over bags, and sum gradients per distinct row.
//
// A sum starts with its first term itself, not with zero, and goes on in the order of the ids.
// Gradient sums need `index` to number rows in first-seen order, as dedup gives it: then the
// first id of row u is recognised by u being the next new number, without any flags.
#pragma once

#include "optimizers.hpp"

namespace planaria {
namespace {

template <class Size>
inline void pool_bag(const float* values, Size dim, const Bags& bags, size_t bag,
                     float* __restrict out) {
    const size_t first = static_cast<size_t>(bags.offsets[bag]);
    const size_t last = static_cast<size_t>(bags.offsets[bag + 1]);
    if (first == last) {
        std::memset(out, 0, dim * 4);
        return;
    }
    for (size_t i = first; i < last; ++i) {
        const float* __restrict row = values + bags.index[i] * dim;
        if (bags.pooling == Pooling::weighted) {
            const float weight = bags.weights[i];
            for (size_t d = 0; d < dim; ++d)
                out[d] = i == first ? weight * row[d] : out[d] + weight * row[d];
        } else if (i == first) {
            copy_words(out, row, dim);
        } else {
            for (size_t d = 0; d < dim; ++d) out[d] += row[d];
        }
    }
    if (bags.pooling == Pooling::mean && last - first > 1) {
        const float count = static_cast<float>(last - first);
        for (size_t d = 0; d < dim; ++d) out[d] /= count;
    }
}

void pool(const float* values, size_t dim, const Bags& bags, float* out, size_t prefetch_rows,
          size_t begin, size_t end) {
    size_t asked = static_cast<size_t>(bags.offsets[begin]);
    const size_t n_ids = static_cast<size_t>(bags.offsets[end]);
    with_fixed(dim, [&](auto row_dim) {
        for (size_t bag = begin; bag < end; ++bag) {
            if (prefetch_rows) {
                const size_t ahead = static_cast<size_t>(bags.offsets[bag + 1]) + prefetch_rows;
                for (const size_t upto = ahead < n_ids ? ahead : n_ids; asked < upto; ++asked)
                    prefetch<0>(values + bags.index[asked] * row_dim, row_dim * 4);
            }
            pool_bag(values, row_dim, bags, bag, out + bag * row_dim);
        }
    });
}

// Each thread passes over all ids and adds those of its own rows, so no two threads write one row
// and the order of additions is that of one thread.
void pool_backward(const float* grads, size_t dim, const Bags& bags, float* out, size_t begin,
                   size_t end) {
    size_t next = 0;  // rows seen so far, of all threads' rows
    for (size_t bag = 0; bag < bags.n_bags; ++bag) {
        const size_t first = static_cast<size_t>(bags.offsets[bag]);
        const size_t last = static_cast<size_t>(bags.offsets[bag + 1]);
        const float* __restrict grad = grads + bag * dim;
        const float count = static_cast<float>(last - first);
        for (size_t i = first; i < last; ++i) {
            const size_t u = static_cast<size_t>(bags.index[i]);
            const bool is_new = u == next;
            next += is_new;
            if (u < begin || u >= end) continue;
            float* __restrict sum = out + u * dim;
            if (bags.pooling == Pooling::mean) {
                for (size_t d = 0; d < dim; ++d)
                    sum[d] = is_new ? grad[d] / count : sum[d] + grad[d] / count;
            } else {
                const float weight = bags.pooling == Pooling::weighted ? bags.weights[i] : 1.0f;
                for (size_t d = 0; d < dim; ++d)
                    sum[d] = is_new ? weight * grad[d] : sum[d] + weight * grad[d];
            }
        }
    }
}

void weight_backward(const float* grads, const float* values, size_t dim, const Bags& bags,
                     float* out, size_t begin, size_t end) {
    for (size_t bag = begin; bag < end; ++bag) {
        const float* grad = grads + bag * dim;
        for (int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i) {
            out[i] = dot(grad, values + bags.index[i] * dim, dim);
        }
    }
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
