// What the codec needs to send arrays in fewer bytes. The same rules hold as for a server's
// functions: the caller owns all arrays, all are checked before anything is written, and the work
// is done without the GIL, by one thread.
#include "arguments.hpp"

namespace planaria {
namespace {

size_t pack_words(ConstRecords records, Bytes out) {
    const size_t words = records.shape(0) * records.shape(1);
    require(out.shape(0) >= packed_words_bound(words), "out is too small");
    nb::gil_scoped_release release;
    return kernels().pack_words(records.data(), words, out.data());
}

size_t pack_numbers(Index numbers, Bytes out) {
    require(out.shape(0) >= packed_numbers_bound(numbers.shape(0)), "out is too small");
    nb::gil_scoped_release release;
    return kernels().pack_numbers(numbers.data(), numbers.shape(0), out.data());
}

bool unpack_words(ConstBytes frame, Records out) {
    nb::gil_scoped_release release;
    return kernels().unpack_words(frame.data(), frame.shape(0), out.data(),
                                  out.shape(0) * out.shape(1));
}

bool unpack_numbers(ConstBytes frame, IndexOut out) {
    nb::gil_scoped_release release;
    return kernels().unpack_numbers(frame.data(), frame.shape(0), out.data(), out.shape(0));
}

}  // namespace

void bind_packing(nb::module_& m) {
    m.def("pack_words", &pack_words);
    m.def("pack_numbers", &pack_numbers);
    m.def("unpack_words", &unpack_words);
    m.def("unpack_numbers", &unpack_numbers);
}

}  // namespace planaria
