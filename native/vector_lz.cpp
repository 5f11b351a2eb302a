#include "vector_lz.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.hpp"

namespace planaria {
namespace {

constexpr uint32_t nowhere = UINT32_MAX;
constexpr size_t hash_bits = 12;

size_t hash_row(const uint8_t* row, size_t bytes) {
    uint64_t sum = 0;
    size_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
        uint64_t word;
        std::memcpy(&word, row + at, 8);
        sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 29;
    }
    for (; at < bytes; ++at) sum = (sum ^ row[at]) * 0x9e3779b97f4a7c15u;
    return sum * 0x9e3779b97f4a7c15u >> (64 - hash_bits);
}

// The rows of a block by their hash: heads of chains, and for each row the one before it.
class Block {
  public:
    Block(const uint8_t* codes, size_t rows, size_t row_bytes)
        : codes_(codes), rows_(rows), row_bytes_(row_bytes) {
        std::fill(std::begin(heads_), std::end(heads_), nowhere);
    }

    // The nearest row before `row` that equals it, or nowhere; and puts it into its chain.
    uint32_t find_and_add(size_t row) {
        uint32_t& head = heads_[hash_row(codes_ + row * row_bytes_, row_bytes_)];
        uint32_t found = head;
        while (found != nowhere && row - found <= lz_window && !equal(row, found))
            found = before_[found];
        before_[row] = head;
        head = static_cast<uint32_t>(row);
        return found != nowhere && row - found <= lz_window ? found : nowhere;
    }

    size_t run(size_t row, size_t found) const {
        size_t length = 1;
        while (length < lz_longest && row + length < rows_ && equal(row + length, found + length))
            ++length;
        return length;
    }

  private:
    bool equal(size_t a, size_t b) const {
        return !std::memcmp(codes_ + a * row_bytes_, codes_ + b * row_bytes_, row_bytes_);
    }

    const uint8_t* codes_;
    size_t rows_, row_bytes_;
    uint32_t heads_[size_t{1} << hash_bits];
    uint32_t before_[lz_block_rows];
};

// Kept between calls: fresh memory costs more to touch than the rows to find.
struct Parsed {
    std::vector<uint8_t> flags;     // one byte per item
    std::vector<uint8_t> tokens;    // two bytes each
    std::vector<uint8_t> literals;  // rows of codes
};

void parse(const uint8_t* codes, size_t rows, size_t row_bytes, Parsed& parsed) {
    parsed.flags.clear(), parsed.tokens.clear(), parsed.literals.clear();
    for (size_t first = 0; first < rows; first += lz_block_rows) {
        const uint8_t* const from = codes + first * row_bytes;
        const size_t count = std::min(lz_block_rows, rows - first);
        Block block(from, count, row_bytes);
        for (size_t row = 0; row < count;) {
            const uint32_t found = block.find_and_add(row);
            parsed.flags.push_back(found != nowhere);
            if (found == nowhere) {
                const uint8_t* const literal = from + row++ * row_bytes;
                parsed.literals.insert(parsed.literals.end(), literal, literal + row_bytes);
                continue;
            }
            const size_t length = block.run(row, found);
            parsed.tokens.push_back(static_cast<uint8_t>(row - found));
            parsed.tokens.push_back(static_cast<uint8_t>(length));
            for (const size_t end = row + length; ++row < end;) block.find_and_add(row);
        }
    }
}

size_t packed_bytes(size_t codes, unsigned bits) {
    return (codes * bits + 7) / 8;
}

// Where a payload's parts begin; `holds` is false where they are not its size.
struct Parts {
    size_t items = 0, tokens = 0, literals = 0;
    const uint8_t *flags = nullptr, *token = nullptr, *literal = nullptr;
    bool holds = false;
};

Parts find_parts(const uint8_t* in, size_t bytes, size_t rows, size_t row_codes, unsigned bits) {
    Parts parts;
    uint32_t items;
    if (bytes < 4) return parts;
    std::memcpy(&items, in, 4);
    const size_t flag_bytes = (size_t{items} + 7) / 8;
    if (items > rows || flag_bytes > bytes - 4) return parts;
    parts.items = items;
    parts.flags = in + 4;
    for (size_t at = 0; at < flag_bytes * 8; ++at)
        if (parts.flags[at / 8] >> at % 8 & 1) {
            if (at >= items) return parts;
            ++parts.tokens;
        }
    parts.literals = items - parts.tokens;
    parts.token = parts.flags + flag_bytes;
    parts.literal = parts.token + 2 * parts.tokens;
    const size_t packed = packed_bytes(parts.literals * row_codes, bits);
    parts.holds = 4 + flag_bytes + 2 * parts.tokens + packed == bytes;
    return parts;
}

}  // namespace

size_t vector_lz_encode(const uint8_t* codes, size_t rows, size_t row_bytes, size_t code_bytes,
                        unsigned bits, size_t below, uint8_t* out) {
    static thread_local Parsed parsed;
    parse(codes, rows, row_bytes, parsed);
    const size_t items = parsed.flags.size(), flag_bytes = (items + 7) / 8;
    const size_t literals = parsed.literals.size() / code_bytes;
    const size_t bytes = 4 + flag_bytes + parsed.tokens.size() + packed_bytes(literals, bits);
    if (bytes >= below) return 0;
    const auto count = static_cast<uint32_t>(items);
    std::memcpy(out, &count, 4);
    std::memset(out + 4, 0, flag_bytes);
    for (size_t at = 0; at < items; ++at)
        out[4 + at / 8] = uint8_t(out[4 + at / 8] | parsed.flags[at] << at % 8);
    if (!parsed.tokens.empty())
        std::memcpy(out + 4 + flag_bytes, parsed.tokens.data(), parsed.tokens.size());
    kernels().pack_codes(parsed.literals.data(), literals, bits,
                         out + 4 + flag_bytes + parsed.tokens.size());
    return bytes;
}

bool vector_lz_decode(const uint8_t* in, size_t bytes, size_t rows, size_t row_bytes,
                      size_t code_bytes, unsigned bits, uint8_t* codes) {
    const size_t row_codes = row_bytes / code_bytes;
    const Parts parts = find_parts(in, bytes, rows, row_codes, bits);
    if (!parts.holds) return false;
    static thread_local std::vector<uint8_t> literals;
    if (literals.size() < parts.literals * row_bytes) literals.resize(parts.literals * row_bytes);
    kernels().unpack_codes(parts.literal, parts.literals * row_codes, bits, literals.data());
    const uint8_t *literal = literals.data(), *token = parts.token;
    size_t row = 0;
    for (size_t item = 0; item < parts.items; ++item) {
        if (row >= rows) return false;
        const size_t in_block = row % lz_block_rows;
        if (!(parts.flags[item / 8] >> item % 8 & 1)) {
            std::memcpy(codes + row++ * row_bytes, literal, row_bytes);
            literal += row_bytes;
            continue;
        }
        const size_t back = token[0], length = token[1];
        token += 2;
        if (!back || !length || back > in_block || length > lz_block_rows - in_block ||
            length > rows - row)
            return false;
        for (const size_t end = row + length; row < end; ++row)  // it may run into its own rows
            std::memcpy(codes + row * row_bytes, codes + (row - back) * row_bytes, row_bytes);
    }
    return row == rows;
}

}  // namespace planaria
