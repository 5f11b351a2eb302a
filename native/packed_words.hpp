// Words that are mostly short, in fewer bytes and without loss, for the SIMD level that includes
// this file: changes of records (old XOR new of floats), and record numbers.
//
// Words are taken sixteen at a time, a block. Of a block the length of its longest word is told, in
// bits. Then either every word has that many bits; or every word has a class, which says by how
// many bits it is shorter, and those of its bits that follow its first one. The highest class is
// for all that are shorter still, which have all bits that such a word can have.
//
//   [checksum: 4] [a byte for each block: longest * 4 + kind] [classes] [bits] [zeros: 8]
//
// A block's classes take 2, 3 or 4 bits each, as its kind says, or none; whichever is least. The
// zeros are there so that eight bytes can be read wherever a word begins. Numbers have no blocks:
//
//   [checksum: 4] [lowest: 8] [width: 1] [number - lowest, in `width` bits each] [zeros: 8]
//
// A width is 1 at least. So neither kind of frame unpacks to more than 64 times its size, and how
// much memory a frame can claim is known before it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "crc.hpp"
#include "kernels.hpp"

namespace planaria {
namespace {

constexpr unsigned class_bits[4] = {0, 2, 3, 4};
constexpr size_t checksum_bytes = 4, numbers_header_bytes = 13, zeros_bytes = 8;
constexpr unsigned widest_number = 56;  // with seven bits before it, it is within eight bytes

inline int32_t length_of(uint32_t word) {
    return word ? 32 - __builtin_clz(word) : 0;
}

// The bits that a word of a class takes behind it.
inline int32_t bits_of(int32_t longest, int32_t length, int32_t rest) {
    const int32_t follow = length - (length > 0);
    return longest - length < rest ? follow : longest - rest;
}

class BitWriter {
  public:
    explicit BitWriter(uint8_t* out) : at_(out) {}

    // value has no bit above `bits`, which are widest_number at most.
    void put(uint64_t value, unsigned bits) {
        held_ |= value << count_;
        count_ += bits;
        std::memcpy(at_, &held_, 8);
        at_ += count_ / 8;
        held_ >>= count_ & ~7u;
        count_ %= 8;
    }

    // Behind the last byte.
    uint8_t* end() {
        at_ += count_ > 0;
        std::memset(at_, 0, zeros_bytes);
        return at_ + zeros_bytes;
    }

  private:
    uint8_t* at_;
    uint64_t held_ = 0;
    unsigned count_ = 0;
};

inline uint64_t eight_at(const uint8_t* bits, size_t position) {
    uint64_t found;
    std::memcpy(&found, bits + position / 8, 8);
    return found >> position % 8;
}

inline uint64_t lowest_bits(uint64_t value, unsigned bits) {
    return value & ((uint64_t{1} << bits) - 1);
}

// Of a frame, and of how many words or numbers it has.
uint32_t checksum_of(const uint8_t* frame, const uint8_t* end, uint64_t count) {
    uint8_t told[8];
    std::memcpy(told, &count, 8);
    return crc32(crc32(0, told, 8), frame + checksum_bytes,
                 static_cast<size_t>(end - frame) - checksum_bytes);
}

size_t seal(uint8_t* frame, const uint8_t* end, uint64_t count) {
    const uint32_t checksum = checksum_of(frame, end, count);
    std::memcpy(frame, &checksum, checksum_bytes);
    return static_cast<size_t>(end - frame);
}

bool is_sealed(const uint8_t* frame, size_t size, uint64_t count) {
    uint32_t checksum;
    std::memcpy(&checksum, frame, checksum_bytes);
    return checksum == checksum_of(frame, frame + size, count);
}

// ------------------------------------------------------------------------- words

struct Block {
    int32_t longest, kind;
};

// The kind that takes the fewest bits; of equals the first.
inline Block choose(const int32_t* lengths, size_t count) {
    int32_t longest = 0;
    for (size_t i = 0; i < count; ++i) longest = lengths[i] > longest ? lengths[i] : longest;
    int32_t least = longest * static_cast<int32_t>(count), best = 0;
    for (int32_t kind = 1; kind < 4; ++kind) {
        const int32_t width = static_cast<int32_t>(class_bits[kind]), rest = (1 << width) - 1;
        int32_t bits = width * static_cast<int32_t>(block_words);
        for (size_t i = 0; i < count; ++i) bits += bits_of(longest, lengths[i], rest);
        if (bits < least) least = bits, best = kind;
    }
    return {longest, best};
}

inline size_t lengths_of(const uint32_t* words, size_t at, size_t count, int32_t* lengths) {
    const size_t n = count - at < block_words ? count - at : block_words;
    for (size_t i = 0; i < n; ++i) lengths[i] = length_of(words[at + i]);
    return n;
}

// Into a frame with room for packed_words_bound bytes; its size. No block takes more bits than its
// words have, because that would be kind 0.
size_t pack_words(const uint32_t* words, size_t count, uint8_t* frame) {
    int32_t lengths[block_words];
    uint8_t* const kinds = frame + checksum_bytes;
    uint8_t* classes = kinds + blocks_of(count);
    size_t class_bytes = 0;
    for (size_t at = 0; at < count; at += block_words) {
        const size_t n = lengths_of(words, at, count, lengths);
        const Block block = choose(lengths, n);
        kinds[at / block_words] = static_cast<uint8_t>(block.longest * 4 + block.kind);
        class_bytes += 2 * class_bits[block.kind];
    }
    BitWriter bits(classes + class_bytes);
    for (size_t at = 0; at < count; at += block_words) {
        const int32_t longest = kinds[at / block_words] >> 2;
        const unsigned width = class_bits[kinds[at / block_words] & 3];
        if (width == 0) {
            const size_t n = count - at < block_words ? count - at : block_words;
            for (size_t i = 0; i < n; ++i) bits.put(words[at + i], static_cast<unsigned>(longest));
            continue;
        }
        const size_t n = lengths_of(words, at, count, lengths);
        const int32_t rest = (1 << width) - 1;
        uint64_t told = 0;
        for (size_t i = 0; i < n; ++i) {
            const int32_t shorter = longest - lengths[i];
            const auto follow = static_cast<unsigned>(bits_of(longest, lengths[i], rest));
            told |= static_cast<uint64_t>(shorter < rest ? shorter : rest) << (i * width);
            bits.put(lowest_bits(words[at + i], follow), follow);
        }
        std::memcpy(classes, &told, 2 * width);
        classes += 2 * width;
    }
    return seal(frame, bits.end(), count);
}

// Whether the frame is one of just so many words; if not, anything is in `words`.
bool unpack_words(const uint8_t* frame, size_t size, uint32_t* words, size_t count) {
    const size_t blocks = blocks_of(count);
    if (size < checksum_bytes + blocks + zeros_bytes || !is_sealed(frame, size, count))
        return false;
    const uint8_t* const kinds = frame + checksum_bytes;
    size_t class_bytes = 0;
    for (size_t b = 0; b < blocks; ++b) {
        if (kinds[b] > 32 * 4 + 3) return false;
        class_bytes += 2 * class_bits[kinds[b] & 3];
    }
    const size_t before = checksum_bytes + blocks + class_bytes + zeros_bytes;
    if (size < before) return false;
    const uint8_t* classes = kinds + blocks;
    const uint8_t* const bits = classes + class_bytes;
    const uint64_t room = static_cast<uint64_t>(size - before) * 8;
    uint64_t position = 0;
    for (size_t at = 0; at < count; at += block_words) {
        const int32_t longest = kinds[at / block_words] >> 2;
        const unsigned width = class_bits[kinds[at / block_words] & 3];
        const size_t n = count - at < block_words ? count - at : block_words;
        if (width == 0) {
            if (position + n * static_cast<uint64_t>(longest) > room) return false;
            for (size_t i = 0; i < n; ++i, position += static_cast<unsigned>(longest))
                words[at + i] = static_cast<uint32_t>(
                    lowest_bits(eight_at(bits, position), static_cast<unsigned>(longest)));
            continue;
        }
        uint64_t told = 0;
        std::memcpy(&told, classes, 2 * width);
        classes += 2 * width;
        const int32_t rest = (1 << width) - 1;
        int32_t follow[block_words], sum = 0, wrong = 0;
        uint32_t first[block_words];
        for (size_t i = 0; i < n; ++i) {
            const auto shorter = static_cast<int32_t>(told >> (i * width)) & rest;
            const int32_t length = longest - shorter;
            wrong |= length;  // negative: shorter than nothing
            follow[i] = shorter == rest ? length : length - (length > 0);
            first[i] = shorter == rest || length <= 0 ? 0 : 1u << (length - 1);
            sum += follow[i];
        }
        if (wrong < 0 || position + static_cast<uint64_t>(sum) > room) return false;
        for (size_t i = 0; i < n; ++i) {
            const auto bits_here = static_cast<unsigned>(follow[i]);
            words[at + i] =
                first[i] | static_cast<uint32_t>(lowest_bits(eight_at(bits, position), bits_here));
            position += bits_here;
        }
    }
    return (position + 7) / 8 * 8 == room;
}

// ------------------------------------------------------------------------- numbers

// Into a frame with room for packed_numbers_bound bytes; its size, or 0 where they lie too far
// apart.
size_t pack_numbers(const int64_t* numbers, size_t count, uint8_t* frame) {
    int64_t lowest = count ? numbers[0] : 0, highest = lowest;
    for (size_t i = 0; i < count; ++i) {
        lowest = numbers[i] < lowest ? numbers[i] : lowest;
        highest = numbers[i] > highest ? numbers[i] : highest;
    }
    const auto base = static_cast<uint64_t>(lowest);
    const uint64_t span = static_cast<uint64_t>(highest) - base;
    const unsigned width = 64 - static_cast<unsigned>(__builtin_clzll(span | 1));
    if (width > widest_number) return 0;
    std::memcpy(frame + checksum_bytes, &base, 8);
    frame[checksum_bytes + 8] = static_cast<uint8_t>(width);
    BitWriter bits(frame + numbers_header_bytes);
    for (size_t i = 0; i < count; ++i) bits.put(static_cast<uint64_t>(numbers[i]) - base, width);
    return seal(frame, bits.end(), count);
}

bool unpack_numbers(const uint8_t* frame, size_t size, int64_t* numbers, size_t count) {
    if (size < numbers_header_bytes + zeros_bytes || !is_sealed(frame, size, count)) return false;
    uint64_t base;
    std::memcpy(&base, frame + checksum_bytes, 8);
    const unsigned width = frame[checksum_bytes + 8];
    const size_t room = size - numbers_header_bytes - zeros_bytes;
    if (width < 1 || width > widest_number ||
        (static_cast<uint64_t>(count) * width + 7) / 8 != room)
        return false;
    const uint8_t* const bits = frame + numbers_header_bytes;
    for (size_t i = 0; i < count; ++i)
        numbers[i] = static_cast<int64_t>(base + lowest_bits(eight_at(bits, i * width), width));
    return true;
}

}  // namespace
}  // namespace planaria
