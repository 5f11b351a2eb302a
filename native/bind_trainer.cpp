// What a trainer does with ids, rows and gradients. The same rules hold as for a server's
// functions: the caller owns all arrays, all are checked before anything is written, and the work
// is done without the GIL.
#include <numeric>

#include "arguments.hpp"

namespace planaria {
namespace {

// Samples whose vectors are multiplied: each is worth many rows.
constexpr size_t samples_grain = 64;

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

// Bags of columns.shape(0) features, pooled into or from rows of `width` floats.
Bags make_bags(const Index& index, const Index& offsets, const Index& columns, size_t width) {
    require(offsets.shape(0) > 0, "offsets needs one entry more than there are bags");
    const size_t n_bags = offsets.shape(0) - 1, features = columns.shape(0);
    require(features > 0 && n_bags % features == 0,
            "each feature needs a column and as many bags as the others");
    check_offsets(offsets.data(), n_bags, index.shape(0));
    Bags bags{};
    bags.index = index.data(), bags.offsets = offsets.data(), bags.columns = columns.data();
    bags.n_ids = index.shape(0), bags.n_bags = n_bags;
    bags.samples = n_bags / features, bags.width = width;
    return bags;
}

void set_poolings(Bags& bags, const Index& poolings, const std::optional<Weights>& weights,
                  const Index& columns) {
    require(poolings.shape(0) == columns.shape(0), "each feature needs a pooling");
    require(!weights || weights->shape(0) == bags.n_ids, "weights needs one entry per id");
    bags.poolings = poolings.data();
    if (weights) bags.weights = weights->data();
    for (size_t f = 0; f < poolings.shape(0); ++f) {
        const auto pooling = static_cast<Pooling>(bags.poolings[f]);
        require((pooling == Pooling::weighted) == weights.has_value(),
                "weights go with weighted pooling, and only with it");
    }
}

// No two features share a column, so no two threads write one float.
void check_columns(const Bags& bags, size_t features, size_t dim) {
    int64_t free = 0;
    bool apart = true;
    for (size_t f = 0; f < features && apart; ++f) {
        apart = bags.columns[f] >= free && bags.columns[f] <= static_cast<int64_t>(bags.width);
        if (apart) free = bags.columns[f] + static_cast<int64_t>(dim);
    }
    require(apart && free <= static_cast<int64_t>(bags.width),
            "columns must rise by dim or more and lie within the pooled rows");
}

void pool(Floats values, Index index, Index offsets, std::optional<Weights> weights, Index poolings,
          Index columns, size_t prefetch_rows, FloatsOut out) {
    const size_t dim = values.shape(1);
    Bags bags = make_bags(index, offsets, columns, out.shape(1));
    set_poolings(bags, poolings, weights, columns);
    require(out.shape(0) == bags.samples, "out must be [samples, width]");
    check_columns(bags, columns.shape(0), dim);
    nb::gil_scoped_release release;
    check_range(bags.index, bags.n_ids, values.shape(0), "index");
    parallel(bags.n_bags, rows_grain, [&](size_t begin, size_t end) {
        kernels().pool(values.data(), dim, bags, out.data(), prefetch_rows, begin, end);
    });
}

void pool_backward(Floats grads, Index inverse, Index offsets, std::optional<Weights> weights,
                   Index poolings, Index columns, FloatsOut out) {
    const size_t dim = out.shape(1);
    Bags bags = make_bags(inverse, offsets, columns, grads.shape(1));
    set_poolings(bags, poolings, weights, columns);
    require(grads.shape(0) == bags.samples, "grads must be [samples, width]");
    check_columns(bags, columns.shape(0), dim);
    nb::gil_scoped_release release;
    check_first_seen(bags.index, bags.n_ids, out.shape(0));
    parallel(out.shape(0), rows_grain, [&](size_t begin, size_t end) {
        kernels().pool_backward(grads.data(), dim, bags, out.data(), begin, end);
    });
}

void weight_backward(Floats grads, Floats values, Index index, Index offsets, Index columns,
                     Array<float, 1> out) {
    const size_t dim = values.shape(1);
    const Bags bags = make_bags(index, offsets, columns, grads.shape(1));
    require(grads.shape(0) == bags.samples && out.shape(0) == bags.n_ids,
            "grads must be [samples, width], out [ids]");
    check_columns(bags, columns.shape(0), dim);
    nb::gil_scoped_release release;
    check_range(bags.index, bags.n_ids, values.shape(0), "index");
    parallel(bags.n_bags, rows_grain, [&](size_t begin, size_t end) {
        kernels().weight_backward(grads.data(), values.data(), dim, bags, out.data(), begin, end);
    });
}

Vectors make_vectors(const std::optional<Floats>& first, const Array<const float, 3>& rest,
                     size_t samples, size_t width) {
    const size_t count = rest.shape(1) + first.has_value(), dim = rest.shape(2);
    require(samples == rest.shape(0) && (!first || first->shape(0) == samples),
            "there must be as many samples of each");
    require(!first || first->shape(1) == dim, "all vectors must have one size");
    require(count > 0 && width == (first ? dim : 0) + count * (count - 1) / 2,
            "a sample's products, behind its first vector, are one for each pair");
    return {first ? first->data() : nullptr, rest.data(), rest.shape(1), dim};
}

void interact(std::optional<Floats> first, Array<const float, 3> rest, FloatsOut out) {
    const Vectors vectors = make_vectors(first, rest, out.shape(0), out.shape(1));
    nb::gil_scoped_release release;
    parallel(out.shape(0), samples_grain, [&](size_t begin, size_t end) {
        kernels().interact(vectors, out.data(), begin, end);
    });
}

void interact_backward(Floats grads, std::optional<Floats> first, Array<const float, 3> rest,
                       std::optional<FloatsOut> of_first, Array<float, 3> of_rest) {
    const Vectors vectors = make_vectors(first, rest, grads.shape(0), grads.shape(1));
    require(of_first.has_value() == first.has_value(), "the first vector needs a gradient");
    require(!first || (of_first->shape(0) == first->shape(0) && of_first->shape(1) == vectors.dim),
            "of_first does not fit first");
    for (size_t at = 0; at < 3; ++at)
        require(of_rest.shape(at) == rest.shape(at), "of_rest does not fit rest");
    float* to_first = of_first ? of_first->data() : nullptr;
    nb::gil_scoped_release release;
    parallel(grads.shape(0), samples_grain, [&](size_t begin, size_t end) {
        kernels().interact_backward(vectors, grads.data(), to_first, of_rest.data(), begin, end);
    });
}

void check_features(const Features& features, size_t n_keys) {
    int64_t first_row = 0, behind = 0;
    for (size_t f = 0; f < features.n; ++f) {
        require(static_cast<uint64_t>(features.keys[f]) < n_keys, "a feature has no such key");
        require(features.limits[f] >= 0 && features.limits[f] <= int64_t{1} << 40,
                "limits must be 0 to 2^40");
        require(features.first_rows[f] <= int64_t{1} << 60, "first_rows must be 2^60 at most");
        const bool same = f && features.first_rows[f] == first_row;
        require(same ? first_row + features.limits[f] == behind : features.first_rows[f] >= behind,
                "features must be sorted by table, and tables have no row in common");
        first_row = features.first_rows[f];
        behind = first_row + features.limits[f];
    }
}

int64_t number_bags(Index ids, Index offsets, size_t samples, Index keys, Index limits,
                    Index first_rows, IndexOut rows, IndexOut inverse, IndexOut bags) {
    const size_t n = keys.shape(0), n_bags = offsets.shape(0) - 1;
    require(offsets.shape(0) > 0 && (samples ? n_bags % samples == 0 : n_bags == 0),
            "offsets needs one entry per key and sample, and one more");
    require(
        limits.shape(0) == n && first_rows.shape(0) == n && bags.shape(0) == n * samples + 1,
        "each feature needs a key, a limit and a first row; bags an entry per bag, and one more");
    check_offsets(offsets.data(), n_bags, ids.shape(0));
    const Features features{
        ids.data(), offsets.data(), keys.data(), limits.data(), first_rows.data(), n, samples};
    check_features(features, samples ? n_bags / samples : SIZE_MAX);
    size_t n_ids = 0;
    for (size_t f = 0; f < n && samples; ++f) n_ids += features.last(f) - features.first(f);
    require(rows.shape(0) == n_ids && inverse.shape(0) == n_ids, "outputs do not fit the ids");
    nb::gil_scoped_release release;
    return samples ? number_rows(features, rows.data(), inverse.data(), bags.data())
                   : (bags.data()[0] = 0);
}

}  // namespace

void bind_trainer(nb::module_& m) {
    m.def("dedup", &dedup);
    m.def("partition", &partition_rows);
    m.def("gradient_sum", &gradient_sum);
    m.def("pool", &pool, nb::arg("values"), nb::arg("index"), nb::arg("offsets"),
          nb::arg("weights").none(), nb::arg("poolings"), nb::arg("columns"),
          nb::arg("prefetch_rows"), nb::arg("out"));
    m.def("pool_backward", &pool_backward, nb::arg("grads"), nb::arg("inverse"), nb::arg("offsets"),
          nb::arg("weights").none(), nb::arg("poolings"), nb::arg("columns"), nb::arg("out"));
    m.def("weight_backward", &weight_backward);
    m.def("number_bags", &number_bags);
    m.def("interact", &interact, nb::arg("first").none(), nb::arg("rest"), nb::arg("out"));
    m.def("interact_backward", &interact_backward, nb::arg("grads"), nb::arg("first").none(),
          nb::arg("rest"), nb::arg("of_first").none(), nb::arg("of_rest"));
}

}  // namespace planaria
