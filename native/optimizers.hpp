// The optimizers, each fused with gather, scatter and delta: a record is read once and written
// once. The order of operations is that of torch.optim's single-tensor code; the NumPy twin
// (planaria/kernels/twin.py) repeats it operation by operation.
//
// A record is [weights: dim][state], where state is
//     sgd: nothing   momentum: buffer[dim]   adagrad: sum[dim]   rowwise_adagrad: sum[1]
//     adam: mean[dim], square[dim], step[1] (an unsigned integer)
#pragma once

#include "kernels.hpp"
#include "rows.hpp"

namespace planaria {
namespace {

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Sixteen running sums, folded in halves: the same additions at every SIMD level. Vectors of the
// compiler, since it does not vectorise sums in an array.
constexpr size_t lanes = 16;

struct LaneSums {
    typedef float Eight __attribute__((vector_size(32)));
    Eight low{}, high{};

    // Adds a[l] * b[l] to lane l; both have `lanes` elements.
    void add_products(const float* a, const float* b) {
        Eight a_low, a_high, b_low, b_high;
        std::memcpy(&a_low, a, 32);
        std::memcpy(&a_high, a + 8, 32);
        std::memcpy(&b_low, b, 32);
        std::memcpy(&b_high, b + 8, 32);
        low += a_low * b_low;
        high += a_high * b_high;
    }
    float fold() const {
        float sums[8];
        const Eight both = low + high;
        std::memcpy(sums, &both, 32);
        for (size_t half = 4; half; half /= 2)
            for (size_t l = 0; l < half; ++l) sums[l] += sums[l + half];
        return sums[0];
    }
};

// Sum of a[d] * b[d]. A last part of fewer than sixteen is padded with zeros, which change no sum.
template <class Size>
inline float dot(const float* a, const float* b, Size dim) {
    LaneSums sums;
    size_t d = 0;
    for (; d + lanes <= dim; d += lanes) sums.add_products(a + d, b + d);
    if (const size_t rest = dim - d) {
        float a_rest[lanes] = {}, b_rest[lanes] = {};
        std::memcpy(a_rest, a + d, rest * 4);
        std::memcpy(b_rest, b + d, rest * 4);
        sums.add_products(a_rest, b_rest);
    }
    return sums.fold();
}

// x ** n by squaring. Multiplications only, so that every machine gets the same bits; libm's pow
// differs between versions.
inline double power(double x, uint32_t n) {
    double result = 1.0;
    for (; n; n >>= 1) {
        if (n & 1) result *= x;
        x *= x;
    }
    return result;
}

// Writes a word of the record and its delta.
inline void put(uint32_t* record, uint32_t* delta, size_t at, uint32_t bits) {
    delta[at] = record[at] ^ bits;
    record[at] = bits;
}

struct Scalars {
    float minus_lr, weight_decay, eps, beta1, beta2;
    float one_minus_beta1, one_minus_beta2;
    double lr, beta1_exact, beta2_exact;
    explicit Scalars(const Optimizer& o)
        : minus_lr(static_cast<float>(-o.lr)),
          weight_decay(static_cast<float>(o.weight_decay)),
          eps(static_cast<float>(o.eps)),
          beta1(static_cast<float>(o.beta1)),
          beta2(static_cast<float>(o.beta2)),
          one_minus_beta1(static_cast<float>(1 - o.beta1)),
          one_minus_beta2(static_cast<float>(1 - o.beta2)),
          lr(o.lr),
          beta1_exact(o.beta1),
          beta2_exact(o.beta2) {}
};

template <bool decay>
inline float gradient(const Scalars& s, const float* grad, const uint32_t* record, size_t d) {
    return decay ? grad[d] + s.weight_decay * as_float(record[d]) : grad[d];
}

template <bool decay>
struct Sgd {
    template <class Size>
    static void step(const Scalars& s, uint32_t* __restrict record, Size dim,
                     const float* __restrict grad, uint32_t* __restrict delta) {
        for (size_t d = 0; d < dim; ++d) {
            const float g = gradient<decay>(s, grad, record, d);
            put(record, delta, d, as_bits(as_float(record[d]) + s.minus_lr * g));
        }
    }
};

template <bool decay>
struct Momentum {
    template <class Size>
    static void step(const Scalars& s, uint32_t* __restrict record, Size dim,
                     const float* __restrict grad, uint32_t* __restrict delta) {
        for (size_t d = 0; d < dim; ++d) {
            const float g = gradient<decay>(s, grad, record, d);
            const float buffer = as_float(record[dim + d]) * s.beta1 + g;
            put(record, delta, dim + d, as_bits(buffer));
            put(record, delta, d, as_bits(as_float(record[d]) + s.minus_lr * buffer));
        }
    }
};

template <bool decay>
struct Adagrad {
    template <class Size>
    static void step(const Scalars& s, uint32_t* __restrict record, Size dim,
                     const float* __restrict grad, uint32_t* __restrict delta) {
        for (size_t d = 0; d < dim; ++d) {
            const float g = gradient<decay>(s, grad, record, d);
            const float sum = as_float(record[dim + d]) + g * g;
            const float change = s.minus_lr * g / (__builtin_sqrtf(sum) + s.eps);
            put(record, delta, dim + d, as_bits(sum));
            put(record, delta, d, as_bits(as_float(record[d]) + change));
        }
    }
};

template <bool decay>
struct RowwiseAdagrad {
    template <class Size>
    static void step(const Scalars& s, uint32_t* __restrict record, Size dim,
                     const float* __restrict grad, uint32_t* __restrict delta) {
        const float* g = grad;
        if (decay) {  // delta, not written yet, has room for the gradients
            for (size_t d = 0; d < dim; ++d)
                delta[d] = as_bits(gradient<decay>(s, grad, record, d));
            g = reinterpret_cast<const float*>(delta);
        }
        const float sum =
            as_float(record[dim]) + dot(g, g, dim) / static_cast<float>(static_cast<size_t>(dim));
        const float factor = s.minus_lr / (__builtin_sqrtf(sum) + s.eps);
        for (size_t d = 0; d < dim; ++d) {
            const float step = factor * (decay ? as_float(delta[d]) : grad[d]);
            put(record, delta, d, as_bits(as_float(record[d]) + step));
        }
        put(record, delta, dim, as_bits(sum));
    }
};

template <bool decay>
struct Adam {
    template <class Size>
    static void step(const Scalars& s, uint32_t* __restrict record, Size dim,
                     const float* __restrict grad, uint32_t* __restrict delta) {
        const uint32_t t = record[3 * dim] + 1;
        const float minus_step_size = static_cast<float>(-(s.lr / (1.0 - power(s.beta1_exact, t))));
        const float correction = static_cast<float>(__builtin_sqrt(1.0 - power(s.beta2_exact, t)));
        for (size_t d = 0; d < dim; ++d) {
            const float g = gradient<decay>(s, grad, record, d);
            const float old_mean = as_float(record[dim + d]);
            const float mean = old_mean + s.one_minus_beta1 * (g - old_mean);
            const float square =
                as_float(record[2 * dim + d]) * s.beta2 + s.one_minus_beta2 * g * g;
            const float change =
                minus_step_size * mean / (__builtin_sqrtf(square) / correction + s.eps);
            put(record, delta, dim + d, as_bits(mean));
            put(record, delta, 2 * dim + d, as_bits(square));
            put(record, delta, d, as_bits(as_float(record[d]) + change));
        }
        put(record, delta, 3 * dim, t);
    }
};

constexpr size_t max_streamed_words = 512;

template <class Rule>
void update_rows(const Optimizer& optimizer, uint32_t* records, size_t words, size_t dim,
                 const int64_t* index, const float* grads, uint32_t* delta, size_t begin,
                 size_t end) {
    const Scalars scalars(optimizer);
    alignas(64) uint32_t row_delta[max_streamed_words];
    const bool stream = words <= max_streamed_words && can_stream(delta, end - begin, words);
    with_fixed(dim, [&](auto row_dim) {
        for (size_t i = begin; i < end; ++i) {
            if (i + rows_ahead < end)
                prefetch<1>(records + index[i + rows_ahead] * words, words * 4);
            Rule::step(scalars, records + index[i] * words, row_dim, grads + i * dim,
                       stream ? row_delta : delta + i * words);
            if (stream) stream_words(delta + i * words, row_delta, words);
        }
    });
    stream_fence();
}

template <template <bool> class Rule>
void update_by(const Optimizer& optimizer, uint32_t* records, size_t words, size_t dim,
               const int64_t* index, const float* grads, uint32_t* delta, size_t begin,
               size_t end) {
    if (optimizer.weight_decay != 0)
        update_rows<Rule<true>>(optimizer, records, words, dim, index, grads, delta, begin, end);
    else
        update_rows<Rule<false>>(optimizer, records, words, dim, index, grads, delta, begin, end);
}

void update(const Optimizer& optimizer, uint32_t* records, size_t words, size_t dim,
            const int64_t* index, const float* grads, uint32_t* delta, size_t begin, size_t end) {
    const auto by = [&] {
        switch (optimizer.kind) {
            case OptimizerKind::momentum:
                return update_by<Momentum>;
            case OptimizerKind::adagrad:
                return update_by<Adagrad>;
            case OptimizerKind::rowwise_adagrad:
                return update_by<RowwiseAdagrad>;
            case OptimizerKind::adam:
                return update_by<Adam>;
            default:
                return update_by<Sgd>;
        }
    }();
    by(optimizer, records, words, dim, index, grads, delta, begin, end);
}

}  // namespace
}  // namespace planaria
