// GF(2^8) with polynomial 0x11d: the constant tables that the multiply-add kernels read.
// All are computed at compile time, so there is nothing to initialise and nothing to get wrong
// in the order of initialisation.
#pragma once

#include <cstdint>

namespace planaria::field {

constexpr uint8_t multiply(uint8_t a, uint8_t b) {
    unsigned product = 0, shifted = a;
    for (int bit = 0; bit < 8; ++bit) {
        if (b >> bit & 1) product ^= shifted;
        shifted <<= 1;
        if (shifted & 0x100) shifted ^= 0x11d;
    }
    return static_cast<uint8_t>(product);
}

// For each coefficient c: c * n and c * 16n for the 16 values n of a nibble.
struct NibbleTables {
    alignas(32) uint8_t low[256][16];
    alignas(32) uint8_t high[256][16];
};

constexpr NibbleTables make_nibble_tables() {
    NibbleTables tables{};
    for (int c = 0; c < 256; ++c)
        for (int n = 0; n < 16; ++n) {
            tables.low[c][n] = multiply(static_cast<uint8_t>(c), static_cast<uint8_t>(n));
            tables.high[c][n] = multiply(static_cast<uint8_t>(c), static_cast<uint8_t>(n << 4));
        }
    return tables;
}

// Multiplication by a constant is linear over bits, so GF2P8AFFINEQB does it for any polynomial.
// That instruction wants the 8x8 bit matrix with the row of result bit i in byte 7 - i.
constexpr uint64_t affine_matrix(uint8_t c) {
    uint64_t matrix = 0;
    for (int result_bit = 0; result_bit < 8; ++result_bit) {
        unsigned row = 0;
        for (int input_bit = 0; input_bit < 8; ++input_bit) {
            const uint8_t product = multiply(c, static_cast<uint8_t>(1u << input_bit));
            row |= static_cast<unsigned>(product >> result_bit & 1) << input_bit;
        }
        matrix |= static_cast<uint64_t>(row) << (8 * (7 - result_bit));
    }
    return matrix;
}

struct AffineMatrices {
    uint64_t of[256];
};

constexpr AffineMatrices make_affine_matrices() {
    AffineMatrices matrices{};
    for (int c = 0; c < 256; ++c) matrices.of[c] = affine_matrix(static_cast<uint8_t>(c));
    return matrices;
}

}  // namespace planaria::field
