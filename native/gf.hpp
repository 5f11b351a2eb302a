// GF(2^8) multiply-add on bytes, for the SIMD level that includes this file.
//
// One vector type per level with the same operations; the loops below are written once. `stream`
// writes past the cache, sixteen bytes at a time because NumPy aligns memory to no more.
#pragma once

#include <cstring>

#include "field.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace planaria {
namespace {

// Largest number of outputs that one pass of `combine` keeps in registers.
constexpr size_t max_outputs = 4;

#if defined(__GFNI__) && defined(__AVX512BW__)

constexpr auto affine_matrices = field::make_affine_matrices();

struct Vector {
    __m512i bits;
    static constexpr size_t bytes = 64;
    static Vector zero() { return {_mm512_setzero_si512()}; }
    static Vector load(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
    void store(uint8_t* to) const { _mm512_storeu_si512(to, bits); }
    void stream(uint8_t* to) const {
        auto* at = reinterpret_cast<__m128i*>(to);
        _mm_stream_si128(at, _mm512_castsi512_si128(bits));
        _mm_stream_si128(at + 1, _mm512_extracti32x4_epi32(bits, 1));
        _mm_stream_si128(at + 2, _mm512_extracti32x4_epi32(bits, 2));
        _mm_stream_si128(at + 3, _mm512_extracti32x4_epi32(bits, 3));
    }
    Vector operator^(Vector other) const { return {_mm512_xor_si512(bits, other.bits)}; }
};

struct Multiplier {
    __m512i matrix;
    explicit Multiplier(uint8_t c)
        : matrix(_mm512_set1_epi64(static_cast<long long>(affine_matrices.of[c]))) {}
    Vector operator*(Vector x) const { return {_mm512_gf2p8affine_epi64_epi8(x.bits, matrix, 0)}; }
};

#elif defined(__AVX2__)

constexpr auto nibble_tables = field::make_nibble_tables();

struct Vector {
    __m256i bits;
    static constexpr size_t bytes = 32;
    static Vector zero() { return {_mm256_setzero_si256()}; }
    static Vector load(const uint8_t* from) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
    }
    void store(uint8_t* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits); }
    void stream(uint8_t* to) const {
        auto* at = reinterpret_cast<__m128i*>(to);
        _mm_stream_si128(at, _mm256_castsi256_si128(bits));
        _mm_stream_si128(at + 1, _mm256_extracti128_si256(bits, 1));
    }
    Vector operator^(Vector other) const { return {_mm256_xor_si256(bits, other.bits)}; }
};

struct Multiplier {
    __m256i low, high;
    static __m256i twice(const uint8_t* table) {
        return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    }
    explicit Multiplier(uint8_t c)
        : low(twice(nibble_tables.low[c])), high(twice(nibble_tables.high[c])) {}
    Vector operator*(Vector x) const {
        const __m256i nibble = _mm256_set1_epi8(0x0f);
        const __m256i low_part = _mm256_and_si256(x.bits, nibble);
        const __m256i high_part = _mm256_and_si256(_mm256_srli_epi64(x.bits, 4), nibble);
        return {_mm256_xor_si256(_mm256_shuffle_epi8(low, low_part),
                                 _mm256_shuffle_epi8(high, high_part))};
    }
};

#else

// Eight bytes in a word. c * x is the XOR, over the bits of c, of x shifted by that bit; all
// eight bytes are doubled at once.
struct Vector {
    uint64_t bits;
    static constexpr size_t bytes = 8;
    static Vector zero() { return {0}; }
    static Vector load(const uint8_t* from) {
        uint64_t bits;
        std::memcpy(&bits, from, 8);
        return {bits};
    }
    void store(uint8_t* to) const { std::memcpy(to, &bits, 8); }
    void stream(uint8_t* to) const { store(to); }
    Vector operator^(Vector other) const { return {bits ^ other.bits}; }
};

struct Multiplier {
    uint8_t c;
    explicit Multiplier(uint8_t coefficient) : c(coefficient) {}
    Vector operator*(Vector x) const {
        uint64_t product = 0, shifted = x.bits;
        for (unsigned rest = c; rest; rest >>= 1) {
            product ^= shifted & (0 - static_cast<uint64_t>(rest & 1));
            const uint64_t carry = shifted >> 7 & 0x0101010101010101u;
            shifted = (shifted << 1 & 0xfefefefefefefefeu) ^ carry * 0x1d;
        }
        return {product};
    }
};

#endif

// After streaming: other threads see what was written.
inline void stream_fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// The last bytes of a buffer, fewer than a vector: copied to a whole one and back.
inline Vector load_tail(const uint8_t* from, size_t count) {
    uint8_t whole[Vector::bytes] = {};
    std::memcpy(whole, from, count);
    return Vector::load(whole);
}

inline void store_tail(Vector x, uint8_t* to, size_t count) {
    uint8_t whole[Vector::bytes];
    x.store(whole);
    std::memcpy(to, whole, count);
}

inline void xor_bytes(uint8_t* target, const uint8_t* source, size_t count) {
    size_t i = 0;
    for (; i + Vector::bytes <= count; i += Vector::bytes)
        (Vector::load(target + i) ^ Vector::load(source + i)).store(target + i);
    for (; i < count; ++i) target[i] ^= source[i];
}

inline void mul_add_bytes(uint8_t* target, const uint8_t* source, uint8_t c, size_t count) {
    if (c == 1) return xor_bytes(target, source, count);
    const Multiplier times(c);
    size_t i = 0;
    for (; i + Vector::bytes <= count; i += Vector::bytes)
        (Vector::load(target + i) ^ times * Vector::load(source + i)).store(target + i);
    if (const size_t tail = count - i)
        store_tail(load_tail(target + i, tail) ^ times * load_tail(source + i, tail), target + i,
                   tail);
}

// All outputs of one vector's width: each input is read once, each output written once.
template <size_t n_out>
inline void combine_vectors(const uint8_t* const* in, size_t k, uint8_t* const* out,
                            const uint8_t* coef, size_t at, size_t tail) {
    Vector sums[n_out];
    for (size_t j = 0; j < n_out; ++j) sums[j] = Vector::zero();
    for (size_t i = 0; i < k; ++i) {
        const Vector x = tail ? load_tail(in[i] + at, tail) : Vector::load(in[i] + at);
        for (size_t j = 0; j < n_out; ++j) sums[j] = sums[j] ^ Multiplier(coef[j * k + i]) * x;
    }
    for (size_t j = 0; j < n_out; ++j) {
        if (tail)
            store_tail(sums[j], out[j] + at, tail);
        else
            sums[j].store(out[j] + at);
    }
}

template <size_t n_out>
void combine_outputs(const uint8_t* const* in, size_t k, uint8_t* const* out, const uint8_t* coef,
                     size_t begin, size_t end) {
    size_t at = begin;
    for (; at + Vector::bytes <= end; at += Vector::bytes)
        combine_vectors<n_out>(in, k, out, coef, at, 0);
    if (at < end) combine_vectors<n_out>(in, k, out, coef, at, end - at);
}

void combine(const uint8_t* const* in, size_t k, uint8_t* const* out, size_t n_out,
             const uint8_t* coef, size_t begin, size_t end) {
    switch (n_out) {
        case 1:
            return combine_outputs<1>(in, k, out, coef, begin, end);
        case 2:
            return combine_outputs<2>(in, k, out, coef, begin, end);
        case 3:
            return combine_outputs<3>(in, k, out, coef, begin, end);
        case 4:
            return combine_outputs<4>(in, k, out, coef, begin, end);
    }
}

}  // namespace
}  // namespace planaria
