// Rows on the wire with fewer bits, for the SIMD level that includes this file: which numbers a
// piece spans, its codes, what they stand for, floats of 16 bits, and what is left of a number by
// either.
//
// A piece is the rows of one table in an answer, which need not lie side by side. The code of a
// number x is x * (1 / scale), both computed in double, rounded to the nearest, half to even. The
// scale has nine significant bits and a code fifteen, so that a code times the scale is a float
// without rounding. A quotient of such numbers is a half, or differs from the next one by 2^-26 of
// itself at least, where the product is off by 2^-52: it is never rounded past one. Hence no number
// is off by more than half a scale, and every level has the same codes.
#pragma once

#include "quantise.hpp"

namespace planaria {
namespace {

// Floats as integers that are ordered as they are: -NaN, -inf, ..., -0, 0, ..., inf, NaN.
inline int32_t ordered(uint32_t bits) {
    return static_cast<int32_t>(bits ^
                                (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) >> 1));
}

inline bool is_finite(float value) {
    return (as_bits(value) & 0x7fffffffu) < 0x7f800000u;
}

void span_rows(const PieceRows& piece, const float* values, int32_t span[2]) {
    const size_t dim = piece.dim;
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (size_t i = 0; i < piece.rows; ++i) {
        const float* row = values + piece.positions[i] * dim;
        for (size_t d = 0; d < dim; ++d) {
            const int32_t key = ordered(as_bits(row[d]));
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
    }
    span[0] = low, span[1] = high;
}

// Added to a double below 2^51 in magnitude and taken away again, it leaves the nearest integer.
constexpr double to_integer = 0x1.8p52;
constexpr size_t block = 16;

typedef uint8_t ByteCode;

// Stands anywhere in a frame. A typedef would lose its alignment as an argument of templates.
struct __attribute__((packed, may_alias)) WordCode {
    uint16_t bits;

    explicit WordCode(int32_t code) : bits(static_cast<uint16_t>(code)) {}
    explicit operator int32_t() const { return bits; }
};

template <class Code, class Size>
inline void code_row(const float* __restrict row, Size count, double inverse, int32_t low,
                     Code* __restrict codes) {
    for (size_t d = 0; d < count; ++d) {
        const double at = (static_cast<double>(row[d]) * inverse + to_integer) - to_integer;
        codes[d] = static_cast<Code>(static_cast<int32_t>(at) - low);
    }
}

template <class Code>
void code_piece(const PieceRows& piece, const float* values, const CodeGrid& grid, uint8_t* codes) {
    const double inverse = 1.0 / static_cast<double>(grid.scale);
    auto* out = reinterpret_cast<Code*>(codes);
    for (size_t i = 0; i < piece.rows; ++i, out += piece.dim) {
        const float* row = values + piece.positions[i] * piece.dim;
        size_t d = 0;
        for (; d + block <= piece.dim; d += block) {
            int32_t wide[block];  // narrowed apart: in one loop GCC does it number by number
            code_row(row + d, Fixed<block>(), inverse, grid.low, wide);
            for (size_t l = 0; l < block; ++l) out[d + l] = static_cast<Code>(wide[l]);
        }
        code_row(row + d, piece.dim - d, inverse, grid.low, out + d);
    }
}

void code_rows(const PieceRows& piece, const float* values, const CodeGrid& grid, uint8_t* codes) {
    if (grid.code_bytes == 1)
        code_piece<ByteCode>(piece, values, grid, codes);
    else
        code_piece<WordCode>(piece, values, grid, codes);
}

template <class Code, class Size>
inline void value_row(const Code* __restrict codes, Size count, float scale, int32_t low,
                      float* __restrict row) {
    for (size_t d = 0; d < count; ++d)
        row[d] = static_cast<float>(static_cast<int32_t>(codes[d]) + low) * scale;
}

template <class Code>
void value_piece(const PieceRows& piece, const uint8_t* codes, const CodeGrid& grid,
                 float* values) {
    const auto* from = reinterpret_cast<const Code*>(codes);
    with_fixed(piece.dim, [&](auto dim) {
        for (size_t i = 0; i < piece.rows; ++i, from += dim)
            value_row(from, dim, grid.scale, grid.low, values + piece.positions[i] * dim);
    });
}

void value_rows(const PieceRows& piece, const uint8_t* codes, const CodeGrid& grid, float* values) {
    if (grid.code_bytes == 1)
        value_piece<ByteCode>(piece, codes, grid, values);
    else
        value_piece<WordCode>(piece, codes, grid, values);
}

// ------------------------------------------------------------------------- floats of 16 bits

// To the nearest, half to even. No number here is so large that it would become an infinity.
inline uint16_t to_bf16(float value) {
    const uint32_t bits = as_bits(value);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(uint16_t half) {
    return as_float(uint32_t{half} << 16);
}

// Below 2^-14 halves are multiples of 2^-24, as are the floats from 0.5 to 1: the addition rounds.
inline uint16_t to_fp16(float value) {
    const uint32_t bits = as_bits(value), size = bits & 0x7fffffffu;
    const uint32_t normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13;
    const uint32_t tiny = as_bits(as_float(size) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>((size < 0x38800000u ? tiny : normal) | (bits >> 16 & 0x8000u));
}

inline float from_fp16(uint16_t half) {
    const uint32_t size = half & 0x7fffu, sign = uint32_t{half & 0x8000u} << 16;
    const uint32_t exponent = size >= 0x7c00u ? 224u << 23 : 112u << 23;  // infinities stay such
    const uint32_t normal = (size << 13) + exponent;
    const uint32_t tiny = as_bits(as_float(0x3f000000u + size) - 0.5f);
    return as_float((size < 0x400u ? tiny : normal) | sign);
}

template <uint16_t (*convert)(float)>
void halve_piece(const PieceRows& piece, const float* values, uint8_t* __restrict out) {
    for (size_t i = 0; i < piece.rows; ++i, out += piece.dim * 2) {
        const float* __restrict row = values + piece.positions[i] * piece.dim;
        for (size_t d = 0; d < piece.dim; ++d) {
            const uint16_t half = convert(row[d]);
            std::memcpy(out + d * 2, &half, 2);
        }
    }
}

template <float (*convert)(uint16_t)>
void widen_piece(const PieceRows& piece, const uint8_t* __restrict halves, float* values) {
    for (size_t i = 0; i < piece.rows; ++i, halves += piece.dim * 2) {
        float* __restrict row = values + piece.positions[i] * piece.dim;
        for (size_t d = 0; d < piece.dim; ++d) {
            uint16_t half;
            std::memcpy(&half, halves + d * 2, 2);
            row[d] = convert(half);
        }
    }
}

void halve_rows(const PieceRows& piece, const float* values, bool brain, uint8_t* out) {
    if (brain)
        halve_piece<to_bf16>(piece, values, out);
    else
        halve_piece<to_fp16>(piece, values, out);
}

void widen_rows(const PieceRows& piece, const uint8_t* halves, bool brain, float* values) {
    if (brain)
        widen_piece<from_bf16>(piece, halves, values);
    else
        widen_piece<from_fp16>(piece, halves, values);
}

// ------------------------------------------------------------------------- number by number

template <class Round>
void round_piece(const PieceRows& piece, const float* values, uint8_t* __restrict out,
                 Round round) {
    for (size_t i = 0; i < piece.rows; ++i, out += piece.dim * 4) {
        const float* __restrict row = values + piece.positions[i] * piece.dim;
        for (size_t d = 0; d < piece.dim; ++d) {
            const float rounded = round(row[d]);
            std::memcpy(out + d * 4, &rounded, 4);
        }
    }
}

void round_rows(const PieceRows& piece, const float* values, Rounding rounding, float scale,
                uint8_t* out) {
    if (rounding == Rounding::codes) {
        const double inverse = 1.0 / static_cast<double>(scale);
        constexpr double highest = highest_of_codes;
        round_piece(piece, values, out, [=](float value) {
            const double at = (static_cast<double>(value) * inverse + to_integer) - to_integer;
            const bool fits = at >= -highest && at <= highest;
            const float found = static_cast<float>(static_cast<int32_t>(fits ? at : 0.0)) * scale;
            return fits && is_finite(found) ? found : value;
        });
        return;
    }
    const bool brain = rounding == Rounding::bf16;
    round_piece(piece, values, out, [=](float value) {
        const bool fits = (as_bits(value) & 0x7fffffffu) < (brain ? bf16_limit : fp16_limit);
        const float rounded = brain ? from_bf16(to_bf16(value)) : from_fp16(to_fp16(value));
        return fits ? rounded : value;
    });
}

}  // namespace
}  // namespace planaria
