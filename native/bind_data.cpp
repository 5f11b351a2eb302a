// What reading samples needs: text from any mark of a packed file.
#include "arguments.hpp"
#include "inflate.hpp"

namespace planaria {
namespace {

// (stop, bit, at): see Inflater::run. `in` has 8 bytes more than are valid.
nb::tuple run_inflater(Inflater& inflater, ConstBytes in, size_t valid, uint64_t bit, Bytes out,
                       size_t at, size_t pause_from) {
    require(in.shape(0) >= 8 && valid <= in.shape(0) - 8, "in needs 8 bytes behind the valid ones");
    require(bit <= 8 * uint64_t{valid}, "bit lies behind the valid input");
    require(at <= out.shape(0), "at lies behind the end of out");
    InflatePosition position{bit, at};
    Inflater::Stop stop;
    {
        nb::gil_scoped_release release;
        stop = inflater.run(in.data(), 8 * uint64_t{valid}, out.data(), out.shape(0), pause_from,
                            position);
    }
    return nb::make_tuple(static_cast<int>(stop), position.bit, position.at);
}

}  // namespace

void bind_data(nb::module_& m) {
    nb::class_<Inflater>(m, "Inflater").def(nb::init<>()).def("run", &run_inflater);
}

}  // namespace planaria
