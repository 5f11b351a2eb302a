// Initial records, as a pure function of (seed, table, row).
//
// Counter-based: word j of a row is mix(key(seed, table, row) + (j + 1) * golden), so any server
// can make any record alone and no initial weight ever travels. Each 64-bit word gives two floats,
// low half first.
#pragma once

#include <cstring>

#include "kernels.hpp"
#include "mix.hpp"

namespace planaria {
namespace {

inline uint64_t row_key(uint64_t seed, uint64_t table, uint64_t row) {
    return mix(mix(mix(seed + golden) + table) + row);
}

inline float uniform(uint32_t bits, float low, float high) {
    return low + (high - low) * (static_cast<float>(bits >> 8) * 0x1p-24f);
}

// Natural logarithm from additions, multiplications and one division alone, good to about 1e-15:
// the quantile below needs the same bits on every machine, which libm does not promise.
// x must be positive and normal.
inline double log_exact(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
    double fraction;  // in [1, 2)
    std::memcpy(&fraction, &bits, 8);
    if (fraction > 1.4142135623730951) {
        fraction *= 0.5;
        exponent += 1;
    }
    // log(f) = 2 artanh(z) with z = (f - 1) / (f + 1), |z| < 0.1716
    const double z = (fraction - 1.0) / (fraction + 1.0);
    const double z2 = z * z;
    double series = 0.0;
    for (int n = 21; n >= 1; n -= 2) series = series * z2 + 1.0 / n;
    return 2.0 * z * series + static_cast<double>(exponent) * 0.6931471805599453;
}

inline double horner(const double (&c)[8], double x) {
    double sum = c[7];
    for (int i = 6; i >= 0; --i) sum = sum * x + c[i];
    return sum;
}

// Quantile of the normal distribution by Wichura's algorithm AS 241 (PPND16).
inline double normal_quantile(double p) {
    constexpr double a[8] = {3.3871328727963666080e0, 1.3314166789178437745e2,
                             1.9715909503065514427e3, 1.3731693765509461125e4,
                             4.5921953931549871457e4, 6.7265770927008700853e4,
                             3.3430575583588128105e4, 2.5090809287301226727e3};
    constexpr double b[8] = {1.0,
                             4.2313330701600911252e1,
                             6.8718700749205790830e2,
                             5.3941960214247511077e3,
                             2.1213794301586595867e4,
                             3.9307895800092710610e4,
                             2.8729085735721942674e4,
                             5.2264952788528545610e3};
    constexpr double c[8] = {1.42343711074968357734e0,  4.63033784615654529590e0,
                             5.76949722146069140550e0,  3.64784832476320460504e0,
                             1.27045825245236838258e0,  2.41780725177450611770e-1,
                             2.27238449892691845833e-2, 7.74545014278341407640e-4};
    constexpr double d[8] = {1.0,
                             2.05319162663775882187e0,
                             1.67638483018380384940e0,
                             6.89767334985100004550e-1,
                             1.48103976427480074590e-1,
                             1.51986665636164571966e-2,
                             5.47593808499534494600e-4,
                             1.05075007164441684324e-9};
    constexpr double e[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,
                             1.78482653991729133580e0,  2.96560571828504891230e-1,
                             2.65321895265761230930e-2, 1.24266094738807843860e-3,
                             2.71155556874348757815e-5, 2.01033439929228813265e-7};
    constexpr double f[8] = {1.0,
                             5.99832206555887937690e-1,
                             1.36929880922735805310e-1,
                             1.48753612908506148525e-2,
                             7.86869131145613259100e-4,
                             1.84631831751005468180e-5,
                             1.42151175831644588870e-7,
                             2.04426310338993978564e-15};
    const double q = p - 0.5;
    if (q <= 0.425 && q >= -0.425) {
        const double r = 0.180625 - q * q;
        return q * horner(a, r) / horner(b, r);
    }
    double r = __builtin_sqrt(-log_exact(q < 0 ? p : 1.0 - p));
    if (r <= 5.0) {
        r -= 1.6;
        r = horner(c, r) / horner(d, r);
    } else {
        r -= 5.0;
        r = horner(e, r) / horner(f, r);
    }
    return q < 0 ? -r : r;
}

inline float normal(uint32_t bits, float mean, float std) {
    const double p = (static_cast<double>(bits) + 0.5) * 0x1p-32;
    return mean + std * static_cast<float>(normal_quantile(p));
}

void init_weights(const TableInit& table, uint64_t key, uint32_t* out, size_t dim) {
    for (size_t d = 0; d < dim; ++d) {
        const uint64_t word = mix(key + (d / 2 + 1) * golden);
        const uint32_t bits = static_cast<uint32_t>(d % 2 ? word >> 32 : word);
        float weight = 0.0f;
        if (table.distribution == Distribution::uniform)
            weight = uniform(bits, table.low_or_mean, table.high_or_std);
        else if (table.distribution == Distribution::normal)
            weight = normal(bits, table.low_or_mean, table.high_or_std);
        std::memcpy(out + d, &weight, 4);
    }
}

void init(const Init& init, const int64_t* rows, uint32_t* out, size_t begin, size_t end) {
    size_t t = 0;
    for (size_t i = begin; i < end; ++i) {
        uint32_t* record = out + i * init.words;
        const int64_t row = rows[i];
        if (row < 0 || row >= init.rows) {
            std::memset(record, 0, init.words * 4);
            continue;
        }
        if (row < init.tables[t].first_row) t = 0;
        while (t + 1 < init.n_tables && init.tables[t + 1].first_row <= row) ++t;
        const TableInit& table = init.tables[t];
        const uint64_t key = row_key(init.seed, static_cast<uint64_t>(init.table_ids[t]),
                                     static_cast<uint64_t>(row - table.first_row));
        init_weights(table, key, record, init.dim);
        std::memcpy(record + init.dim, init.state, (init.words - init.dim) * 4);
    }
}

}  // namespace
}  // namespace planaria
