// What lossy lookups need: an answer's rows as a frame, and back. The same rules hold as for a
// server's functions: the caller owns all arrays, all are checked before anything is written, and
// the work is done without the GIL, by one thread.
#include "arguments.hpp"
#include "frames.hpp"

namespace planaria {
namespace {

using Tables = Array<const int32_t, 1>;

constexpr size_t most_floats = size_t{1} << 29;

// Kept between calls: one answer is about as large as the next.
Grouped& group(const Tables& tables, size_t count, size_t dim) {
    const size_t rows = tables.shape(0);
    require(dim >= 1 && dim <= most_floats && rows <= most_floats / dim,
            "an answer has rows of one float or more, and 2^29 floats at most");
    for (size_t i = 0; i < rows; ++i)
        if (static_cast<uint32_t>(tables.data()[i]) >= count)
            throw RowError("tables[" + std::to_string(i) + "] is " +
                           std::to_string(tables.data()[i]) + ", outside 0 to " +
                           std::to_string(static_cast<int64_t>(count) - 1));
    static thread_local Grouped grouped;
    grouped.group(tables.data(), rows, count);
    return grouped;
}

int64_t encode(Floats values, Tables tables, Weights scales, ConstBytes encoders, Bytes out) {
    const size_t rows = values.shape(0), dim = values.shape(1), count = scales.shape(0);
    require(tables.shape(0) == rows, "tables needs one entry per row");
    require(encoders.shape(0) == count, "each table needs a scale and an encoding");
    for (size_t t = 0; t < count; ++t)
        require(encoders.data()[t] < encodings, "there is no such encoding");
    nb::gil_scoped_release release;
    const Grouped& grouped = group(tables, count, dim);
    require(out.shape(0) >= frame_bound(rows, dim, grouped.pieces()), "out is too small");
    return encode_frame(grouped, values.data(), dim, scales.data(), encoders.data(), out.data());
}

void decode(ConstBytes frame, Tables tables, size_t count, FloatsOut out) {
    require(tables.shape(0) == out.shape(0), "out needs one row per entry of tables");
    nb::gil_scoped_release release;
    const Grouped& grouped = group(tables, count, out.shape(1));
    decode_frame(grouped, frame.data(), frame.shape(0), out.shape(1), out.data());
}

}  // namespace

void bind_lossy(nb::module_& m) {
    m.def("encode_rows", &encode);
    m.def("decode_rows", &decode);
}

}  // namespace planaria
