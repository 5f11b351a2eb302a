#include "pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace planaria {
namespace {

class Pool {
  public:
    // As many helpers as the system gives, up to this many.
    explicit Pool(size_t helpers) {
        try {
            while (threads_.size() < helpers)
                threads_.emplace_back([this, h = threads_.size()] { help(h); });
        } catch (const std::system_error&) {
        }
    }

    ~Pool() {
        {
            std::lock_guard lock(mutex_);
            over_ = true;
        }
        start_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    size_t helpers() const { return threads_.size(); }

    // Part 0 runs here, part h + 1 on helper h.
    void run(size_t parts, const std::function<void(size_t)>& part) {
        {
            std::lock_guard lock(mutex_);
            part_ = &part;
            parts_ = parts;
            running_ = parts - 1;
            ++round_;
        }
        start_.notify_all();
        part(0);
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return running_ == 0; });
    }

  private:
    void help(size_t number) {
        for (uint64_t seen = 0;;) {
            const std::function<void(size_t)>* part;
            {
                std::unique_lock lock(mutex_);
                start_.wait(lock, [&] { return over_ || round_ != seen; });
                if (over_) return;
                seen = round_;
                if (number + 1 >= parts_) continue;
                part = part_;
            }
            (*part)(number + 1);
            std::lock_guard lock(mutex_);
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable start_, done_;
    const std::function<void(size_t)>* part_ = nullptr;
    size_t parts_ = 0, running_ = 0;
    uint64_t round_ = 0;
    bool over_ = false;
};

// Denormals count, whatever the caller (torch.set_flush_denormal, say) has set for its thread:
// bits must not depend on which thread computes.
class DefaultFloats {
  public:
#if defined(__x86_64__)
    DefaultFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultFloats() { _mm_setcsr(before_); }
    DefaultFloats(const DefaultFloats&) = delete;

  private:
    unsigned before_;
#endif
};

struct Shared {
    std::mutex in_use;
    Pool* pool = nullptr;
    size_t wanted = 0;  // helpers that the pool was made for
    // Not under the lock: a child that was forked inside a call would wait for it for ever.
    std::atomic<size_t> threads{1};
    pid_t owner = 0;
};

// Never destroyed: helpers may outlive static destructors at exit.
Shared& shared() {
    static Shared* instance = new Shared;
    return *instance;
}

// The pool with so many helpers, no more: each call wakes them all. Threads do not survive fork, so
// a child makes its own and leaves the parent's alone.
Pool& pool_for(Shared& s, size_t helpers) {
    if (s.owner != getpid()) s.pool = nullptr;
    if (!s.pool || s.wanted != helpers) {
        delete s.pool;
        s.pool = nullptr;  // should the next line throw
        s.pool = new Pool(helpers);
        s.wanted = helpers;
        s.owner = getpid();
    }
    return *s.pool;
}

}  // namespace

void set_threads(size_t count) {
    shared().threads = std::max<size_t>(count, 1);
}

size_t get_threads() {
    return shared().threads;
}

void parallel(size_t n, size_t grain, const std::function<void(size_t, size_t)>& work) {
    Shared& s = shared();
    std::unique_lock lock(s.in_use, std::try_to_lock);
    const size_t threads = s.threads;
    size_t parts = lock ? std::min(threads, n / grain) : 1;
    Pool* pool = nullptr;
    if (parts > 1) {
        pool = &pool_for(s, threads - 1);
        parts = std::min(parts, pool->helpers() + 1);
    }
    const DefaultFloats floats;
    if (parts <= 1) {
        if (n) work(0, n);
        return;
    }
    pool->run(parts, [&](size_t part) { work(n * part / parts, n * (part + 1) / parts); });
}

}  // namespace planaria
