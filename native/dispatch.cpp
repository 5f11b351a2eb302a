// Which SIMD level runs: the best that the CPU has, unless Python selects another.
#include <cstring>
#include <initializer_list>

#include "kernels.hpp"

namespace planaria {
namespace {

bool cpu_has(const char* name) {
    if (!std::strcmp(name, "portable")) return true;
#ifdef PLANARIA_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("pclmul")) return false;
    if (!std::strcmp(name, "avx2")) return true;
    if (!std::strcmp(name, "gfni"))
        return __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
#endif
    return false;
}

const KernelTable* table_of(const char* name) {
    if (!cpu_has(name)) return nullptr;
#ifdef PLANARIA_X86
    if (!std::strcmp(name, "gfni")) return &gfni_kernels;
    if (!std::strcmp(name, "avx2")) return &avx2_kernels;
#endif
    return &portable_kernels;
}

const KernelTable* best() {
    for (const char* name : {"gfni", "avx2"})
        if (const KernelTable* table = table_of(name)) return table;
    return &portable_kernels;
}

const KernelTable* selected = best();

}  // namespace

const KernelTable& kernels() {
    return *selected;
}

bool level_supported(const char* name) {
    return table_of(name) != nullptr;
}

bool select_level(const char* name) {
    const KernelTable* table = table_of(name);
    if (table) selected = table;
    return table != nullptr;
}

}  // namespace planaria
