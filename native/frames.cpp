#include "frames.hpp"

#include <cmath>
#include <cstring>
#include <string>

#include "huffman.hpp"
#include "ids.hpp"
#include "kernels.hpp"
#include "vector_lz.hpp"

namespace planaria {
namespace {

constexpr double highest_code = highest_of_codes;
constexpr uint32_t infinity_bits = 0x7f800000u;

// Kept between calls: fresh memory costs more to touch than the codes to find.
uint8_t* scratch(size_t bytes) {
    static thread_local std::vector<uint8_t> kept;
    if (kept.size() < bytes + frame_slack) kept.resize(bytes + frame_slack);
    return kept.data();
}

unsigned bits_of(uint32_t span) {
    unsigned bits = 0;
    while (span >> bits) ++bits;
    return bits;
}

CodeGrid grid_of(const PieceHeader& header) {
    return {header.scale, header.low, header.span < 256 ? 1u : 2u};
}

size_t packed_bytes(size_t count, uint32_t span) {
    return (count * bits_of(span) + 7) / 8;
}

float from_ordered(int32_t key) {
    const uint32_t bits = key < 0 ? static_cast<uint32_t>(key) ^ 0x7fffffffu : key;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// ------------------------------------------------------------------------- encoding

struct Numbers {
    float low, high;
    uint32_t largest;  // the bits of the largest magnitude
};

Numbers numbers_of(const PieceRows& piece, const float* values) {
    int32_t span[2];
    kernels().span_rows(piece, values, span);
    const Numbers found{from_ordered(span[0]), from_ordered(span[1]), 0};
    uint32_t ends[2];
    std::memcpy(ends, &found.low, 8);
    ends[0] &= 0x7fffffffu, ends[1] &= 0x7fffffffu;
    return {found.low, found.high, ends[0] > ends[1] ? ends[0] : ends[1]};
}

// Sets low and span; false where the codes do not fit or what they stand for is not finite.
bool set_codes(const Numbers& numbers, PieceHeader& header) {
    const double inverse = 1.0 / double{header.scale};  // as in lossy.hpp
    const double low = std::nearbyint(double{numbers.low} * inverse);
    const double high = std::nearbyint(double{numbers.high} * inverse);
    if (!(low >= -highest_code && high <= highest_code)) return false;
    if (!std::isfinite(static_cast<float>(low) * header.scale) ||
        !std::isfinite(static_cast<float>(high) * header.scale))
        return false;
    header.low = static_cast<int16_t>(low);
    header.span = static_cast<uint16_t>(high - low);
    return true;
}

size_t write_exact(const PieceRows& piece, const float* values, uint8_t* out) {
    const size_t row_bytes = piece.dim * 4;
    for (size_t i = 0; i < piece.rows; ++i)
        std::memcpy(out + i * row_bytes, values + piece.positions[i] * piece.dim, row_bytes);
    return piece.rows * row_bytes;
}

// Writes the codes as asked for, or packed, where that takes no more.
size_t write_codes(const PieceRows& piece, const float* values, PieceHeader& header, uint8_t* out) {
    const size_t count = piece.rows * piece.dim, packed = packed_bytes(count, header.span);
    const CodeGrid grid = grid_of(header);
    if (static_cast<Encoding>(header.encoding) == Encoding::codes) {
        kernels().code_rows(piece, values, grid, out);
        return count * grid.code_bytes;
    }
    if (!packed) {  // all codes are equal
        header.encoding = static_cast<uint32_t>(Encoding::packed);
        return 0;
    }
    uint8_t* const codes = scratch(count * grid.code_bytes);
    kernels().code_rows(piece, values, grid, codes);
    size_t bytes = 0;
    if (static_cast<Encoding>(header.encoding) == Encoding::huffman && grid.code_bytes == 1)
        bytes = huffman_encode(codes, count, header.span + size_t{1}, packed, out);
    if (static_cast<Encoding>(header.encoding) == Encoding::vector_lz)
        bytes = vector_lz_encode(codes, piece.rows, piece.dim * grid.code_bytes, grid.code_bytes,
                                 bits_of(header.span), packed, out);
    if (bytes) return bytes;
    header.encoding = static_cast<uint32_t>(Encoding::packed);
    kernels().pack_codes(codes, count, bits_of(header.span), out);
    return packed;
}

size_t write_halves(const PieceRows& piece, const float* values, bool brain, uint8_t* out) {
    kernels().halve_rows(piece, values, brain, out);
    return piece.rows * piece.dim * 2;
}

// As floats, because a number of the piece is too large for its encoding. All others are rounded as
// if it were not there: whoever gets them with other neighbours gets the same.
size_t write_rounded(const PieceRows& piece, const float* values, Rounding rounding,
                     PieceHeader& header, uint8_t* out) {
    kernels().round_rows(piece, values, rounding, header.scale, out);
    header.encoding = static_cast<uint32_t>(Encoding::exact);
    header.scale = 0;
    return piece.rows * piece.dim * 4;
}

size_t write_numbers(const PieceRows& piece, const float* values, const Numbers& numbers,
                     PieceHeader& header, uint8_t* out) {
    const auto encoding = static_cast<Encoding>(header.encoding);
    const bool brain = encoding == Encoding::bf16;
    if (brain || encoding == Encoding::fp16) {
        header.scale = 0;
        if (numbers.largest < (brain ? bf16_limit : fp16_limit))
            return write_halves(piece, values, brain, out);
        return write_rounded(piece, values, brain ? Rounding::bf16 : Rounding::fp16, header, out);
    }
    if (set_codes(numbers, header)) return write_codes(piece, values, header, out);
    return write_rounded(piece, values, Rounding::codes, header, out);
}

// Returns false where a number is not finite.
bool write_piece(const PieceRows& piece, const float* values, PieceHeader& header, uint8_t* out) {
    size_t bytes;
    if (static_cast<Encoding>(header.encoding) == Encoding::exact) {
        header.scale = 0;
        bytes = write_exact(piece, values, out);
    } else {
        const Numbers numbers = numbers_of(piece, values);
        if (numbers.largest >= infinity_bits) return false;
        bytes = write_numbers(piece, values, numbers, header, out);
    }
    header.bytes = static_cast<uint32_t>(bytes);
    return true;
}

// ------------------------------------------------------------------------- decoding

[[noreturn]] void refuse(const std::string& why) {
    throw WireError("an answer's rows are no frame of them: " + why + "; look them up again");
}

void check_frame(const FrameHeader& header, const uint8_t* frame, size_t bytes, size_t rows,
                 size_t dim, size_t pieces) {
    if (header.magic != frame_magic) refuse("it does not begin as one");
    if (header.rows != rows || header.dim != dim || header.pieces != pieces)
        refuse("it has " + std::to_string(header.rows) + " rows of " + std::to_string(header.dim) +
               " in " + std::to_string(header.pieces) + " pieces, not " + std::to_string(rows) +
               " of " + std::to_string(dim) + " in " + std::to_string(pieces));
    if ((bytes - sizeof header) / sizeof(PieceHeader) < pieces) refuse("it is cut off");
    if (kernels().crc32(0, frame + 8, bytes - 8) != header.checksum)
        refuse("its checksum is another");
}

bool plain_size_fits(const PieceHeader& header, size_t count) {
    switch (static_cast<Encoding>(header.encoding)) {
        case Encoding::exact:
            return header.bytes == count * 4;
        case Encoding::fp16:
        case Encoding::bf16:
            return header.bytes == count * 2;
        case Encoding::codes:
            return header.bytes == count * (header.span < 256 ? 1 : 2);
        case Encoding::packed:
            return header.bytes == packed_bytes(count, header.span);
        case Encoding::huffman:
            return header.span < 256;
        case Encoding::vector_lz:
            return true;
    }
    return false;
}

void check_piece(const PieceHeader& header, size_t table, size_t rows, size_t dim, size_t left) {
    const std::string which = "the piece of table " + std::to_string(table);
    if (header.table != static_cast<int64_t>(table) || header.rows != rows)
        refuse(which + " is not where it belongs, or has other rows");
    if (header.bytes > left) refuse(which + " is cut off");
    const bool coded = header.encoding >= static_cast<uint32_t>(Encoding::codes);
    if (header.encoding >= encodings) refuse(which + " has an encoding that does not exist");
    if (coded ? !(header.scale > 0 && std::isfinite(header.scale))
              : header.scale != 0 || header.low || header.span)
        refuse(which + " has an impossible scale");
    if (coded && header.low + int32_t{header.span} > highest_code)
        refuse(which + " has codes that do not exist");
    if (!plain_size_fits(header, rows * dim)) refuse(which + " has another size than its rows");
}

// Returns false where the payload is not what the header says. Its size was held to what the
// encoding needs, where that follows from the rows.
bool read_codes(const PieceHeader& header, const PieceRows& piece, const uint8_t* in,
                uint8_t* codes) {
    const size_t count = piece.rows * piece.dim;
    const unsigned code_bytes = grid_of(header).code_bytes, bits = bits_of(header.span);
    switch (static_cast<Encoding>(header.encoding)) {
        case Encoding::huffman:
            return huffman_decode(in, header.bytes, header.span + size_t{1}, count, codes);
        case Encoding::vector_lz:
            return vector_lz_decode(in, header.bytes, piece.rows, piece.dim * code_bytes,
                                    code_bytes, bits, codes);
        default:
            kernels().unpack_codes(in, count, bits, codes);
            return true;
    }
}

void read_piece(const PieceHeader& header, const PieceRows& piece, const uint8_t* in,
                float* values) {
    const auto encoding = static_cast<Encoding>(header.encoding);
    const size_t row_bytes = piece.dim * 4;
    if (encoding == Encoding::exact) {
        for (size_t i = 0; i < piece.rows; ++i)
            std::memcpy(values + piece.positions[i] * piece.dim, in + i * row_bytes, row_bytes);
    } else if (encoding == Encoding::fp16 || encoding == Encoding::bf16) {
        kernels().widen_rows(piece, in, encoding == Encoding::bf16, values);
    } else if (encoding == Encoding::codes) {
        kernels().value_rows(piece, in, grid_of(header), values);
    } else {
        uint8_t* const codes = scratch(piece.rows * piece.dim * grid_of(header).code_bytes);
        if (!read_codes(header, piece, in, codes))
            refuse("the codes of table " + std::to_string(header.table) + " cannot be decoded");
        kernels().value_rows(piece, codes, grid_of(header), values);
    }
}

}  // namespace

void Grouped::group(const int32_t* tables, size_t rows, size_t count) {
    first.assign(count + 1, 0);
    positions.resize(rows);
    for (size_t i = 0; i < rows; ++i) ++first[tables[i]];
    uint32_t before = 0;
    for (uint32_t& entry : first) {
        const uint32_t own = entry;
        entry = before;
        before += own;
    }
    for (size_t i = 0; i < rows; ++i) positions[first[tables[i]]++] = static_cast<uint32_t>(i);
    for (size_t t = count; t > 0; --t) first[t] = first[t - 1];
    first[0] = 0;
}

size_t Grouped::pieces() const {
    size_t found = 0;
    for (size_t t = 0; t + 1 < first.size(); ++t) found += first[t] < first[t + 1];
    return found;
}

size_t frame_bound(size_t rows, size_t dim, size_t pieces) {
    return sizeof(FrameHeader) + pieces * sizeof(PieceHeader) + rows * dim * 4 + frame_slack;
}

int64_t encode_frame(const Grouped& grouped, const float* values, size_t dim, const float* scales,
                     const uint8_t* encodings, uint8_t* out) {
    const size_t rows = grouped.positions.size(), pieces = grouped.pieces();
    FrameHeader header{frame_magic, 0, uint32_t(rows), uint32_t(dim), uint32_t(pieces)};
    uint8_t* at_header = out + sizeof header;
    uint8_t* at = at_header + pieces * sizeof(PieceHeader);
    for (size_t t = 0; t + 1 < grouped.first.size(); ++t) {
        const size_t first = grouped.first[t], count = grouped.first[t + 1] - first;
        if (!count) continue;
        const PieceRows piece{grouped.positions.data() + first, count, dim};
        PieceHeader own{int32_t(t), uint32_t(count), 0, encodings[t], scales[t], 0, 0};
        if (!write_piece(piece, values, own, at)) return -1 - static_cast<int64_t>(t);
        std::memcpy(at_header, &own, sizeof own);
        at_header += sizeof own;
        at += own.bytes;
    }
    std::memcpy(out, &header, sizeof header);
    header.checksum = kernels().crc32(0, out + 8, at - out - 8);
    std::memcpy(out, &header, sizeof header);
    return at - out;
}

void decode_frame(const Grouped& grouped, const uint8_t* frame, size_t bytes, size_t dim,
                  float* values) {
    FrameHeader header;
    if (bytes < sizeof header) refuse("it is cut off");
    std::memcpy(&header, frame, sizeof header);
    const size_t pieces = grouped.pieces();
    check_frame(header, frame, bytes, grouped.positions.size(), dim, pieces);
    const uint8_t* at_header = frame + sizeof header;
    const uint8_t* at = at_header + pieces * sizeof(PieceHeader);
    const uint8_t* const end = frame + bytes;
    for (size_t t = 0; t + 1 < grouped.first.size(); ++t) {
        const size_t first = grouped.first[t], count = grouped.first[t + 1] - first;
        if (!count) continue;
        PieceHeader own;
        std::memcpy(&own, at_header, sizeof own);
        at_header += sizeof own;
        check_piece(own, t, count, dim, end - at);
        read_piece(own, {grouped.positions.data() + first, count, dim}, at, values);
        at += own.bytes;
    }
    if (at != end) refuse("something follows it");
}

}  // namespace planaria
