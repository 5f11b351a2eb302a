// Huffman codes of bytes: canonical, no longer than eleven bits, decoded by table.
//
//     lengths   four bits per symbol, symbol 0 lowest, padded to a byte; 0: does not occur
//     sizes     uint32 each: bytes of all streams but the last
//     streams   four runs of equally many symbols (the last may have fewer); one if they are few.
//               Bits from the lowest on, each code's first bit first, padded to a byte
//
// Among codes of one length those of lower symbols are lower. Lengths are those of Huffman's tree,
// leaves before inner nodes of equal count and lower symbols before higher ones; codes longer than
// eleven bits are cut, and of the others the longest are made longer until all have room.
#pragma once

#include <cstddef>
#include <cstdint>

namespace planaria {

constexpr unsigned huffman_bits = 11;
constexpr size_t huffman_streams = 4;
constexpr size_t huffman_few = 4096;  // fewer symbols than this are one stream

// Bytes that the codes take. Nothing is written and 0 returned where that is not less than `below`;
// `out` needs room for `below` bytes and 16 more. All codes are below `symbols`, which is at most
// 256.
size_t huffman_encode(const uint8_t* codes, size_t count, size_t symbols, size_t below,
                      uint8_t* out);

// Returns false where the bytes are no such codes of `count` symbols.
bool huffman_decode(const uint8_t* in, size_t bytes, size_t symbols, size_t count, uint8_t* codes);

}  // namespace planaria
