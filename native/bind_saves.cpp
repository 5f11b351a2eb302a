// What saving needs: records in fewer bits, which rows to save first, what rows were before a
// step, and checksums. The same rules hold as for a server's functions: the caller owns all arrays,
// all are checked before anything is written, and the work is done without the GIL.
#include <algorithm>
#include <atomic>

#include "arguments.hpp"
#include "tracking.hpp"

namespace planaria {
namespace {

using Counters = Array<uint32_t, 1>;
using ConstCounters = Array<const uint32_t, 1>;

constexpr size_t rows_ahead = 12;  // as in rows.hpp

// The numbers of a packing, checked, and the segments that it points to.
struct Plan {
    std::vector<Segment> segments;
    Packing packing;

    Plan(const Array<const int64_t, 2>& given, size_t words, unsigned bits) : packing{} {
        require(bits == 8 || bits == 4 || bits == 3 || bits == 2, "bits must be 8, 4, 3 or 2");
        require(given.shape(1) == 2, "segments must be [n, 2]: first word, width");
        size_t next = 0, bytes = 0;
        for (size_t s = 0; s < given.shape(0); ++s) {
            const auto first = static_cast<uint64_t>(given.data()[2 * s]);
            const auto width = static_cast<uint64_t>(given.data()[2 * s + 1]);
            require(first >= next && first <= words && width >= 1 && width <= words - first,
                    "segments must ascend, be apart, and lie inside the record");
            bytes += (first - next) * 4 + 8 + (width * bits + 7) / 8;
            next = first + width;
            segments.push_back({first, width});
        }
        bytes += (words - next) * 4;
        packing = {segments.data(), segments.size(), words, bytes, bits};
    }
    Plan(const Plan&) = delete;
};

void quantise(ConstRecords records, Array<const int64_t, 2> segments, unsigned bits,
              Array<uint8_t, 2> out) {
    const size_t n = records.shape(0);
    const Plan plan(segments, records.shape(1), bits);
    require(out.shape(0) == n && out.shape(1) == plan.packing.bytes,
            "out does not have the size of the packed records");
    nb::gil_scoped_release release;
    std::atomic<size_t> wrong{n};
    parallel(n, rows_grain, [&](size_t begin, size_t end) {
        const size_t found = kernels().find_unquantisable(plan.packing, records.data(), begin, end);
        size_t lowest = wrong;
        while (found < end && found < lowest && !wrong.compare_exchange_weak(lowest, found)) {
        }
    });
    if (wrong < n)
        throw ArgumentError("records[" + std::to_string(wrong) +
                            "] holds a NaN, an infinity or a number of 2^126 or more, which has "
                            "no quantised form; save it as it is");
    parallel(n, rows_grain, [&](size_t begin, size_t end) {
        kernels().quantise(plan.packing, records.data(), out.data(), begin, end);
    });
}

void dequantise(Array<const uint8_t, 2> packed, Array<const int64_t, 2> segments, unsigned bits,
                Records out) {
    const size_t n = packed.shape(0);
    const Plan plan(segments, out.shape(1), bits);
    require(out.shape(0) == n && packed.shape(1) == plan.packing.bytes,
            "packed does not have the size of the packed records");
    nb::gil_scoped_release release;
    parallel(n, rows_grain, [&](size_t begin, size_t end) {
        kernels().dequantise(plan.packing, packed.data(), out.data(), begin, end);
    });
}

void row_distances(ConstRecords records, ConstRecords saved, size_t dim, Array<float, 1> out) {
    const size_t n = records.shape(0), words = records.shape(1), saved_words = saved.shape(1);
    require(saved.shape(0) == n && out.shape(0) == n, "saved and out need one row per record");
    require(dim >= 1 && dim <= words && dim <= saved_words, "dim is wider than the records");
    nb::gil_scoped_release release;
    parallel(n, rows_grain, [&](size_t begin, size_t end) {
        kernels().row_distances(records.data(), words, saved.data(), saved_words, dim, out.data(),
                                begin, end);
    });
}

void count(Counters counters, Index index) {
    nb::gil_scoped_release release;
    check_range(index.data(), index.shape(0), counters.shape(0), "index");
    count_accesses(counters.data(), index.data(), index.shape(0));
}

void reset(Counters counters, Index index) {
    nb::gil_scoped_release release;
    check_range(index.data(), index.shape(0), counters.shape(0), "index");
    reset_counters(counters.data(), index.data(), index.shape(0));
}

void top(ConstCounters scores, IndexOut out) {
    require(out.shape(0) <= scores.shape(0), "there are fewer rows than wanted");
    nb::gil_scoped_release release;
    top_rows(scores.data(), scores.shape(0), out.shape(0), out.data());
}

void sample(Counters entries, Bytes bitmap, Array<uint64_t, 1> progress, uint64_t seed,
            Index index) {
    const size_t capacity = entries.shape(0), rows = bitmap.shape(0) * 8;
    require(capacity >= 1 && capacity < uint64_t{1} << 32, "entries must have 1 to 2^32 - 1 rows");
    require(rows <= uint64_t{1} << 32, "a sample has at most 2^32 rows to choose from");
    require(progress.shape(0) == 3 && progress.data()[2] <= capacity,
            "progress must be three numbers, the last at most the capacity");
    nb::gil_scoped_release release;
    check_range(index.data(), index.shape(0), rows, "index");
    sample_accesses({entries.data(), capacity, bitmap.data(), rows, progress.data()}, seed,
                    index.data(), index.shape(0));
}

void check_bits(const ConstBytes& bitmap, size_t first, size_t stop) {
    require(first <= stop && stop <= bitmap.shape(0) * 8, "[first, stop) is not in the bitmap");
}

size_t count_bits(ConstBytes bitmap, size_t first, size_t stop) {
    check_bits(bitmap, first, stop);
    nb::gil_scoped_release release;
    return count_marked(bitmap.data(), first, stop);
}

void list_bits(ConstBytes bitmap, size_t first, size_t stop, IndexOut out) {
    check_bits(bitmap, first, stop);
    nb::gil_scoped_release release;
    require(count_marked(bitmap.data(), first, stop) == out.shape(0),
            "out must have one entry per bit that is set");
    marked(bitmap.data(), first, stop, out.data());
}

size_t preserve(Bytes bitmap, size_t first, size_t stop, Index index, ConstRecords records,
                ConstRecords delta, IndexOut out_index, Records out_records) {
    const size_t n = index.shape(0), words = records.shape(1);
    require(first <= stop && stop <= records.shape(0) && stop <= bitmap.shape(0) * 8,
            "[first, stop) is not in the records or not in the bitmap");
    require(delta.shape(0) == n && delta.shape(1) == words, "delta does not fit the index");
    require(out_index.shape(0) >= n && out_records.shape(0) >= n && out_records.shape(1) == words,
            "out_index and out_records need room for every index");
    nb::gil_scoped_release release;
    check_range(index.data(), n, records.shape(0), "index");
    // Kept between calls: fresh memory costs more to touch than the positions to find.
    static thread_local std::vector<size_t> kept;
    if (kept.size() < n) kept.resize(n);
    size_t* const positions = kept.data();  // thread_local: name it here, not in the pool's threads
    const size_t found = mark_new(bitmap.data(), first, stop, index.data(), n, positions);
    parallel(found, rows_grain, [&](size_t begin, size_t end) {
        for (size_t j = begin; j < end; ++j) {
            if (j + rows_ahead < end) {
                const int64_t next = index.data()[positions[j + rows_ahead]];
                for (size_t w = 0; w < words; w += 16)  // a cache line
                    __builtin_prefetch(records.data() + next * words + w);
            }
            const int64_t row = index.data()[positions[j]];
            const uint32_t* after = records.data() + row * words;
            const uint32_t* change = delta.data() + positions[j] * words;
            uint32_t* before = out_records.data() + j * words;
            out_index.data()[j] = row;
            for (size_t w = 0; w < words; ++w) before[w] = after[w] ^ change[w];
        }
    });
    return found;
}

void overlay(Records chunk, size_t first, Index index, ConstRecords values) {
    const size_t n = index.shape(0), rows = chunk.shape(0), words = chunk.shape(1);
    require(values.shape(0) == n && values.shape(1) == words, "values do not fit the index");
    nb::gil_scoped_release release;
    for (size_t i = 0; i < n; ++i) {
        const uint64_t row = static_cast<uint64_t>(index.data()[i]) - first;
        if (index.data()[i] >= 0 && row < rows)
            std::copy_n(values.data() + i * words, words, chunk.data() + row * words);
    }
}

uint32_t crc32(ConstBytes content, uint32_t before) {
    nb::gil_scoped_release release;
    return kernels().crc32(before, content.data(), content.shape(0));
}

}  // namespace

void bind_saves(nb::module_& m) {
    m.def("quantise", &quantise);
    m.def("dequantise", &dequantise);
    m.def("row_distances", &row_distances);
    m.def("count_accesses", &count);
    m.def("reset_counters", &reset);
    m.def("top_rows", &top);
    m.def("sample_accesses", &sample);
    m.def("count_marked", &count_bits);
    m.def("marked", &list_bits);
    m.def("preserve", &preserve);
    m.def("overlay", &overlay);
    m.def("crc32", &crc32);
}

}  // namespace planaria
