// Deflate (RFC 1951), decoded so that it can stop anywhere and be taken up at any block.
//
// zlib can do this too, but not as Python's standard library offers it, and nothing else is there
// on every machine that this is built on. The decoder holds no input and no text: the caller
// passes the bit to go on from, and an array that begins with up to 32 KB of the text before. Those
// two are all that decoding depends on between two blocks, so they are what a mark in a file keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace planaria {

// A canonical Huffman code. Most codes are short and found by one look into a table that fits the
// first-level cache; longer ones are walked bit by bit.
class HuffmanCode {
  public:
    static constexpr unsigned max_length = 15;

    // lengths[symbol] in bits, 0 for symbols that do not occur. False unless they are a code that
    // zlib would take: complete or, except if `whole`, of one symbol or none.
    bool build(const uint8_t* lengths, size_t symbols, bool whole);

    // symbol << 4 | length of the code that `bits` begins with, its first bit lowest; 0 if none.
    unsigned find(uint64_t bits) const {
        const unsigned entry = short_codes_[bits & ((1u << short_bits) - 1)];
        return entry ? entry : walk(bits);
    }

  private:
    static constexpr unsigned short_bits = 10;

    unsigned walk(uint64_t bits) const;

    uint16_t short_codes_[1 << short_bits];  // as `find` gives them
    uint16_t counts_[max_length + 1];        // codes by length
    uint16_t symbols_[288];                  // in the order of their codes
};

// Where the decoder has come to: bits of the input, bytes of the array that text is written to.
struct InflatePosition {
    uint64_t bit;
    size_t at;
};

class Inflater {
  public:
    enum Stop { needs_input, needs_room, at_block, at_end, damaged };

    // Goes on from `position` and moves it. The first `limit` bits of `in` are there, and 8 bytes
    // behind them may be looked at; text goes to out[position.at ..] and copies from before it.
    // With fewer than 258 bytes of `size` left it may stop for room. From out[pause_from] on it
    // stops before the next block. A stop for input leaves the position before what was cut off.
    Stop run(const uint8_t* in, uint64_t limit, uint8_t* out, size_t size, size_t pause_from,
             InflatePosition& position);

  private:
    enum class Stage { header, stored, coded, end };

    Stop read_header(const uint8_t* in, uint64_t limit, uint64_t& bit);
    Stop read_codes(const uint8_t* in, uint64_t limit, uint64_t& bit);
    Stop copy_stored(const uint8_t* in, uint64_t limit, uint8_t* out, size_t size,
                     InflatePosition& position);
    Stop decode(const uint8_t* in, uint64_t limit, uint8_t* out, size_t size,
                InflatePosition& position);
    void end_block() { stage_ = last_ ? Stage::end : Stage::header; }

    Stage stage_ = Stage::header;
    bool last_ = false;
    size_t stored_left_ = 0;
    HuffmanCode literals_, distances_;
};

}  // namespace planaria
