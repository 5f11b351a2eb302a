#include "pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace planaria {
namespace {

class Pool {
  public:
    explicit Pool(size_t helpers) {
        for (size_t h = 0; h < helpers; ++h) std::thread([this, h] { help(h); }).detach();
    }

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
                start_.wait(lock, [&] { return round_ != seen; });
                seen = round_;
                if (number + 1 >= parts_) continue;
                part = part_;
            }
            (*part)(number + 1);
            std::lock_guard lock(mutex_);
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable start_, done_;
    const std::function<void(size_t)>* part_ = nullptr;
    size_t parts_ = 0, running_ = 0;
    uint64_t round_ = 0;
};

struct Shared {
    std::mutex in_use;
    Pool* pool = nullptr;
    size_t helpers = 0;
    size_t threads = 1;
    pid_t owner = 0;
};

// Never destroyed: helpers may outlive static destructors at exit.
Shared& shared() {
    static Shared* instance = new Shared;
    return *instance;
}

// The pool with enough helpers. Threads do not survive fork, so a child makes its own; a pool
// that became too small or that belongs to the parent is left behind, asleep.
Pool& pool_for(Shared& s, size_t helpers) {
    if (!s.pool || s.helpers < helpers || s.owner != getpid()) {
        s.pool = new Pool(helpers);
        s.helpers = helpers;
        s.owner = getpid();
    }
    return *s.pool;
}

}  // namespace

void set_threads(size_t count) {
    std::lock_guard lock(shared().in_use);
    shared().threads = std::max<size_t>(count, 1);
}

size_t get_threads() {
    std::lock_guard lock(shared().in_use);
    return shared().threads;
}

void parallel(size_t n, size_t grain, const std::function<void(size_t, size_t)>& work) {
    Shared& s = shared();
    std::unique_lock lock(s.in_use, std::try_to_lock);
    const size_t parts = lock ? std::min(s.threads, n / grain) : 1;
    if (parts <= 1) {
        if (n) work(0, n);
        return;
    }
    pool_for(s, parts - 1).run(parts, [&](size_t part) {
        work(n * part / parts, n * (part + 1) / parts);
    });
}

}  // namespace planaria
