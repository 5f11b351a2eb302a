// What a trainer does with ids, rows and gradients. The same rules hold as for a server's
// functions: the caller owns all arrays, all are checked before anything is written, and the work
// is done without the GIL.
#include <numeric>

#include "arguments.hpp"

namespace planaria {
namespace {

size_t dedup(Index ids, IndexOut unique, IndexOut inverse) {
    const size_t n = ids.shape(0);
    require(unique.shape(0) >= n && inverse.shape(0) == n, "outputs do not fit the ids");
    nb::gil_scoped_release release;
    Dedup numbering(n);
    numbering.add(ids.data(), n, unique.data(), inverse.data());
    return numbering.count();
}

void partition_rows(Index rows, int64_t arena_rows, Array<const int32_t, 2> place,
                    Array<const int32_t, 2> region, int64_t slots, IndexOut order, IndexOut index,
                    IndexOut counts) {
    const size_t n = rows.shape(0), groups = place.shape(0), k = place.shape(1);
    require(groups > 0 && k > 0 && region.shape(0) == groups && region.shape(1) == k,
            "place and region must be [groups, k]");
    require(order.shape(0) == n && index.shape(0) == n, "order and index need one entry per row");
    for (size_t m = 0; m < groups * k; ++m)
        require(static_cast<uint64_t>(place.data()[m]) < counts.shape(0),
                "counts needs an entry for every place");
    const Places places{arena_rows,
                        static_cast<int64_t>(k),
                        static_cast<int64_t>(groups),
                        slots,
                        static_cast<int64_t>(counts.shape(0)),
                        place.data(),
                        region.data()};
    nb::gil_scoped_release release;
    check_range(rows.data(), n, static_cast<size_t>(std::max<int64_t>(arena_rows, 0)), "rows");
    partition(places, rows.data(), n, order.data(), index.data(), counts.data());
}

void gradient_sum(Floats grads, Index inverse, FloatsOut out) {
    const size_t n = grads.shape(0), dim = grads.shape(1), m = out.shape(0);
    require(inverse.shape(0) == n && out.shape(1) == dim, "inverse and out do not fit grads");
    nb::gil_scoped_release release;
    check_first_seen(inverse.data(), n, m);
    const float* part = grads.data();
    parallel(m, rows_grain, [&](size_t begin, size_t end) {
        kernels().sum_rows(&part, &n, 1, inverse.data(), m, dim, out.data(), begin, end);
    });
}

Bags make_bags(const Index& index, const Index& offsets, const std::optional<Weights>& weights,
               int pooling) {
    require(offsets.shape(0) > 0, "offsets needs one entry more than there are bags");
    const Bags bags{index.data(),   offsets.data(),       weights ? weights->data() : nullptr,
                    index.shape(0), offsets.shape(0) - 1, static_cast<Pooling>(pooling)};
    require((bags.pooling == Pooling::weighted) == (bags.weights != nullptr),
            "weights go with weighted pooling, and only with it");
    require(!weights || weights->shape(0) == bags.n_ids, "weights needs one entry per id");
    check_offsets(bags.offsets, bags.n_bags, bags.n_ids);
    return bags;
}

void pool(Floats values, Index index, Index offsets, std::optional<Weights> weights, int pooling,
          size_t prefetch_rows, FloatsOut out) {
    const size_t dim = values.shape(1);
    const Bags bags = make_bags(index, offsets, weights, pooling);
    require(out.shape(0) == bags.n_bags && out.shape(1) == dim, "out must be [bags, dim]");
    nb::gil_scoped_release release;
    check_range(bags.index, bags.n_ids, values.shape(0), "index");
    parallel(bags.n_bags, rows_grain, [&](size_t begin, size_t end) {
        kernels().pool(values.data(), dim, bags, out.data(), prefetch_rows, begin, end);
    });
}

void pool_backward(Floats grads, Index inverse, Index offsets, std::optional<Weights> weights,
                   int pooling, FloatsOut out) {
    const size_t dim = grads.shape(1);
    const Bags bags = make_bags(inverse, offsets, weights, pooling);
    require(grads.shape(0) == bags.n_bags && out.shape(1) == dim,
            "grads must be [bags, dim], out [distinct rows, dim]");
    nb::gil_scoped_release release;
    check_first_seen(bags.index, bags.n_ids, out.shape(0));
    parallel(out.shape(0), rows_grain, [&](size_t begin, size_t end) {
        kernels().pool_backward(grads.data(), dim, bags, out.data(), begin, end);
    });
}

void weight_backward(Floats grads, Floats values, Index index, Index offsets, Array<float, 1> out) {
    const size_t dim = grads.shape(1);
    const Bags bags = make_bags(index, offsets, std::nullopt, static_cast<int>(Pooling::sum));
    require(grads.shape(0) == bags.n_bags && values.shape(1) == dim && out.shape(0) == bags.n_ids,
            "grads must be [bags, dim], values [rows, dim], out [ids]");
    nb::gil_scoped_release release;
    check_range(bags.index, bags.n_ids, values.shape(0), "index");
    parallel(bags.n_bags, rows_grain, [&](size_t begin, size_t end) {
        kernels().weight_backward(grads.data(), values.data(), dim, bags, out.data(), begin, end);
    });
}

}  // namespace

void bind_trainer(nb::module_& m) {
    m.def("dedup", &dedup);
    m.def("partition", &partition_rows);
    m.def("gradient_sum", &gradient_sum);
    m.def("pool", &pool, nb::arg("values"), nb::arg("index"), nb::arg("offsets"),
          nb::arg("weights").none(), nb::arg("pooling"), nb::arg("prefetch_rows"), nb::arg("out"));
    m.def("pool_backward", &pool_backward, nb::arg("grads"), nb::arg("inverse"), nb::arg("offsets"),
          nb::arg("weights").none(), nb::arg("pooling"), nb::arg("out"));
    m.def("weight_backward", &weight_backward);
}

}  // namespace planaria
