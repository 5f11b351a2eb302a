// The kernels that exist once per SIMD level, as one table of function pointers.
//
// Every kernel works on the part [begin, end) of its rows or bytes, so that the pool can split a
// call over threads. No kernel allocates, checks or throws: module.cpp has checked all arguments
// before the first byte is written. Results do not depend on the level nor on how the work is
// split: each output element is computed by one thread in one fixed order of operations, and
// nothing is compiled with floating-point contraction. (Where two NaNs meet, which of their
// payloads survives is the compiler's choice.)
#pragma once

#include <cstddef>
#include <cstdint>

namespace planaria {

enum class OptimizerKind : int { sgd = 0, momentum, adagrad, rowwise_adagrad, adam };

// Scalars as the user gave them; each kernel rounds them to float where torch does.
struct Optimizer {
    OptimizerKind kind;
    double lr, weight_decay, eps, beta1, beta2;  // momentum's factor is beta1
};

enum class Distribution : int { zeros = 0, uniform, normal };

// One table's share of an arena: rows [first_row, next table's first_row) of the arena.
struct TableInit {
    int64_t first_row;
    Distribution distribution;
    float low_or_mean, high_or_std;
};

struct Init {
    uint64_t seed;
    const TableInit* tables;   // [n_tables], ascending first_row; tables[0].first_row == 0
    const int64_t* table_ids;  // [n_tables], what the random numbers depend on
    size_t n_tables;
    int64_t rows;           // rows of the arena; a row outside [0, rows) becomes all zeros
    const uint32_t* state;  // [words - dim], initial optimizer state
    size_t dim, words;
};

enum class Pooling : int { sum = 0, mean, weighted };

// Bags of several features, all of the same samples: first those of feature 0, then those of
// feature 1, ... Feature f of a sample is pooled into the columns from columns[f] on of that
// sample's row, which has `width` floats; other arenas may fill the columns between.
struct Bags {
    const int64_t* index;    // [n_ids]
    const int64_t* offsets;  // [n_bags + 1], first 0, last n_ids
    const float* weights;    // [n_ids], only where pooling is weighted
    size_t n_ids, n_bags;
    const int64_t* poolings;  // [features], each a Pooling
    const int64_t* columns;   // [features]
    size_t samples, width;    // n_bags is features times samples
};

// The vectors of samples that are multiplied with one another.
struct Vectors {
    const float* first;  // [samples, dim], before the others, and a part of the result; or nullptr
    const float* rest;   // [samples, rest_count, dim]
    size_t rest_count, dim;
};

// Words [first, first + width) of a record, which are floats that may lose bits.
struct Segment {
    size_t first, width;
};

// How records are quantised. A packed record is the record with each segment replaced by
// [low: float32][scale: float32][one code of `bits` bits per float, padded to a byte].
struct Packing {
    const Segment* segments;  // [n_segments], ascending, apart
    size_t n_segments;
    size_t words;  // of a record
    size_t bytes;  // of a packed record
    unsigned bits;
};

// The rows of one table among those of an answer: values[positions[i]], i < rows.
struct PieceRows {
    const uint32_t* positions;
    size_t rows, dim;
};

// What the codes of a piece stand for: (low + code) * scale.
struct CodeGrid {
    float scale;
    int32_t low;
    unsigned code_bytes;  // 1 or 2
};

// What becomes of a number that is not sent as it is. The codes of a scale go from
// -highest_of_codes to highest_of_codes; numbers that none of them stands for, and those that as
// floats of 16 bits would be infinities, stay as they are.
enum class Rounding { codes, fp16, bf16 };
constexpr int32_t highest_of_codes = 32767;
constexpr uint32_t fp16_limit = 0x477ff000u;  // 65520, the least number that becomes an infinity
constexpr uint32_t bf16_limit = 0x7f7f8000u;

// Words are packed sixteen at a time; packed_words.hpp draws the bytes. Both bounds have 16 bytes
// for the zeros at the end and for words that are stored whole. Static, as level.cpp asks for.
constexpr size_t block_words = 16;

static constexpr size_t blocks_of(size_t words) {
    return words / block_words + (words % block_words > 0);
}
static constexpr size_t packed_words_bound(size_t words) {
    return 4 + 9 * blocks_of(words) + 4 * words + 16;
}
static constexpr size_t packed_numbers_bound(size_t numbers) {
    return 13 + 7 * numbers + 16;
}

struct KernelTable {
    const char* name;

    // out[i, :width] = records[index[i], :width]
    void (*gather)(const uint32_t* records, size_t words, const int64_t* index, uint32_t* out,
                   size_t width, size_t begin, size_t end);
    // records[index[i]] = values[i]; index holds no row twice
    void (*scatter)(uint32_t* records, size_t words, const int64_t* index, const uint32_t* values,
                    size_t begin, size_t end);
    // records[index[i]] ^= coef[i] * delta[i] over GF(2^8); coef == nullptr means all ones
    void (*mul_add)(uint32_t* records, size_t words, const int64_t* index, const uint8_t* coef,
                    const uint32_t* delta, size_t begin, size_t end);
    // target ^= c * source, `count` bytes
    void (*mul_add_bytes)(uint8_t* target, const uint8_t* source, uint8_t c, size_t count);
    // out[j] = sum over i of coef[j * k + i] * in[i], bytes [begin, end) of each; n_out <= 4
    void (*combine)(const uint8_t* const* in, size_t k, uint8_t* const* out, size_t n_out,
                    const uint8_t* coef, size_t begin, size_t end);
    // one optimizer step on each record; delta[i] = old XOR new
    void (*update)(const Optimizer& optimizer, uint32_t* records, size_t words, size_t dim,
                   const int64_t* index, const float* grads, uint32_t* delta, size_t begin,
                   size_t end);
    // out[i] = the initial record of arena row rows[i]
    void (*init)(const Init& init, const int64_t* rows, uint32_t* out, size_t begin, size_t end);
    // two sums, mod 2^64, of hashes of (key, record); a record whose key is ~0 is passed over
    void (*digest)(const uint32_t* records, size_t words, const uint64_t* keys, uint64_t sums[2],
                   size_t begin, size_t end);
    // out[bag] = pooled values[index[i]] over the bag's ids, in order
    void (*pool)(const float* values, size_t dim, const Bags& bags, float* out,
                 size_t prefetch_rows, size_t begin, size_t end);
    // out[u] = sum in order of the gradients of all ids with index[i] == u, for u in [begin, end)
    void (*pool_backward)(const float* grads, size_t dim, const Bags& bags, float* out,
                          size_t begin, size_t end);
    // out[i] = dot(grads[bag of i], values[index[i]]): the gradient of a weighted bag's weights
    void (*weight_backward)(const float* grads, const float* values, size_t dim, const Bags& bags,
                            float* out, size_t begin, size_t end);
    // out[u] = sum in order of all gradients i with inverse[i] == u, for u in [begin, end); the
    // gradients lie in n_parts arrays, one behind the other in `inverse`, which has `distinct`
    // numbers
    void (*sum_rows)(const float* const* parts, const size_t* part_rows, size_t n_parts,
                     const int64_t* inverse, size_t distinct, size_t dim, float* out, size_t begin,
                     size_t end);
    // out[s] = the first vector of sample s, if there is one, then the products of its vectors 1
    // and 0, 2 and 0, 2 and 1, 3 and 0, ...
    void (*interact)(const Vectors& vectors, float* out, size_t begin, size_t end);
    // the gradients of all vectors from those of what interact gives
    void (*interact_backward)(const Vectors& vectors, const float* grads, float* of_first,
                              float* of_rest, size_t begin, size_t end);
    // the first record in [begin, end) that cannot be quantised, or end
    size_t (*find_unquantisable)(const Packing& packing, const uint32_t* records, size_t begin,
                                 size_t end);
    void (*quantise)(const Packing& packing, const uint32_t* records, uint8_t* out, size_t begin,
                     size_t end);
    void (*dequantise)(const Packing& packing, const uint8_t* packed, uint32_t* out, size_t begin,
                       size_t end);
    // out[i] = squared L2 distance between the first dim floats of records[i] and saved[i]
    void (*row_distances)(const uint32_t* records, size_t words, const uint32_t* saved,
                          size_t saved_words, size_t dim, float* out, size_t begin, size_t end);
    // zlib's CRC-32 of `count` bytes behind those whose checksum is `crc`
    uint32_t (*crc32)(uint32_t crc, const uint8_t* bytes, size_t count);
    // the least and the greatest number of a piece, as integers in the order of floats
    void (*span_rows)(const PieceRows& piece, const float* values, int32_t span[2]);
    // codes[i] = values / scale, rounded half to even, less low; one or two bytes each
    void (*code_rows)(const PieceRows& piece, const float* values, const CodeGrid& grid,
                      uint8_t* codes);
    void (*value_rows)(const PieceRows& piece, const uint8_t* codes, const CodeGrid& grid,
                       float* values);
    // to and from 16-bit floats: bfloat16 if `brain`, else IEEE's
    void (*halve_rows)(const PieceRows& piece, const float* values, bool brain, uint8_t* out);
    void (*widen_rows)(const PieceRows& piece, const uint8_t* halves, bool brain, float* values);
    // the floats that the receiver has of a piece's numbers, each by itself; out: anywhere
    void (*round_rows)(const PieceRows& piece, const float* values, Rounding rounding, float scale,
                       uint8_t* out);
    // `bits` bits per code; `out` has room for 16 bytes more than the packed codes take
    void (*pack_codes)(const uint8_t* codes, size_t count, unsigned bits, uint8_t* out);
    void (*unpack_codes)(const uint8_t* packed, size_t count, unsigned bits, uint8_t* codes);
    // words, or numbers, as a frame in fewer bytes; its size, 0 for numbers too far apart
    size_t (*pack_words)(const uint32_t* words, size_t count, uint8_t* frame);
    size_t (*pack_numbers)(const int64_t* numbers, size_t count, uint8_t* frame);
    // whether the frame is one of just so many; if not, anything is in what is written
    bool (*unpack_words)(const uint8_t* frame, size_t size, uint32_t* words, size_t count);
    bool (*unpack_numbers)(const uint8_t* frame, size_t size, int64_t* numbers, size_t count);
};

extern const KernelTable portable_kernels;
#ifdef PLANARIA_X86
extern const KernelTable avx2_kernels;
extern const KernelTable gfni_kernels;
#endif

// The table in use: the best that this CPU runs, or the one last selected.
const KernelTable& kernels();
// Returns false when this CPU (or this build) lacks the level.
bool select_level(const char* name);
bool level_supported(const char* name);

}  // namespace planaria
