#include "inflate.hpp"

#include <algorithm>
#include <iterator>

namespace planaria {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bits are taken from little-endian words");

// Whatever is read for one symbol, 48 bits at most, is in one such word of at least 57.
inline uint64_t bits_from(const uint8_t* in, uint64_t bit) {
    uint64_t word;
    std::memcpy(&word, in + (bit >> 3), 8);
    return word >> (bit & 7);
}

inline uint64_t low(uint64_t bits, unsigned count) {
    return bits & ((uint64_t{1} << count) - 1);
}

// Bits behind `limit` are not there yet, and may have made what is there look wrong.
inline Inflater::Stop refuse(uint64_t last_bit_seen, uint64_t limit) {
    return last_bit_seen > limit ? Inflater::needs_input : Inflater::damaged;
}

constexpr uint16_t length_base[29] = {3,  4,  5,  6,   7,   8,   9,   10,  11, 13,
                                      15, 17, 19, 23,  27,  31,  35,  43,  51, 59,
                                      67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr uint8_t length_extra[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                      2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr uint16_t distance_base[30] = {
    1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
    193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr uint8_t distance_extra[30] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                        6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
constexpr size_t longest_match = 258;

}  // namespace

bool HuffmanCode::build(const uint8_t* lengths, size_t symbols, bool whole) {
    std::fill(std::begin(counts_), std::end(counts_), 0);
    for (size_t s = 0; s < symbols; ++s) ++counts_[lengths[s]];
    counts_[0] = 0;
    int left = 1;  // codes of this length that are still free
    unsigned longest = 0;
    uint16_t next_index[max_length + 2] = {}, next_code[max_length + 2] = {};
    for (unsigned length = 1; length <= max_length; ++length) {
        left = 2 * left - counts_[length];
        if (left < 0) return false;
        if (counts_[length]) longest = length;
        next_index[length + 1] = static_cast<uint16_t>(next_index[length] + counts_[length]);
        next_code[length + 1] = static_cast<uint16_t>((next_code[length] + counts_[length]) << 1);
    }
    if (left > 0 && longest > (whole ? 0 : 1)) return false;
    std::fill(std::begin(short_codes_), std::end(short_codes_), 0);
    for (size_t s = 0; s < symbols; ++s) {
        const unsigned length = lengths[s];
        if (!length) continue;
        symbols_[next_index[length]++] = static_cast<uint16_t>(s);
        const unsigned code = next_code[length]++;
        if (length > short_bits) continue;
        unsigned reversed = 0;  // a code's first bit is its highest, but comes lowest
        for (unsigned b = 0; b < length; ++b) reversed |= (code >> b & 1) << (length - 1 - b);
        for (unsigned i = reversed; i < 1u << short_bits; i += 1u << length)
            short_codes_[i] = static_cast<uint16_t>(s << 4 | length);
    }
    return true;
}

unsigned HuffmanCode::walk(uint64_t bits) const {
    unsigned code = 0, first = 0, index = 0;
    for (unsigned length = 1; length <= max_length; ++length, bits >>= 1) {
        code = code << 1 | static_cast<unsigned>(bits & 1);
        first <<= 1;
        if (code < first + counts_[length])
            return static_cast<unsigned>(symbols_[index + code - first]) << 4 | length;
        index += counts_[length];
        first += counts_[length];
    }
    return 0;
}

Inflater::Stop Inflater::run(const uint8_t* in, uint64_t limit, uint8_t* out, size_t size,
                             size_t pause_from, InflatePosition& position) {
    for (;;) {
        Stop stop = at_block;  // here: nothing to stop for
        if (stage_ == Stage::end) return at_end;
        if (stage_ == Stage::stored) {
            stop = copy_stored(in, limit, out, size, position);
        } else if (stage_ == Stage::coded) {
            stop = decode(in, limit, out, size, position);
        } else if (position.at >= pause_from) {
            return at_block;
        } else {
            stop = read_header(in, limit, position.bit);
        }
        if (stop != at_block) return stop;
    }
}

// Changes nothing unless all of the header is there.
Inflater::Stop Inflater::read_header(const uint8_t* in, uint64_t limit, uint64_t& bit) {
    const uint64_t bits = bits_from(in, bit);
    uint64_t next = bit + 3;
    if (next > limit) return needs_input;
    const unsigned kind = static_cast<unsigned>(bits >> 1 & 3);
    if (kind == 0) {
        next = (next + 7) & ~uint64_t{7};
        if (next + 32 > limit) return needs_input;
        const uint64_t sizes = bits_from(in, next);
        if ((sizes & 0xffff) != (~sizes >> 16 & 0xffff)) return damaged;
        stored_left_ = sizes & 0xffff;
        next += 32;
        stage_ = Stage::stored;
    } else if (kind == 1) {
        uint8_t lengths[288];
        for (unsigned s = 0; s < 288; ++s) lengths[s] = s < 144 ? 8 : s < 256 ? 9 : s < 280 ? 7 : 8;
        literals_.build(lengths, 288, true);
        std::fill(lengths, lengths + 32, uint8_t{5});
        distances_.build(lengths, 32, true);
        stage_ = Stage::coded;
    } else if (kind == 2) {
        const Stop stop = read_codes(in, limit, next);
        if (stop != at_block) return stop;
        stage_ = Stage::coded;
    } else {
        return damaged;
    }
    last_ = bits & 1;
    bit = next;
    return at_block;
}

Inflater::Stop Inflater::read_codes(const uint8_t* in, uint64_t limit, uint64_t& bit) {
    constexpr uint8_t order[19] = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                   11, 4,  12, 3, 13, 2, 14, 1, 15};
    uint64_t bits = bits_from(in, bit);
    const size_t literals = 257 + low(bits, 5), distances = 1 + low(bits >> 5, 5);
    const size_t ordered = 4 + low(bits >> 10, 4);
    bit += 14;
    if (bit + 3 * ordered > limit) return needs_input;
    if (literals > 286 || distances > 30) return damaged;
    uint8_t lengths[286 + 30] = {};
    for (size_t i = 0; i < ordered; ++i, bit += 3)
        lengths[order[i]] = static_cast<uint8_t>(low(bits_from(in, bit), 3));
    HuffmanCode code_lengths;
    if (!code_lengths.build(lengths, 19, true)) return damaged;
    const size_t total = literals + distances;
    for (size_t n = 0; n < total;) {
        if (bit > limit) return needs_input;
        bits = bits_from(in, bit);
        const unsigned found = code_lengths.find(bits);
        if (!found) return refuse(bit + 7, limit);
        const unsigned symbol = found >> 4;
        bits >>= found & 15;
        bit += found & 15;
        if (symbol < 16) {
            lengths[n++] = static_cast<uint8_t>(symbol);
            continue;
        }
        // 16 repeats the length before, 17 and 18 are runs of zeros.
        const unsigned extra = symbol == 16 ? 2 : symbol == 17 ? 3 : 7;
        const size_t times = (symbol == 18 ? 11 : 3) + low(bits, extra);
        bit += extra;
        if ((symbol == 16 && n == 0) || times > total - n) return refuse(bit, limit);
        std::fill_n(lengths + n, times, symbol == 16 ? lengths[n - 1] : uint8_t{0});
        n += times;
    }
    if (bit > limit) return needs_input;
    const bool right = lengths[256] && literals_.build(lengths, literals, false) &&
                       distances_.build(lengths + literals, distances, false);
    return right ? at_block : damaged;
}

Inflater::Stop Inflater::copy_stored(const uint8_t* in, uint64_t limit, uint8_t* out, size_t size,
                                     InflatePosition& position) {
    const size_t there = (limit - position.bit) / 8;
    const size_t count = std::min({stored_left_, there, size - position.at});
    std::memcpy(out + position.at, in + position.bit / 8, count);
    position.at += count;
    position.bit += 8 * count;
    stored_left_ -= count;
    if (!stored_left_) {
        end_block();
        return at_block;
    }
    return position.at == size ? needs_room : needs_input;
}

Inflater::Stop Inflater::decode(const uint8_t* in, uint64_t limit, uint8_t* out, size_t size,
                                InflatePosition& position) {
    size_t at = position.at;
    uint64_t bit = position.bit;
    const auto stop = [&](Stop why) {
        position = {bit, at};
        return why;
    };
    for (;;) {
        if (size - at < longest_match) return stop(needs_room);
        uint64_t bits = bits_from(in, bit);
        unsigned found = literals_.find(bits);
        if (!found) return stop(refuse(bit + HuffmanCode::max_length, limit));
        uint64_t next = bit + (found & 15);
        if (next > limit) return stop(needs_input);
        unsigned symbol = found >> 4;
        if (symbol < 256) {
            out[at++] = static_cast<uint8_t>(symbol);
            bit = next;
            continue;
        }
        if (symbol == 256) {
            bit = next;
            end_block();
            return stop(at_block);
        }
        symbol -= 257;
        if (symbol >= 29) return stop(damaged);
        bits >>= found & 15;
        const size_t length = length_base[symbol] + low(bits, length_extra[symbol]);
        bits >>= length_extra[symbol];
        next += length_extra[symbol];
        found = distances_.find(bits);
        if (!found) return stop(refuse(next + HuffmanCode::max_length, limit));
        symbol = found >> 4;
        bits >>= found & 15;
        next += found & 15;
        if (symbol >= 30) return stop(refuse(next, limit));
        const size_t distance = distance_base[symbol] + low(bits, distance_extra[symbol]);
        next += distance_extra[symbol];
        if (next > limit) return stop(needs_input);
        if (distance > at) return stop(damaged);
        uint8_t* to = out + at;
        if (distance >= length) {
            std::memcpy(to, to - distance, length);
        } else {  // what is copied is part of what it is copied from
            for (size_t i = 0; i < length; ++i) to[i] = to[i - distance];
        }
        at += length;
        bit = next;
    }
}

}  // namespace planaria
