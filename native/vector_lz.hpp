// Rows of codes in which a symbol is a whole row: those that stand once more within a window are
// named by how far back they stand and how many follow.
//
//     items     uint32: literal rows and tokens
//     flags     a bit per item, lowest first, padded to a byte with zeros; 1: a token
//     tokens    two bytes each: rows back, 1 to 255, and rows, 1 to 255
//     literals  their codes, packed to the bits that they need
//
// Blocks of 2,048 rows are for themselves: no token reaches out of its own. A token names the
// nearest equal row, and as many rows behind it as are equal, too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace planaria {

constexpr size_t lz_block_rows = 2048;
constexpr size_t lz_window = 255;
constexpr size_t lz_longest = 255;

// Bytes that the rows take. Nothing is written and 0 returned where that is not less than `below`;
// `out` needs room for `below` bytes and 16 more. row_bytes = dim * bytes of a code.
size_t vector_lz_encode(const uint8_t* codes, size_t rows, size_t row_bytes, size_t code_bytes,
                        unsigned bits, size_t below, uint8_t* out);

// Returns false where the bytes are no such rows.
bool vector_lz_decode(const uint8_t* in, size_t bytes, size_t rows, size_t row_bytes,
                      size_t code_bytes, unsigned bits, uint8_t* codes);

}  // namespace planaria
