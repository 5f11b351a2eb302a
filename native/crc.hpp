// CRC-32 as in zlib, for the SIMD level that includes this file.
//
// In this CRC the first bit of a message is the highest power of x, and bit 0 of a byte comes
// first. A carry-less multiplication takes 128 bits at once past the 512 bits behind them: x^n mod
// P instead of x^n changes no remainder. What is left in the end is 128 bits with the remainder of
// the whole message, and the tables make a checksum of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__PCLMUL__)
#include <immintrin.h>
#endif

namespace planaria {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are taken in as little-endian");

constexpr uint32_t crc_times_x(uint32_t value) {
    return value >> 1 ^ (value & 1 ? 0xedb88320u : 0u);
}

// of[n][byte]: what a byte adds to the checksum when n more bytes follow it.
struct CrcTables {
    uint32_t of[8][256];
};

constexpr CrcTables make_crc_tables() {
    CrcTables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int n = 0; n < 8; ++n) {
            for (int bit = 0; bit < 8; ++bit) value = crc_times_x(value);
            tables.of[n][byte] = value;
        }
    }
    return tables;
}

constexpr CrcTables crc_tables = make_crc_tables();

uint32_t crc_by_tables(uint32_t crc, const uint8_t* bytes, size_t count) {
    const auto& of = crc_tables.of;
    for (; count >= 8; bytes += 8, count -= 8) {
        uint64_t word;
        std::memcpy(&word, bytes, 8);
        word ^= crc;
        crc = of[7][word & 255] ^ of[6][word >> 8 & 255] ^ of[5][word >> 16 & 255] ^
              of[4][word >> 24 & 255] ^ of[3][word >> 32 & 255] ^ of[2][word >> 40 & 255] ^
              of[1][word >> 48 & 255] ^ of[0][word >> 56];
    }
    for (; count; --count) crc = of[0][(crc ^ *bytes++) & 255] ^ crc >> 8;
    return crc;
}

#if defined(__PCLMUL__)

// x^n mod P. The product of two reflected 64-bit numbers lies one bit too low; hence the shift.
constexpr uint64_t crc_power(int n) {
    uint32_t value = 0x80000000u;  // x^0
    for (int i = 0; i < n; ++i) value = crc_times_x(value);
    return static_cast<uint64_t>(value) << 1;
}

// Takes `bits` past what lies so many bits behind it. Its first half has 64 bits more to go than
// its second; 32 of both distances are in the width of the constants.
template <int distance>
__m128i crc_fold(__m128i bits, __m128i behind) {
    const __m128i powers = _mm_set_epi64x(crc_power(distance - 32), crc_power(distance + 32));
    const __m128i first = _mm_clmulepi64_si128(bits, powers, 0x00);
    const __m128i second = _mm_clmulepi64_si128(bits, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), behind);
}

__m128i crc_load(const uint8_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

#endif

// The checksum of more bytes behind those whose checksum is `crc`; 0 if there are none.
uint32_t crc32(uint32_t crc, const uint8_t* bytes, size_t count) {
    crc = ~crc;
#if defined(__PCLMUL__)
    if (count >= 64) {
        __m128i a = _mm_xor_si128(crc_load(bytes), _mm_cvtsi32_si128(static_cast<int>(crc)));
        __m128i b = crc_load(bytes + 16), c = crc_load(bytes + 32), d = crc_load(bytes + 48);
        for (bytes += 64, count -= 64; count >= 64; bytes += 64, count -= 64) {
            a = crc_fold<512>(a, crc_load(bytes));
            b = crc_fold<512>(b, crc_load(bytes + 16));
            c = crc_fold<512>(c, crc_load(bytes + 32));
            d = crc_fold<512>(d, crc_load(bytes + 48));
        }
        a = crc_fold<128>(crc_fold<128>(crc_fold<128>(a, b), c), d);
        uint8_t left[16];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(left), a);
        crc = crc_by_tables(0, left, sizeof left);
    }
#endif
    return ~crc_by_tables(crc, bytes, count);
}

}  // namespace
}  // namespace planaria
