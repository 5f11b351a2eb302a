#include "huffman.hpp"

#include <algorithm>
#include <cstring>

namespace planaria {
namespace {

constexpr size_t table_size = size_t{1} << huffman_bits;

// ------------------------------------------------------------------------- the code

struct Histogram {
    uint32_t of[256];
};

// Four of them, so that equal neighbours do not wait for one another.
Histogram count_symbols(const uint8_t* codes, size_t count) {
    static thread_local uint32_t parts[4][256];
    std::memset(parts, 0, sizeof parts);
    size_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (size_t p = 0; p < 4; ++p) ++parts[p][codes[i + p]];
    for (; i < count; ++i) ++parts[0][codes[i]];
    Histogram sums;
    for (size_t s = 0; s < 256; ++s)
        sums.of[s] = parts[0][s] + parts[1][s] + parts[2][s] + parts[3][s];
    return sums;
}

// How many leaves of Huffman's tree lie how deep. weights: ascending, two or more.
void count_depths(const uint64_t* weights, size_t leaves, uint32_t at_depth[256]) {
    uint64_t inner[256];
    size_t parent[512];  // leaves, then inner nodes
    size_t leaf = 0, node = 0;
    const auto lightest = [&](size_t made) {
        const bool is_leaf = node == made || (leaf < leaves && weights[leaf] <= inner[node]);
        return is_leaf ? leaf++ : leaves + node++;
    };
    const auto weight = [&](size_t which) {
        return which < leaves ? weights[which] : inner[which - leaves];
    };
    for (size_t made = 0; made + 1 < leaves; ++made) {
        const size_t first = lightest(made), second = lightest(made);
        inner[made] = weight(first) + weight(second);
        parent[first] = parent[second] = leaves + made;
    }
    size_t depth[512];
    const size_t root = 2 * leaves - 2;
    depth[root] = 0;
    for (size_t which = root; which-- > 0;) {
        depth[which] = depth[parent[which]] + 1;
        if (which < leaves) ++at_depth[depth[which]];
    }
}

// Cuts what is too deep, and makes room for it: the sum of 2^-depth is 1 again in the end.
void limit_depths(uint32_t at_depth[256]) {
    for (size_t d = huffman_bits + 1; d < 256; ++d) at_depth[huffman_bits] += at_depth[d];
    uint32_t taken = 0;
    for (size_t d = 1; d <= huffman_bits; ++d) taken += at_depth[d] << (huffman_bits - d);
    for (; taken > table_size; --taken) {
        size_t d = huffman_bits - 1;
        while (!at_depth[d]) --d;
        --at_depth[d], at_depth[d + 1] += 2, --at_depth[huffman_bits];
    }
}

struct Lengths {
    uint8_t of[256] = {};
};

Lengths make_lengths(const Histogram& counts, size_t symbols) {
    uint64_t sorted[256];  // count, then symbol
    size_t leaves = 0;
    for (size_t s = 0; s < symbols; ++s)
        if (counts.of[s]) sorted[leaves++] = uint64_t{counts.of[s]} << 8 | s;
    std::sort(sorted, sorted + leaves);
    uint64_t weights[256];
    for (size_t i = 0; i < leaves; ++i) weights[i] = sorted[i] >> 8;
    uint32_t at_depth[256] = {};
    count_depths(weights, leaves, at_depth);
    limit_depths(at_depth);
    Lengths lengths;
    for (size_t d = huffman_bits, i = 0; d >= 1; --d)
        for (uint32_t n = at_depth[d]; n > 0; --n) lengths.of[sorted[i++] & 255] = uint8_t(d);
    return lengths;
}

struct Codewords {
    uint16_t of[256];  // first bit lowest
};

Codewords make_codewords(const Lengths& lengths, size_t symbols) {
    uint32_t of_length[huffman_bits + 1] = {}, next[huffman_bits + 1] = {};
    for (size_t s = 0; s < symbols; ++s) ++of_length[lengths.of[s]];
    of_length[0] = 0;
    for (size_t d = 1; d <= huffman_bits; ++d) next[d] = (next[d - 1] + of_length[d - 1]) << 1;
    Codewords words{};
    for (size_t s = 0; s < symbols; ++s) {
        const unsigned length = lengths.of[s];
        if (!length) continue;
        const uint32_t code = next[length]++;
        for (unsigned b = 0; b < length; ++b)
            words.of[s] = uint16_t(words.of[s] | (code >> b & 1) << (length - 1 - b));
    }
    return words;
}

// ------------------------------------------------------------------------- encoding

struct Symbol {
    uint32_t code, length;
};

struct Bits {
    uint64_t word;
    unsigned count;
};

inline Bits join(const Bits& first, const Bits& second) {
    return {first.word | second.word << first.count, first.count + second.count};
}

// Returns the end of what it writes; whole words are stored, so up to eight bytes behind it.
uint8_t* encode_stream(const uint8_t* codes, size_t count, const Symbol* symbols, uint8_t* out) {
    Bits held{0, 0};
    const auto flush = [&] {
        std::memcpy(out, &held.word, 8);
        out += held.count >> 3;
        held.word >>= held.count & ~7u;
        held.count &= 7;
    };
    const auto bits = [&](size_t i) -> Bits {
        const Symbol& symbol = symbols[codes[i]];
        return {symbol.code, symbol.length};
    };
    size_t i = 0;
    for (; i + 4 <= count; i += 4) {  // 7 + 4 * 11 bits at most
        held = join(held, join(join(bits(i), bits(i + 1)), join(bits(i + 2), bits(i + 3))));
        flush();
    }
    for (; i < count; ++i) {
        held = join(held, bits(i));
        flush();
    }
    if (held.count) *out++ = static_cast<uint8_t>(held.word);
    return out;
}

size_t streams_of(size_t count) {
    return count < huffman_few ? 1 : huffman_streams;
}

// ------------------------------------------------------------------------- decoding

struct Stream {
    const uint8_t* in;
    size_t bytes;
    size_t at;  // bit
    uint8_t *out, *end;
};

struct Tables {
    uint16_t single[table_size];   // symbol | length << 8
    uint32_t several[table_size];  // up to three symbols | bits << 24 | symbols << 28
    unsigned bits;                 // of the longest code; both have 2^bits entries
};

// Returns false unless the lengths are those of a full code of two symbols or more.
bool make_single(const Lengths& lengths, size_t symbols, Tables& tables) {
    unsigned longest = 0;
    uint32_t taken = 0;
    for (size_t s = 0; s < symbols; ++s) {
        const unsigned length = lengths.of[s];
        if (length > huffman_bits) return false;
        longest = std::max(longest, length);
        taken += length ? uint32_t(table_size) >> length : 0;
    }
    if (taken != table_size || !longest) return false;
    tables.bits = longest;
    const Codewords words = make_codewords(lengths, symbols);
    for (size_t s = 0; s < symbols; ++s) {
        const unsigned length = lengths.of[s];
        if (!length) continue;
        for (size_t at = words.of[s]; at >> longest == 0; at += size_t{1} << length)
            tables.single[at] = uint16_t(s | length << 8);
    }
    return true;
}

void make_several(Tables& tables) {
    const size_t size = size_t{1} << tables.bits;
    for (size_t at = 0; at < size; ++at) {
        uint32_t symbols = 0, used = 0, count = 0;
        while (count < 3) {
            const uint32_t entry = tables.single[at >> used];
            if (used + (entry >> 8) > tables.bits) break;
            symbols |= (entry & 255) << 8 * count++;
            used += entry >> 8;
        }
        tables.several[at] = symbols | used << 24 | count << 28;
    }
}

constexpr size_t lookups = 5;  // 7 + 5 * 11 bits are in a word

// Decodes the streams side by side, as long as none can come near its end.
void decode_together(const Tables& tables, Stream* streams) {
    const uint32_t mask = (1u << tables.bits) - 1;
    for (;;) {
        size_t turns = SIZE_MAX;
        for (size_t s = 0; s < huffman_streams; ++s) {
            const Stream& stream = streams[s];
            const size_t used = stream.at >> 3, left = stream.end - stream.out;
            if (used + 8 > stream.bytes || left < 3 * lookups + 1) return;
            turns =
                std::min({turns, (stream.bytes - used - 8) / 7 + 1, (left - 1) / (3 * lookups)});
        }
        for (; turns > 0; --turns) {
            uint64_t words[huffman_streams];
            for (size_t s = 0; s < huffman_streams; ++s) {
                std::memcpy(&words[s], streams[s].in + (streams[s].at >> 3), 8);
                words[s] >>= streams[s].at & 7;
            }
            for (size_t turn = 0; turn < lookups; ++turn)
                for (size_t s = 0; s < huffman_streams; ++s) {
                    const uint32_t entry = tables.several[words[s] & mask];
                    const unsigned used = entry >> 24 & 15;
                    std::memcpy(streams[s].out, &entry, 4);
                    streams[s].out += entry >> 28;
                    streams[s].at += used;
                    words[s] >>= used;
                }
        }
    }
}

// The rest of one stream, symbol by symbol. Returns false unless its symbols take all its bytes.
bool decode_rest(const Tables& tables, Stream stream) {
    const uint32_t mask = (1u << tables.bits) - 1;
    while (stream.out < stream.end) {
        const size_t used = stream.at >> 3;
        uint64_t word = 0;
        if (used + 8 <= stream.bytes)
            std::memcpy(&word, stream.in + used, 8);
        else if (used < stream.bytes)
            std::memcpy(&word, stream.in + used, stream.bytes - used);
        word >>= stream.at & 7;
        for (size_t turn = 0; turn < lookups && stream.out < stream.end; ++turn) {
            const uint32_t entry = tables.single[word & mask];
            *stream.out++ = static_cast<uint8_t>(entry);
            stream.at += entry >> 8;
            word >>= entry >> 8;
        }
        if (stream.at > stream.bytes * 8) return false;
    }
    return (stream.at + 7) / 8 == stream.bytes;
}

}  // namespace

size_t huffman_encode(const uint8_t* codes, size_t count, size_t symbols, size_t below,
                      uint8_t* out) {
    const Histogram counts = count_symbols(codes, count);
    if (std::count(counts.of, counts.of + symbols, 0u) + 1 >= std::ptrdiff_t(symbols)) return 0;
    const Lengths lengths = make_lengths(counts, symbols);
    const size_t streams = streams_of(count), header = (symbols + 1) / 2 + 4 * (streams - 1);
    uint64_t bits = 0;
    for (size_t s = 0; s < symbols; ++s) bits += uint64_t{counts.of[s]} * lengths.of[s];
    if (header + bits / 8 + streams >= below) return 0;
    const Codewords words = make_codewords(lengths, symbols);
    Symbol table[256];
    for (size_t s = 0; s < 256; ++s) table[s] = {words.of[s], lengths.of[s]};
    for (size_t s = 0; s < symbols; s += 2)
        out[s / 2] = uint8_t(lengths.of[s] | (s + 1 < symbols ? lengths.of[s + 1] << 4 : 0));
    const size_t share = (count + streams - 1) / streams;
    uint8_t* at = out + header;
    for (size_t s = 0; s < streams; ++s) {
        const uint8_t* const first = codes + s * share;
        uint8_t* const end = encode_stream(first, std::min(share, count - s * share), table, at);
        const auto size = static_cast<uint32_t>(end - at);
        if (s + 1 < streams) std::memcpy(out + (symbols + 1) / 2 + 4 * s, &size, 4);
        at = end;
    }
    return at - out;
}

bool huffman_decode(const uint8_t* in, size_t bytes, size_t symbols, size_t count, uint8_t* codes) {
    const size_t streams = streams_of(count), header = (symbols + 1) / 2 + 4 * (streams - 1);
    if (bytes < header) return false;
    Lengths lengths;
    for (size_t s = 0; s < symbols; ++s) lengths.of[s] = in[s / 2] >> 4 * (s % 2) & 15;
    static thread_local Tables tables;
    if (!make_single(lengths, symbols, tables)) return false;
    const size_t share = (count + streams - 1) / streams;
    Stream parts[huffman_streams];
    size_t at = header;
    for (size_t s = 0; s < streams; ++s) {
        uint32_t size = 0;
        if (s + 1 < streams) std::memcpy(&size, in + (symbols + 1) / 2 + 4 * s, 4);
        const size_t own = s + 1 < streams ? size : bytes - at;
        if (own > bytes - at) return false;
        parts[s] = {in + at, own, 0, codes + s * share, codes + std::min((s + 1) * share, count)};
        at += own;
    }
    if (streams == huffman_streams) {
        make_several(tables);
        decode_together(tables, parts);
    }
    return std::all_of(parts, parts + streams,
                       [&](const Stream& part) { return decode_rest(tables, part); });
}

}  // namespace planaria
