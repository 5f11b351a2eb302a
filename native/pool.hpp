// A pool of threads that splits one call's rows into contiguous parts.
#pragma once

#include <cstddef>
#include <functional>

namespace planaria {

// How many threads a call may use, the caller's own included.
void set_threads(size_t count);
size_t get_threads();

// Calls work(begin, end) on parts of [0, n) and returns when all are done. A part has at least
// `grain` elements; a call that is too small, or that comes while another call has the pool,
// runs in the caller's thread alone. `work` must not throw.
void parallel(size_t n, size_t grain, const std::function<void(size_t, size_t)>& work);

}  // namespace planaria
