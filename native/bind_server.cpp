// What a server does with records. Every function takes arrays that the caller owns, checks all
// of them before it writes, and works without the GIL.
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "arguments.hpp"
#include "peeking.hpp"

namespace planaria {
namespace {

// Zeroed memory for records. Records are touched at random, so with 4 KiB pages most accesses
// would miss the TLB as well as the cache.
nb::ndarray<nb::numpy, uint32_t, nb::ndim<2>> allocate(size_t rows, size_t words, bool huge) {
    constexpr size_t huge_page = size_t{2} << 20;
    const size_t bytes = std::max<size_t>(rows * words * 4, 1);
    const size_t mapped = bytes + (bytes >= huge_page ? huge_page : 0);
    void* const base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    char* start = static_cast<char*>(base);
    if (bytes >= huge_page) {
        start += (huge_page - reinterpret_cast<uintptr_t>(base) % huge_page) % huge_page;
        madvise(start, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
    struct Mapping {
        void* base;
        size_t bytes;
    };
    nb::capsule owner(new Mapping{base, mapped}, [](void* p) noexcept {
        auto* mapping = static_cast<Mapping*>(p);
        munmap(mapping->base, mapping->bytes);
        delete mapping;
    });
    return {start, {rows, words}, owner};
}

void gather(ConstRecords records, Index index, Records out) {
    const size_t n = index.shape(0), words = records.shape(1), width = out.shape(1);
    require(out.shape(0) == n && width <= words, "out does not fit index and records");
    nb::gil_scoped_release release;
    check_range(index.data(), n, records.shape(0), "index");
    parallel(n, rows_grain, [&](size_t begin, size_t end) {
        kernels().gather(records.data(), words, index.data(), out.data(), width, begin, end);
    });
}

void scatter(Records records, Index index, ConstRecords values) {
    const size_t n = index.shape(0), words = records.shape(1);
    require(values.shape(0) == n && values.shape(1) == words, "values do not fit the index");
    nb::gil_scoped_release release;
    check_range(index.data(), n, records.shape(0), "index");
    check_distinct(index.data(), n, records.shape(0), "index");
    parallel(n, rows_grain, [&](size_t begin, size_t end) {
        kernels().scatter(records.data(), words, index.data(), values.data(), begin, end);
    });
}

const uint8_t* coefficients(const std::optional<ConstBytes>& coef, size_t n) {
    if (!coef) return nullptr;
    require(coef->shape(0) == n, "coef needs one coefficient per row");
    return coef->data();
}

void mul_add(Records records, Index index, std::optional<ConstBytes> coef, ConstRecords delta) {
    const size_t n = index.shape(0), words = records.shape(1);
    require(delta.shape(0) == n && delta.shape(1) == words, "delta does not fit the index");
    const uint8_t* coef_data = coefficients(coef, n);
    nb::gil_scoped_release release;
    check_range(index.data(), n, records.shape(0), "index");
    check_distinct(index.data(), n, records.shape(0), "index");
    parallel(n, rows_grain, [&](size_t begin, size_t end) {
        kernels().mul_add(records.data(), words, index.data(), coef_data, delta.data(), begin, end);
    });
}

// The parity update where a record's coefficient is that of the region that it lies in. All of
// them go into coef; returns whether any is not 1. None may be 0. Records whose bit in `valid` is
// not set, if there is such a bitmap, are not touched.
bool add_delta(Records records, Index index, size_t slots, ConstBytes by_region, ConstRecords delta,
               Bytes coef, std::optional<ConstBytes> valid) {
    const size_t n = index.shape(0), words = records.shape(1);
    require(delta.shape(0) == n && delta.shape(1) == words, "delta does not fit the index");
    require(coef.shape(0) == n, "coef needs one coefficient per row");
    require(slots > 0 && by_region.shape(0) * slots >= records.shape(0),
            "by_region needs a coefficient for every region");
    require(!valid || valid->shape(0) * 8 >= records.shape(0), "valid needs a bit per record");
    nb::gil_scoped_release release;
    check_range(index.data(), n, records.shape(0), "index");
    bool none = false, other = false;
    for (size_t i = 0; i < n; ++i) {
        const uint8_t c = by_region.data()[static_cast<uint64_t>(index.data()[i]) / slots];
        coef.data()[i] = c;
        none |= c == 0;
        other |= c != 1;
    }
    if (none) {
        const auto at = std::find(coef.data(), coef.data() + n, uint8_t{0}) - coef.data();
        throw RowError("index[" + std::to_string(at) + "] is " + std::to_string(index.data()[at]) +
                       ", which lies in a region whose coefficient is 0");
    }
    check_distinct(index.data(), n, records.shape(0), "index");
    const uint8_t* const coef_data = other ? coef.data() : nullptr;
    const auto is_valid = [&](size_t i) {
        const int64_t record = index.data()[i];
        return !valid || (valid->data()[record / 8] >> record % 8 & 1);
    };
    parallel(n, rows_grain, [&](size_t begin, size_t end) {
        for (size_t at = begin; at < end;) {
            size_t behind = valid ? at : end;  // of the valid ones in a row
            while (behind < end && is_valid(behind)) ++behind;
            kernels().mul_add(records.data(), words, index.data(), coef_data, delta.data(), at,
                              behind);
            at = behind + 1;
        }
    });
    return other;
}

// What changed, sorted by those who protect it: see share_out. out_delta has each record r times.
void share_deltas(Index index, ConstRecords delta, size_t slots, Array<const int32_t, 2> holder,
                  Array<const int32_t, 2> region, IndexOut out_index, Records out_delta,
                  IndexOut counts) {
    const size_t n = index.shape(0), words = delta.shape(1), r = holder.shape(1);
    require(slots > 0 && region.shape(0) == holder.shape(0) && region.shape(1) == r,
            "holder and region must be [regions, r]");
    require(delta.shape(0) == n, "delta does not fit the index");
    require(
        out_index.shape(0) == n * r && out_delta.shape(0) == n * r && out_delta.shape(1) == words,
        "out needs room for every record r times");
    for (size_t m = 0; m < holder.shape(0) * r; ++m)
        require(static_cast<uint64_t>(holder.data()[m]) < counts.shape(0),
                "counts needs an entry for every holder");
    const Holders holders{holder.shape(0), r, counts.shape(0), slots, holder.data(), region.data()};
    nb::gil_scoped_release release;
    check_range(index.data(), n, holders.regions * slots, "index");
    static thread_local std::vector<int64_t> kept;
    if (kept.size() < n * r) kept.resize(n * r);
    int64_t* const order = kept.data();
    share_out(holders, index.data(), n, order, out_index.data(), counts.data());
    parallel(n * r, rows_grain, [&](size_t begin, size_t end) {
        kernels().gather(delta.data(), words, order, out_delta.data(), words, begin, end);
    });
}

void mul_add_bytes(Bytes target, uint8_t coef, ConstBytes delta) {
    require(target.shape(0) == delta.shape(0), "target and delta must have the same length");
    nb::gil_scoped_release release;
    parallel(target.shape(0), bytes_grain, [&](size_t begin, size_t end) {
        kernels().mul_add_bytes(target.data() + begin, delta.data() + begin, coef, end - begin);
    });
}

// values[i] ^= coef * delta of query[i], where that row changed: the record before the change.
void undo(Records values, Index query, Index index, std::optional<ConstBytes> coef,
          ConstRecords delta) {
    const size_t n = query.shape(0), m = index.shape(0), words = values.shape(1);
    require(values.shape(0) == n, "values do not fit the query");
    require(delta.shape(0) == m && delta.shape(1) == words, "delta does not fit the index");
    const uint8_t* coef_data = coefficients(coef, m);
    nb::gil_scoped_release release;
    const RowFinder finder(index.data(), m);
    for (size_t i = 0; i < n; ++i)
        if (const int64_t at = finder.find(query.data()[i]); at >= 0)
            kernels().mul_add_bytes(reinterpret_cast<uint8_t*>(values.data() + i * words),
                                    reinterpret_cast<const uint8_t*>(delta.data() + at * words),
                                    coef_data ? coef_data[at] : 1, words * 4);
}

void combine(const std::vector<ConstBytes>& inputs, const std::vector<Bytes>& outputs,
             Array<const uint8_t, 2> coef) {
    const size_t k = inputs.size(), n_out = outputs.size();
    require(k > 0 && n_out > 0 && n_out <= 4, "combine takes 1 to 4 outputs and some inputs");
    require(coef.shape(0) == n_out && coef.shape(1) == k, "coef must be [outputs, inputs]");
    const size_t bytes = inputs[0].shape(0);
    std::vector<const uint8_t*> in;
    std::vector<uint8_t*> out;
    for (const auto& input : inputs) {
        require(input.shape(0) == bytes, "all inputs must have the same length");
        in.push_back(input.data());
    }
    for (const auto& output : outputs) {
        require(output.shape(0) == bytes, "outputs must be as long as the inputs");
        const auto overlaps = [&](const uint8_t* other) {
            return other < output.data() + bytes && output.data() < other + bytes;
        };
        for (const uint8_t* other : in)
            require(!overlaps(other), "an output must not overlap an input");
        for (const uint8_t* other : out) require(!overlaps(other), "two outputs must not overlap");
        out.push_back(output.data());
    }
    nb::gil_scoped_release release;
    parallel(bytes, bytes_grain, [&](size_t begin, size_t end) {
        kernels().combine(in.data(), k, out.data(), n_out, coef.data(), begin, end);
    });
}

size_t words_of(const Optimizer& optimizer, size_t dim) {
    switch (optimizer.kind) {
        case OptimizerKind::sgd:
            return dim;
        case OptimizerKind::momentum:
        case OptimizerKind::adagrad:
            return 2 * dim;
        case OptimizerKind::rowwise_adagrad:
            return dim + 1;
        case OptimizerKind::adam:
            return 3 * dim + 1;
    }
    throw ArgumentError("unknown optimizer");
}

// Sums the contributions of all ranks per distinct record, in rank order, and takes one optimizer
// step on each. index_out and delta have room for all contributed rows; returns how many distinct
// ones there were.
size_t apply(std::tuple<int, double, double, double, double, double> rule, Records records,
             size_t limit, size_t dim, const std::vector<Index>& indices,
             const std::vector<Floats>& grads, IndexOut index_out, Records delta) {
    const auto [kind, lr, weight_decay, eps, beta1, beta2] = rule;
    const Optimizer optimizer{
        static_cast<OptimizerKind>(kind), lr, weight_decay, eps, beta1, beta2};
    const size_t words = records.shape(1);
    require(words_of(optimizer, dim) == words, "records do not have this optimizer's size");
    require(limit <= records.shape(0), "limit is larger than the number of records");
    require(indices.size() == grads.size(), "each rank needs an index and its gradients");
    std::vector<const float*> parts;
    std::vector<size_t> part_rows;
    size_t total = 0;
    for (size_t rank = 0; rank < indices.size(); ++rank) {
        require(grads[rank].shape(0) == indices[rank].shape(0) && grads[rank].shape(1) == dim,
                "gradients must be [rows of their index, dim]");
        parts.push_back(grads[rank].data());
        part_rows.push_back(indices[rank].shape(0));
        total += part_rows.back();
    }
    require(index_out.shape(0) >= total && delta.shape(0) >= total && delta.shape(1) == words,
            "index_out and delta need room for all contributed rows");

    nb::gil_scoped_release release;
    size_t contributors = 0, only = 0;
    for (size_t rank = 0; rank < indices.size(); ++rank) {
        check_range(indices[rank].data(), part_rows[rank], limit, "index");
        check_distinct(indices[rank].data(), part_rows[rank], limit, "index");
        if (part_rows[rank]) ++contributors, only = rank;
    }
    const auto update = [&](const float* summed, size_t n) {
        parallel(n, rows_grain, [&](size_t begin, size_t end) {
            kernels().update(optimizer, records.data(), words, dim, index_out.data(), summed,
                             delta.data(), begin, end);
        });
        return n;
    };
    if (contributors == 0) return 0;
    if (contributors == 1) {
        std::copy_n(indices[only].data(), total, index_out.data());
        return update(parts[only], total);
    }
    // Scratch is kept between calls: fresh memory costs more to touch than the sum itself.
    static thread_local std::vector<int64_t> inverse;
    static thread_local std::vector<float> sums;
    Dedup dedup(total);
    if (inverse.size() < total) inverse.resize(total);
    size_t done = 0;
    for (size_t rank = 0; rank < indices.size(); done += part_rows[rank++])
        dedup.add(indices[rank].data(), part_rows[rank], index_out.data(), inverse.data() + done);
    if (sums.size() < dedup.count() * dim) sums.resize(dedup.count() * dim);
    float* const summed = sums.data();  // thread_local: name it here, not inside the pool's threads
    const int64_t* const numbers = inverse.data();
    parallel(dedup.count(), rows_grain, [&](size_t begin, size_t end) {
        kernels().sum_rows(parts.data(), part_rows.data(), parts.size(), numbers, dedup.count(),
                           dim, summed, begin, end);
    });
    return update(summed, dedup.count());
}

void init_records(uint64_t seed, Index table_ids, Index first_rows, Index distributions,
                  Floats parameters, int64_t rows, Index row, Array<const uint32_t, 1> state,
                  Records out) {
    const size_t n_tables = first_rows.shape(0);
    require(n_tables > 0 && table_ids.shape(0) == n_tables && distributions.shape(0) == n_tables &&
                parameters.shape(0) == n_tables && parameters.shape(1) == 2,
            "tables must have one id, first row, distribution and pair of parameters each");
    require(out.shape(0) == row.shape(0) && state.shape(0) <= out.shape(1),
            "out does not fit the rows and the state");
    std::vector<TableInit> tables;
    for (size_t t = 0; t < n_tables; ++t) {
        const int64_t first = first_rows.data()[t];
        require(t ? first > tables.back().first_row : first == 0,
                "first_rows must start with 0 and rise");
        tables.push_back({first, static_cast<Distribution>(distributions.data()[t]),
                          parameters.data()[2 * t], parameters.data()[2 * t + 1]});
    }
    const size_t words = out.shape(1);
    const Init init{seed, tables.data(), table_ids.data(),       n_tables,
                    rows, state.data(),  words - state.shape(0), words};
    nb::gil_scoped_release release;
    parallel(row.shape(0), rows_grain, [&](size_t begin, size_t end) {
        kernels().init(init, row.data(), out.data(), begin, end);
    });
}

std::pair<uint64_t, uint64_t> digest(ConstRecords records, Array<const uint64_t, 1> keys) {
    require(keys.shape(0) == records.shape(0), "keys needs one key per record");
    std::mutex adding;
    uint64_t sums[2] = {0, 0};
    nb::gil_scoped_release release;
    parallel(records.shape(0), rows_grain, [&](size_t begin, size_t end) {
        uint64_t part[2] = {0, 0};
        kernels().digest(records.data(), records.shape(1), keys.data(), part, begin, end);
        std::lock_guard lock(adding);
        sums[0] += part[0];
        sums[1] += part[1];
    });
    return {sums[0], sums[1]};
}

void check_rows(Index index, size_t limit) {
    nb::gil_scoped_release release;
    check_range(index.data(), index.shape(0), limit, "index");
    check_distinct(index.data(), index.shape(0), limit, "index");
}

// The records of `index` whose bit is not set, in order, into `out`; returns their count.
size_t missing(ConstBytes bitmap, Index index, IndexOut out) {
    const size_t n = index.shape(0);
    require(out.shape(0) >= n, "out needs room for every index");
    nb::gil_scoped_release release;
    check_range(index.data(), n, bitmap.shape(0) * 8, "index");
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
        const int64_t record = index.data()[i];
        out.data()[count] = record;
        count += !(bitmap.data()[record / 8] >> record % 8 & 1);
    }
    return count;
}

void mark(Bytes bitmap, Index index) {
    nb::gil_scoped_release release;
    check_range(index.data(), index.shape(0), bitmap.shape(0) * 8, "index");
    for (size_t i = 0; i < index.shape(0); ++i)
        bitmap.data()[index.data()[i] / 8] |= static_cast<uint8_t>(1u << index.data()[i] % 8);
}

// sources: process, first byte, counter, key, count and coefficient of each.
int64_t peek_into(
    const std::vector<std::tuple<int64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint8_t>>&
        sources,
    Bytes out) {
    require(!sources.empty(), "peek needs at least one source");
    std::vector<Source> from;
    for (const auto& [process, at, counter, key, count, coef] : sources)
        from.push_back({process, at, counter, key, count, coef});
    nb::gil_scoped_release release;
    return peek(from, out.data(), out.shape(0));
}

void count_in(Array<uint64_t, 1> counter) {
    require(counter.shape(0) == 2, "a counter is a key and a count");
    count_change(counter.data()[1]);
}

}  // namespace

void bind_server(nb::module_& m) {
    m.def("allocate", &allocate, nb::arg("rows"), nb::arg("words"), nb::arg("huge"));
    m.def("gather", &gather);
    m.def("scatter", &scatter);
    m.def("mul_add", &mul_add, nb::arg("records"), nb::arg("index"), nb::arg("coef").none(),
          nb::arg("delta"));
    m.def("add_delta", &add_delta, nb::arg("records"), nb::arg("index"), nb::arg("slots"),
          nb::arg("by_region"), nb::arg("delta"), nb::arg("coef"), nb::arg("valid").none());
    m.def("share_deltas", &share_deltas);
    m.def("mul_add_bytes", &mul_add_bytes);
    m.def("undo", &undo, nb::arg("values"), nb::arg("query"), nb::arg("index"),
          nb::arg("coef").none(), nb::arg("delta"));
    m.def("combine", &combine);
    m.def("apply", &apply);
    m.def("init_records", &init_records);
    m.def("digest", &digest);
    m.def("check_distinct", &check_rows);
    m.def("missing", &missing);
    m.def("mark", &mark);
    m.def("peek", &peek_into);
    m.def("count_change", &count_in);
}

}  // namespace planaria
