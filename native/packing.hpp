// Codes packed to the bits that they need, for the SIMD level that includes this file.
//
// Eight codes of `bits` bits fill `bits` bytes, code 0 lowest; the last codes are padded to a byte.
// Codes of up to eight bits are a byte each before, others two bytes.
#pragma once

#include "quantise.hpp"

namespace planaria {
namespace {

// Moves the two halves of every lane, each with `keep` bits in use, together; and back.
template <unsigned lane, unsigned keep>
inline uint64_t join_halves(uint64_t word) {
    constexpr uint64_t low = each_lane(lane, keep);
    return (word & low) | (word & low << lane / 2) >> (lane / 2 - keep);
}

template <unsigned lane, unsigned keep>
inline uint64_t part_halves(uint64_t word) {
    constexpr uint64_t low = each_lane(lane, keep);
    return (word & low) | (word & low << keep) << (lane / 2 - keep);
}

// A word is eight codes of a byte or four of two bytes; packed, it takes word_bits.
template <unsigned bits>
constexpr unsigned word_bits = bits <= 8 ? 8 * bits : 4 * bits;

template <unsigned bits>
inline uint64_t pack_word(uint64_t word) {
    if constexpr (bits <= 8) {
        word = join_halves<16, bits>(word);
        return join_halves<64, 4 * bits>(join_halves<32, 2 * bits>(word));
    } else {
        return join_halves<64, 2 * bits>(join_halves<32, bits>(word));
    }
}

template <unsigned bits>
inline uint64_t unpack_word(uint64_t word) {
    if constexpr (bits <= 8) {
        word = part_halves<32, 2 * bits>(part_halves<64, 4 * bits>(word));
        return part_halves<16, bits>(word);
    } else {
        return part_halves<32, bits>(part_halves<64, 2 * bits>(word));
    }
}

// One group of eight codes. Whole words are written and read, though only `bits` bytes count.
template <unsigned bits>
inline void pack_group(const uint8_t* codes, uint8_t* out) {
    uint64_t words[2];
    if constexpr (bits <= 8) {
        std::memcpy(words, codes, 8);
        words[0] = pack_word<bits>(words[0]);
        std::memcpy(out, words, 8);
    } else {
        std::memcpy(words, codes, 16);
        const uint64_t low = pack_word<bits>(words[0]), high = pack_word<bits>(words[1]);
        constexpr unsigned used = word_bits<bits>;
        words[0] = used == 64 ? low : low | high << used % 64;
        words[1] = used == 64 ? high : high >> (64 - used) % 64;
        std::memcpy(out, words, 16);
    }
}

template <unsigned bits>
inline void unpack_group(const uint8_t* packed, uint8_t* codes) {
    uint64_t words[2];
    if constexpr (bits <= 8) {
        std::memcpy(words, packed, 8);
        words[0] = unpack_word<bits>(words[0]);
        std::memcpy(codes, words, 8);
    } else {
        std::memcpy(words, packed, 16);
        constexpr unsigned used = word_bits<bits>;
        const uint64_t high =
            used == 64 ? words[1] : words[0] >> used % 64 | words[1] << (64 - used) % 64;
        words[0] = unpack_word<bits>(words[0]);
        words[1] = unpack_word<bits>(high);
        std::memcpy(codes, words, 16);
    }
}

template <unsigned bits>
constexpr size_t group_bytes = bits <= 8 ? 8 : 16;  // of eight codes, and of what is read at once

template <unsigned bits>
void pack_all(const uint8_t* codes, size_t count, uint8_t* out) {
    constexpr size_t step = group_bytes<bits>, code_bytes = step / 8;
    size_t at = 0;
    for (; at + 8 <= count; at += 8, codes += step, out += bits) pack_group<bits>(codes, out);
    if (at < count) {
        uint8_t padded[step] = {}, packed[step];
        std::memcpy(padded, codes, (count - at) * code_bytes);
        pack_group<bits>(padded, packed);
        std::memcpy(out, packed, ((count - at) * bits + 7) / 8);
    }
}

template <unsigned bits>
void unpack_all(const uint8_t* packed, size_t count, uint8_t* codes) {
    constexpr size_t step = group_bytes<bits>, code_bytes = step / 8;
    const uint8_t* const end = packed + (count * bits + 7) / 8;
    size_t at = 0;
    for (; at + 8 <= count && static_cast<size_t>(end - packed) >= step;
         at += 8, codes += step, packed += bits)
        unpack_group<bits>(packed, codes);
    for (; at < count; at += 8, codes += step, packed += bits) {
        const size_t left = count - at < 8 ? count - at : 8;
        uint8_t padded[step] = {}, found[step];
        std::memcpy(padded, packed, (left * bits + 7) / 8);
        unpack_group<bits>(padded, found);
        std::memcpy(codes, found, left * code_bytes);
    }
}

// Calls work(Fixed<wanted>()) for 1 to 16 bits; 0 bits take no bytes.
template <unsigned bits = 1, class Work>
inline void with_bits(unsigned wanted, Work work) {
    if constexpr (bits <= 16) {
        if (wanted == bits)
            work(Fixed<bits>());
        else
            with_bits<bits + 1>(wanted, work);
    }
}

void pack_codes(const uint8_t* codes, size_t count, unsigned bits, uint8_t* out) {
    with_bits(bits, [&](auto fixed) { pack_all<decltype(fixed){}>(codes, count, out); });
}

void unpack_codes(const uint8_t* packed, size_t count, unsigned bits, uint8_t* codes) {
    if (!bits) std::memset(codes, 0, count);
    with_bits(bits, [&](auto fixed) { unpack_all<decltype(fixed){}>(packed, count, codes); });
}

}  // namespace
}  // namespace planaria
