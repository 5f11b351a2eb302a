// Records in fewer bits, for saves. Each segment of a record has a grid of its own: code c stands
// for low + c * scale. With 8 bits the grid spans the segment's least and greatest value; with
// fewer it is narrowed greedily where that lessens the squared error (Check-N-Run's adaptive
// asymmetric quantisation).
//
// The twin (planaria/kernels/twin_saves.py) repeats every operation. Values are below 2^126 in
// magnitude, which find_unquantisable has held: no difference and no code's value overflows.
#pragma once

#include "optimizers.hpp"

namespace planaria {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "codes are packed in little-endian words");

constexpr float bins = 25.0f;
constexpr int narrowings = 15;  // 25 bins times the ratio 0.6: at least 0.4 of the span remains
constexpr uint32_t unquantisable = 0x7e800000u;  // 2^126; infinities and NaNs are above it
constexpr size_t codes_at_once = 8;              // they fill whole bytes for any number of bits

template <unsigned bits>
constexpr float highest_code = static_cast<float>((1u << bits) - 1);

struct Grid {
    float low, scale, inverse;
};

// The scale is a normal number, so that neither it nor its inverse loses bits; a span of nothing
// makes all codes 0, whatever the scale.
template <unsigned bits>
inline Grid make_grid(float low, float high) {
    const float exact = (high - low) / highest_code<bits>;
    const float scale = exact >= 0x1p-126f ? exact : 0x1p-126f;
    return {low, scale, 1.0f / scale};
}

// Vectors of the compiler: left to itself it computes short rows number by number. They have the
// level's own width, as it compares wider ones number by number, and are passed by reference, as
// how they are passed by value depends on the level.
#ifdef __AVX2__
constexpr size_t at_once = 8;
#else
constexpr size_t at_once = 4;
#endif
typedef float FloatVector __attribute__((vector_size(at_once * 4)));
typedef int32_t CodeVector __attribute__((vector_size(at_once * 4)));

template <unsigned bits>
inline void codes_of(const FloatVector& values, const Grid& grid, CodeVector& codes) {
    const FloatVector lowest{}, highest = lowest + highest_code<bits>;
    FloatVector at = (values - grid.low) * grid.inverse;
    at = at > lowest ? at : lowest;
    at = at < highest ? at : highest;
    codes = __builtin_convertvector(at + 0.5f, CodeVector);
}

inline void values_of(const CodeVector& codes, const Grid& grid, FloatVector& values) {
    values = grid.low + __builtin_convertvector(codes, FloatVector) * grid.scale;
}

struct Span {
    float low, high;
};

template <class Size>
inline Span span_of(const uint32_t* values, Size width) {
    const float first = as_float(values[0]);
    FloatVector low = FloatVector{} + first, high = low, next = low;
    for (size_t d = 0; d < width; d += at_once) {
        const size_t rest = width - d;  // of fewer than a vector, some of the last one stay
        std::memcpy(&next, values + d, rest < at_once ? rest * 4 : sizeof next);
        low = next < low ? next : low;
        high = next > high ? next : high;
    }
    Span span{first, first};
    for (size_t l = 0; l < at_once; ++l) {
        span.low = low[l] < span.low ? low[l] : span.low;
        span.high = high[l] > span.high ? high[l] : span.high;
    }
    // -0.0 becomes 0.0: which of the two zeros is the least depends on the order.
    return {span.low + 0.0f, span.high + 0.0f};
}

template <unsigned bits>
inline void add_errors(LaneSums& sums, const uint32_t* values, const Grid& grid) {
    float errors[lanes];
    for (size_t l = 0; l < lanes; l += at_once) {
        FloatVector given, returned;
        CodeVector codes;
        std::memcpy(&given, values + l, sizeof given);
        codes_of<bits>(given, grid, codes);
        values_of(codes, grid, returned);
        given -= returned;
        std::memcpy(errors + l, &given, sizeof given);
    }
    sums.add_products(errors, errors);
}

// Sum of squared differences between the values and what comes back of them.
template <unsigned bits, class Size>
inline float squared_error(const uint32_t* values, Size width, const Grid& grid) {
    LaneSums sums;
    size_t d = 0;
    for (; d + lanes <= width; d += lanes) add_errors<bits>(sums, values + d, grid);
    if (const size_t rest = width - d) {
        uint32_t padded[lanes];
        for (uint32_t& value : padded) value = as_bits(grid.low);  // comes back without error
        std::memcpy(padded, values + d, rest * 4);
        add_errors<bits>(sums, padded, grid);
    }
    return sums.fold();
}

// The best grid on the greedy path: in each round either end moves in by a bin, whichever leaves
// the smaller error.
template <unsigned bits, class Size>
inline Grid narrowed_grid(const uint32_t* values, Size width, const Span& span) {
    const float bin = (span.high - span.low) / bins;
    Grid best = make_grid<bits>(span.low, span.high);
    float least = squared_error<bits>(values, width, best);
    float raised = 0.0f, lowered = 0.0f;  // bins that the low and the high end have moved
    for (int round = 0; round < narrowings && least > 0.0f; ++round) {
        const float low = span.low + raised * bin, high = span.high - lowered * bin;
        const float next_low = span.low + (raised + 1.0f) * bin;
        const float next_high = span.high - (lowered + 1.0f) * bin;
        const Grid above = make_grid<bits>(next_low, high), below = make_grid<bits>(low, next_high);
        const float above_error = squared_error<bits>(values, width, above);
        const float below_error = squared_error<bits>(values, width, below);
        const bool raise = above_error < below_error;
        const float error = raise ? above_error : below_error;
        raised += raise ? 1.0f : 0.0f;
        lowered += raise ? 0.0f : 1.0f;
        if (error < least) {
            least = error;
            best = raise ? above : below;
        }
    }
    return best;
}

// A word whose every `lane` bits hold the `count` lowest bits set.
constexpr uint64_t each_lane(unsigned lane, unsigned count) {
    uint64_t word = 0;
    for (unsigned at = 0; at < 64; at += lane) word |= ((uint64_t{1} << count) - 1) << at;
    return word;
}

// Eight codes, a byte each, into 8 * bits bits, code 0 lowest, and back: neighbours are moved
// together in pairs, then pairs of pairs, then halves.
template <unsigned bits>
inline uint64_t squeeze(uint64_t codes) {
    if constexpr (bits == 8) return codes;
    codes = (codes | codes >> (8 - bits)) & each_lane(16, 2 * bits);
    codes = (codes | codes >> (16 - 2 * bits)) & each_lane(32, 4 * bits);
    return (codes | codes >> (32 - 4 * bits)) & each_lane(64, 8 * bits);
}

template <unsigned bits>
inline uint64_t spread(uint64_t packed) {
    if constexpr (bits == 8) return packed;
    packed = (packed | packed << (32 - 4 * bits)) & each_lane(32, 4 * bits);
    packed = (packed | packed << (16 - 2 * bits)) & each_lane(16, 2 * bits);
    return (packed | packed << (8 - bits)) & each_lane(8, bits);
}

// Eight values to `bytes` bytes, and back.
template <unsigned bits>
inline void pack_eight(const uint32_t* values, const Grid& grid, uint8_t* out, size_t bytes) {
    int32_t wide[codes_at_once];
    for (size_t l = 0; l < codes_at_once; l += at_once) {
        FloatVector given;
        CodeVector codes;
        std::memcpy(&given, values + l, sizeof given);
        codes_of<bits>(given, grid, codes);
        std::memcpy(wide + l, &codes, sizeof codes);
    }
    uint8_t narrow[codes_at_once];
    for (size_t l = 0; l < codes_at_once; ++l) narrow[l] = static_cast<uint8_t>(wide[l]);
    uint64_t word;
    std::memcpy(&word, narrow, 8);
    word = squeeze<bits>(word);
    std::memcpy(out, &word, bytes);
}

template <unsigned bits>
inline void unpack_eight(const uint8_t* packed, size_t bytes, const Grid& grid, uint32_t* out) {
    uint64_t word = 0;  // made in a register: three bytes copied into memory would be waited for
    for (size_t b = 0; b < bytes; ++b) word |= uint64_t{packed[b]} << 8 * b;
    word = spread<bits>(word);
    uint8_t narrow[codes_at_once];
    std::memcpy(narrow, &word, 8);
    for (size_t l = 0; l < codes_at_once; ++l)
        out[l] = as_bits(grid.low + static_cast<float>(int32_t{narrow[l]}) * grid.scale);
}

inline size_t code_bytes(size_t width, unsigned bits) {
    return (width * bits + 7) / 8;
}

template <unsigned bits, class Size>
inline void quantise_segment(const uint32_t* __restrict values, Size width,
                             uint8_t* __restrict out) {
    const Span span = span_of(values, width);
    Grid grid;
    if constexpr (bits == 8)
        grid = make_grid<bits>(span.low, span.high);
    else
        grid = narrowed_grid<bits>(values, width, span);
    std::memcpy(out, &grid.low, 4);
    std::memcpy(out + 4, &grid.scale, 4);
    out += 8;
    size_t d = 0;
    for (; d + codes_at_once <= width; d += codes_at_once, out += bits)
        pack_eight<bits>(values + d, grid, out, bits);
    if (const size_t rest = width - d) {
        uint32_t padded[codes_at_once];
        for (uint32_t& value : padded) value = as_bits(grid.low);  // code 0
        std::memcpy(padded, values + d, rest * 4);
        pack_eight<bits>(padded, grid, out, code_bytes(rest, bits));
    }
}

template <unsigned bits, class Size>
inline void dequantise_segment(const uint8_t* __restrict packed, Size width,
                               uint32_t* __restrict out) {
    Grid grid{};
    std::memcpy(&grid.low, packed, 4);
    std::memcpy(&grid.scale, packed + 4, 4);
    packed += 8;
    size_t d = 0;
    for (; d + codes_at_once <= width; d += codes_at_once, packed += bits)
        unpack_eight<bits>(packed, bits, grid, out + d);
    if (const size_t rest = width - d) {
        uint32_t padded[codes_at_once];
        unpack_eight<bits>(packed, code_bytes(rest, bits), grid, padded);
        std::memcpy(out + d, padded, rest * 4);
    }
}

// Calls raw(word, byte, words) for what is copied and segment(word, byte, width) for what is
// quantised, in the order of the record.
template <class Raw, class Each>
inline void each_part(const Packing& packing, Raw raw, Each segment) {
    size_t word = 0, byte = 0;
    for (size_t s = 0; s < packing.n_segments; ++s) {
        const Segment& part = packing.segments[s];
        raw(word, byte, part.first - word);
        byte += (part.first - word) * 4;
        segment(part.first, byte, part.width);
        byte += 8 + code_bytes(part.width, packing.bits);
        word = part.first + part.width;
    }
    raw(word, byte, packing.words - word);
}

template <unsigned bits>
void quantise_rows(const Packing& packing, const uint32_t* records, uint8_t* out, size_t begin,
                   size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const uint32_t* record = records + i * packing.words;
        uint8_t* packed = out + i * packing.bytes;
        each_part(
            packing,
            [&](size_t word, size_t byte, size_t words) {
                std::memcpy(packed + byte, record + word, words * 4);
            },
            [&](size_t word, size_t byte, size_t width) {
                with_fixed(width, [&](auto fixed) {
                    quantise_segment<bits>(record + word, fixed, packed + byte);
                });
            });
    }
}

template <unsigned bits>
void dequantise_rows(const Packing& packing, const uint8_t* packed, uint32_t* out, size_t begin,
                     size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const uint8_t* from = packed + i * packing.bytes;
        uint32_t* record = out + i * packing.words;
        each_part(
            packing,
            [&](size_t word, size_t byte, size_t words) {
                std::memcpy(record + word, from + byte, words * 4);
            },
            [&](size_t word, size_t byte, size_t width) {
                with_fixed(width, [&](auto fixed) {
                    dequantise_segment<bits>(from + byte, fixed, record + word);
                });
            });
    }
}

size_t find_unquantisable(const Packing& packing, const uint32_t* records, size_t begin,
                          size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const uint32_t* record = records + i * packing.words;
        uint32_t wrong = 0;
        for (size_t s = 0; s < packing.n_segments; ++s) {
            const uint32_t* values = record + packing.segments[s].first;
            for (size_t d = 0; d < packing.segments[s].width; ++d)
                wrong |= (values[d] & 0x7fffffffu) >= unquantisable;
        }
        if (wrong) return i;
    }
    return end;
}

void quantise(const Packing& packing, const uint32_t* records, uint8_t* out, size_t begin,
              size_t end) {
    switch (packing.bits) {
        case 8:
            return quantise_rows<8>(packing, records, out, begin, end);
        case 4:
            return quantise_rows<4>(packing, records, out, begin, end);
        case 3:
            return quantise_rows<3>(packing, records, out, begin, end);
        case 2:
            return quantise_rows<2>(packing, records, out, begin, end);
    }
}

void dequantise(const Packing& packing, const uint8_t* packed, uint32_t* out, size_t begin,
                size_t end) {
    switch (packing.bits) {
        case 8:
            return dequantise_rows<8>(packing, packed, out, begin, end);
        case 4:
            return dequantise_rows<4>(packing, packed, out, begin, end);
        case 3:
            return dequantise_rows<3>(packing, packed, out, begin, end);
        case 2:
            return dequantise_rows<2>(packing, packed, out, begin, end);
    }
}

}  // namespace
}  // namespace planaria
