// DLRM's interaction: a sample's vectors, multiplied with one another.
//
// Each product is a sum over the vectors' elements in their order, and each element of a gradient
// one over the other vectors in theirs; both start with zero. Sixteen sums side by side are sixteen
// products or sixteen elements, never parts of one sum: nothing is folded.
#pragma once

#include "optimizers.hpp"

namespace planaria {
namespace {

inline size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

#if defined(__AVX512F__)
constexpr size_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr size_t vector_bytes = 32;
#else
constexpr size_t vector_bytes = 16;
#endif

// Some floats, in vectors of the compiler that the level has. Halves, not an array of vectors,
// which the compiler would keep in memory.
template <size_t count>
struct Lanes {
    Lanes<count / 2> low, high;

    void load(const float* from) {
        low.load(from);
        high.load(from + count / 2);
    }
    void store(float* to) const {
        low.store(to);
        high.store(to + count / 2);
    }
    void add_product(float factor, const Lanes& other) {
        low.add_product(factor, other.low);
        high.add_product(factor, other.high);
    }
};

template <>
struct Lanes<vector_bytes / 4> {
    typedef float Vector __attribute__((vector_size(vector_bytes)));
    Vector in{};

    void load(const float* from) { std::memcpy(&in, from, vector_bytes); }
    void store(float* to) const { std::memcpy(to, &in, vector_bytes); }
    void add_product(float factor, const Lanes& other) { in += factor * other.in; }
};

using Sixteen = Lanes<lanes>;

// The first `count` floats, and zeros.
inline Sixteen load(const float* from, size_t count) {
    Sixteen found;
    if (count == lanes) {
        found.load(from);
    } else {
        float padded[lanes] = {};
        std::memcpy(padded, from, count * 4);
        found.load(padded);
    }
    return found;
}

inline void store(const Sixteen& sums, float* to, size_t count) {
    if (count == lanes) return sums.store(to);
    float all[lanes];
    sums.store(all);
    std::memcpy(to, all, count * 4);
}

// The vectors of one sample: `first`, where there is one, and then those of `rest`.
struct Sample {
    const float *first, *rest;
    size_t dim, count;

    Sample(const Vectors& all, size_t sample)
        : first(all.first ? all.first + sample * all.dim : nullptr),
          rest(all.rest + sample * all.rest_count * all.dim),
          dim(all.dim),
          count(all.rest_count + (all.first != nullptr)) {}

    const float* operator[](size_t at) const {
        if (!first) return rest + at * dim;
        return at ? rest + (at - 1) * dim : first;
    }
};

constexpr size_t depth = 64;  // floats of a vector that are looked at together

// The products of vectors [column, column + 16) with all that stand behind each, from the floats
// [d, d + some) of both. The vectors of the columns lie across, so that a product is one lane.
inline void add_products(const Sample& sample, size_t column, size_t d, size_t some,
                         float* products) {
    float across[depth][lanes] = {};
    for (size_t j = 0; j < least(lanes, sample.count - column); ++j) {
        const float* vector = sample[column + j] + d;
        for (size_t at = 0; at < some; ++at) across[at][j] = vector[at];
    }
    for (size_t i = column + 1; i < sample.count; ++i) {
        const float* vector = sample[i] + d;
        float* place = products + i * (i - 1) / 2 + column;
        const size_t before = least(lanes, i - column);
        Sixteen sums;
        if (d) sums = load(place, before);
        for (size_t at = 0; at < some; ++at) sums.add_product(vector[at], load(across[at], lanes));
        store(sums, place, before);
    }
}

void interact(const Vectors& vectors, float* out, size_t begin, size_t end) {
    const size_t front = vectors.first ? vectors.dim : 0;
    for (size_t s = begin; s < end; ++s) {
        const Sample sample(vectors, s);
        float* own = out + s * (front + sample.count * (sample.count - 1) / 2);
        if (front) copy_words(own, sample.first, front);
        for (size_t column = 0; column + 1 < sample.count; column += lanes)
            for (size_t d = 0; d < vectors.dim; d += depth)
                add_products(sample, column, d, least(depth, vectors.dim - d), own + front);
    }
}

// The gradient of floats [d, d + some) of vector i, to which each other vector adds as much as the
// gradient of its product says. sums: what reaches it without a product.
inline Sixteen add_vectors(const Sample& sample, size_t i, size_t d, size_t some,
                           const float* products, Sixteen sums) {
    const float* own = products + i * (i - 1) / 2;
    for (size_t j = 0; j < i; ++j) sums.add_product(own[j], load(sample[j] + d, some));
    for (size_t j = i + 1; j < sample.count; ++j)
        sums.add_product(products[j * (j - 1) / 2 + i], load(sample[j] + d, some));
    return sums;
}

void interact_backward(const Vectors& vectors, const float* grads, float* of_first, float* of_rest,
                       size_t begin, size_t end) {
    const size_t dim = vectors.dim, front = vectors.first ? dim : 0;
    for (size_t s = begin; s < end; ++s) {
        const Sample sample(vectors, s);
        const float* own = grads + s * (front + sample.count * (sample.count - 1) / 2);
        float* out = of_rest + s * vectors.rest_count * dim;
        for (size_t i = 0; i < sample.count; ++i) {
            const bool is_first = front && i == 0;
            float* gradient = is_first ? of_first + s * dim : out;
            for (size_t d = 0; d < dim; d += lanes) {
                const size_t some = least(lanes, dim - d);
                const Sixteen direct = is_first ? load(own + d, some) : Sixteen();
                store(add_vectors(sample, i, d, some, own + front, direct), gradient + d, some);
            }
            if (!is_first) out += dim;
        }
    }
}

}  // namespace
}  // namespace planaria
