#include "peeking.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <atomic>

#include "kernels.hpp"

namespace planaria {
namespace {

// Of all sources together, at a time: they stay in the cache of a core until they are summed.
constexpr size_t cached_bytes = 512 << 10;
constexpr size_t least_bytes = 32 << 10, alignment = 4096;

// The system copies, so that memory which is gone by now is an error and no fault.
bool read(int64_t process, uint64_t at, uint8_t* to, size_t bytes) {
    while (bytes) {
        const iovec here{to, bytes};
        const iovec there{reinterpret_cast<void*>(at), bytes};
        const ssize_t got = process_vm_readv(static_cast<pid_t>(process), &here, 1, &there, 1, 0);
        if (got <= 0) return false;
        to += got;
        at += static_cast<uint64_t>(got);
        bytes -= static_cast<size_t>(got);
    }
    return true;
}

// Touched once, and kept: fresh pages cost more than what is done with them.
uint8_t* buffer(size_t bytes) {
    static thread_local std::vector<uint8_t> kept;
    if (kept.size() < bytes + alignment) kept.resize(bytes + alignment);
    const auto start = reinterpret_cast<uintptr_t>(kept.data());
    return kept.data() + (alignment - start % alignment) % alignment;
}

}  // namespace

int64_t peek(const std::vector<Source>& sources, uint8_t* out, size_t bytes) {
    const size_t k = sources.size();
    size_t piece = std::max(cached_bytes / k / alignment * alignment, least_bytes);
    piece = std::min(piece, std::max<size_t>(bytes, 1));
    uint8_t* const read_to = buffer(k * piece);
    std::vector<const uint8_t*> in;
    std::vector<uint8_t> coef;
    for (size_t i = 0; i < k; ++i) {
        in.push_back(read_to + i * piece);
        coef.push_back(sources[i].coef);
    }
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t here = std::min(piece, bytes - at);
        for (size_t i = 0; i < k; ++i)
            if (!read(sources[i].process, sources[i].at + at, read_to + i * piece, here))
                return -static_cast<int64_t>(i + 1);
        uint8_t* const to = out + at;
        kernels().combine(in.data(), k, &to, 1, coef.data(), 0, here);
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (size_t i = 0; i < k; ++i) {
        uint64_t found[2];
        if (!read(sources[i].process, sources[i].counter, reinterpret_cast<uint8_t*>(found),
                  sizeof found) ||
            found[0] != sources[i].key)
            return -static_cast<int64_t>(i + 1);
        if (found[1] != sources[i].count) return static_cast<int64_t>(i + 1);
    }
    return 0;
}

void count_change(uint64_t& count) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    __atomic_fetch_add(&count, 1, __ATOMIC_SEQ_CST);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace planaria
