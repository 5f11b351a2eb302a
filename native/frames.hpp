// The rows of one answer as a frame: a piece for each table that has rows in it, in the order of
// tables, each in its own encoding. docs/core.md draws the bytes.
//
// Rows stand in any order and the receiver knows each one's table, so neither positions nor
// anything else that it knows is taken from a frame: what is there must agree with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace planaria {

enum class Encoding : uint32_t { exact = 0, fp16, bf16, codes, packed, huffman, vector_lz };
constexpr uint32_t encodings = 7;

struct FrameHeader {
    uint32_t magic, checksum;  // of all that follows
    uint32_t rows, dim, pieces;
};

struct PieceHeader {
    int32_t table;
    uint32_t rows, bytes;
    uint32_t encoding;
    float scale;  // this and the next two are 0 where there are no codes
    int16_t low;
    uint16_t span;  // the highest code less low
};

constexpr uint32_t frame_magic = 0x31514c50;  // "PLQ1"
constexpr size_t frame_slack = 32;            // encoders store whole words

static_assert(sizeof(FrameHeader) == 20 && sizeof(PieceHeader) == 24, "they are the wire format");

// Rows by table, in their order within each.
struct Grouped {
    std::vector<uint32_t> first;      // [tables + 1]
    std::vector<uint32_t> positions;  // [rows]

    void group(const int32_t* tables, size_t rows, size_t count);
    size_t pieces() const;
};

// The frame's bytes, or -1 - table where a table that is not to be sent exactly has a number that
// is not finite. scales, encodings: [tables]; a scale is that of the codes. `out` has room for
// frame_bound bytes.
int64_t encode_frame(const Grouped& grouped, const float* values, size_t dim, const float* scales,
                     const uint8_t* encodings, uint8_t* out);
size_t frame_bound(size_t rows, size_t dim, size_t pieces);

// Throws WireError where the bytes are not a frame of just these rows; `values` may be written
// then.
void decode_frame(const Grouped& grouped, const uint8_t* frame, size_t bytes, size_t dim,
                  float* values);

}  // namespace planaria
