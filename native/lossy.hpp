// Rows on the wire with fewer bits, for the SIMD level that includes this file: which numbers a
// piece spans, its codes, what they stand for, and floats of 16 bits.
//
// A piece is the rows of one table in an answer, which need not lie side by side. Code c of a
// number x is x / scale, rounded to the nearest, half to even. The scale has nine significant bits
// and c fifteen, so that c * scale is a float without rounding; and the quotient, computed in
// double, is never rounded onto or past a half (it is a half, or further than 2^-26 of itself from
// one). Hence no number is off by more than half a scale, and every level has the same codes.
#pragma once

#include "quantise.hpp"

namespace planaria {
namespace {

// Floats as integers that are ordered as they are: -NaN, -inf, ..., -0, 0, ..., inf, NaN.
inline int32_t ordered(uint32_t bits) {
    return static_cast<int32_t>(bits ^
                                (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) >> 1));
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

template <class Code>
void code_piece(const PieceRows& piece, const float* values, const CodeGrid& grid,
                uint8_t* __restrict codes) {
    const size_t dim = piece.dim;
    const double scale = grid.scale;
    constexpr size_t block = 16;
    for (size_t i = 0; i < piece.rows; ++i, codes += dim * sizeof(Code)) {
        const float* __restrict row = values + piece.positions[i] * dim;
        for (size_t d = 0; d < dim; d += block) {
            const size_t count = dim - d < block ? dim - d : block;
            float given[block] = {};
            Code found[block];
            std::memcpy(given, row + d, count == block ? sizeof given : count * 4);
            for (size_t l = 0; l < block; ++l) {
                const double at = (static_cast<double>(given[l]) / scale + to_integer) - to_integer;
                found[l] = static_cast<Code>(static_cast<int32_t>(at) - grid.low);
            }
            std::memcpy(codes + d * sizeof(Code), found,
                        count == block ? sizeof found : count * sizeof(Code));
        }
    }
}

void code_rows(const PieceRows& piece, const float* values, const CodeGrid& grid, uint8_t* codes) {
    if (grid.code_bytes == 1)
        code_piece<uint8_t>(piece, values, grid, codes);
    else
        code_piece<uint16_t>(piece, values, grid, codes);
}

template <class Code>
void value_piece(const PieceRows& piece, const uint8_t* __restrict codes, const CodeGrid& grid,
                 float* values) {
    const size_t dim = piece.dim;
    constexpr size_t block = 16;
    for (size_t i = 0; i < piece.rows; ++i, codes += dim * sizeof(Code)) {
        float* __restrict row = values + piece.positions[i] * dim;
        for (size_t d = 0; d < dim; d += block) {
            const size_t count = dim - d < block ? dim - d : block;
            Code given[block] = {};
            float found[block];
            std::memcpy(given, codes + d * sizeof(Code),
                        count == block ? sizeof given : count * sizeof(Code));
            for (size_t l = 0; l < block; ++l)
                found[l] = static_cast<float>(int32_t{given[l]} + grid.low) * grid.scale;
            std::memcpy(row + d, found, count == block ? sizeof found : count * 4);
        }
    }
}

void value_rows(const PieceRows& piece, const uint8_t* codes, const CodeGrid& grid, float* values) {
    if (grid.code_bytes == 1)
        value_piece<uint8_t>(piece, codes, grid, values);
    else
        value_piece<uint16_t>(piece, codes, grid, values);
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

}  // namespace
}  // namespace planaria
