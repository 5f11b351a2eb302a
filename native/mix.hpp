// The hash that all random numbers and digests are made of.
#pragma once

#include <cstdint>

namespace planaria {
namespace {

constexpr uint64_t golden = 0x9e3779b97f4a7c15u;

// The finalizer of SplitMix64.
inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

}  // namespace
}  // namespace planaria
