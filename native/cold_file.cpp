#include "cold_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels.hpp"

namespace planaria {
namespace {

constexpr size_t block_alignment = 4096;   // of memory, for any device
constexpr size_t range_bytes = 64 << 10;   // one request, where records lie in a row
constexpr size_t batch_bytes = 256 << 10;  // what is copied at once to be written
constexpr size_t requests_at_a_time = 4;   // that a thread takes

uint8_t* allocate_blocks(size_t bytes) {
    const size_t whole = (bytes + block_alignment - 1) / block_alignment * block_alignment;
    void* const found = std::aligned_alloc(block_alignment, whole);
    if (!found) throw std::bad_alloc();
    return static_cast<uint8_t*>(found);
}

}  // namespace

ColdFile::ColdFile(int descriptor, size_t record_bytes, size_t stride, size_t threads, size_t room)
    : descriptor_(descriptor),
      record_bytes_(record_bytes),
      stride_(stride),
      most_writers_(std::max<size_t>(1, threads / 2)),
      room_(std::max(room, batch_bytes + stride)),
      range_records_(std::max<size_t>(1, range_bytes / stride)) {
    try {
        for (size_t i = 0; i < threads; ++i) {
            std::shared_ptr<uint8_t> bounce(allocate_blocks(range_records_ * stride), std::free);
            threads_.emplace_back([this, bounce] { work(bounce.get()); });
        }
    } catch (...) {
        end();
        throw;
    }
}

ColdFile::~ColdFile() {
    end();
    close(descriptor_);
}

void ColdFile::end() {
    {
        const Lock lock(mutex_);
        over_ = true;  // nobody will read what is not written yet
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
}

// ---------------------------------------------------------------------------------- the owner's

// Room for blocks of so many records, once so much of what was to be written before is.
std::shared_ptr<ColdFile::Batch> ColdFile::new_writes(Lock& lock, size_t records) {
    auto batch = std::make_shared<Batch>();
    batch->bytes = records * stride_;
    batch->writes = true;
    change_.wait(lock, [&] { return failure_.is || waiting_bytes_ + batch->bytes <= room_; });
    batch->blocks = {allocate_blocks(batch->bytes), std::free};
    // What lies behind a record in its blocks is written, too.
    std::memset(batch->blocks.get(), 0, batch->bytes);
    waiting_bytes_ += batch->bytes;
    return batch;
}

void ColdFile::queue_writes(const std::shared_ptr<Batch>& batch) {
    batch->left = batch->requests.size();
    writes_.push_back(batch);
    work_.notify_all();
}

void ColdFile::write(const int64_t* records, const int64_t* slots, size_t n, const uint8_t* values,
                     uint32_t* sums) {
    const size_t most = std::max<size_t>(1, batch_bytes / stride_);
    for (size_t begin = 0; begin < n; begin += most) {
        const size_t end = std::min(begin + most, n);
        Lock lock(mutex_);
        const auto batch = new_writes(lock, end - begin);
        for (size_t i = begin; i < end; ++i) {
            const auto record = static_cast<size_t>(records[i]);
            uint8_t* const block = batch->blocks.get() + (i - begin) * stride_;
            std::memcpy(block, values + static_cast<size_t>(slots[i]) * record_bytes_,
                        record_bytes_);
            sums[record] = kernels().crc32(0, block, record_bytes_);
            // Two writes of one record might change places.
            change_.wait(lock, [&] { return failure_.is || !pending_.count(record); });
            pending_[record] = block;
            batch->requests.push_back({record, 1, block});
        }
        queue_writes(batch);
    }
}

void ColdFile::write_range(size_t first, size_t count, const uint8_t* values, uint32_t* sums) {
    settle();
    const size_t most = std::max<size_t>(1, batch_bytes / stride_);
    for (size_t begin = 0; begin < count; begin += most) {
        const size_t some = std::min(most, count - begin);
        Lock lock(mutex_);
        const auto batch = new_writes(lock, some);
        lock.unlock();
        for (size_t i = 0; i < some; ++i) {
            uint8_t* const block = batch->blocks.get() + i * stride_;
            std::memcpy(block, values + (begin + i) * record_bytes_, record_bytes_);
            sums[first + begin + i] = kernels().crc32(0, block, record_bytes_);
        }
        for (size_t at = 0; at < some; at += range_records_)
            batch->requests.push_back({first + begin + at, std::min(range_records_, some - at),
                                       batch->blocks.get() + at * stride_});
        lock.lock();
        queue_writes(batch);
    }
    settle();
}

uint64_t ColdFile::start_reads(const std::shared_ptr<Batch>& batch) {
    batch->left = batch->requests.size();
    batch->ticket = ++issued_;
    if (batch->left) {
        open_.insert(batch->ticket);
        reads_.push_back(batch);
        const size_t takers = (batch->left + requests_at_a_time - 1) / requests_at_a_time;
        for (size_t i = 0; i < std::min(takers, threads_.size()); ++i) work_.notify_one();
    }
    return batch->ticket;
}

uint64_t ColdFile::read(const int64_t* records, const int64_t* slots, size_t n, uint8_t* values,
                        const uint32_t* sums) {
    auto batch = std::make_shared<Batch>();
    batch->sums = sums;
    const Lock lock(mutex_);
    for (size_t i = 0; i < n; ++i) {
        const auto record = static_cast<size_t>(records[i]);
        uint8_t* const at = values + static_cast<size_t>(slots[i]) * record_bytes_;
        const auto found = pending_.find(record);
        if (found != pending_.end())
            std::memcpy(at, found->second, record_bytes_);
        else
            batch->requests.push_back({record, 1, at});
    }
    return start_reads(batch);
}

void ColdFile::read_range(size_t first, size_t count, uint8_t* values, const uint32_t* sums) {
    settle();
    auto batch = std::make_shared<Batch>();
    batch->sums = sums;
    for (size_t at = 0; at < count; at += range_records_)
        batch->requests.push_back(
            {first + at, std::min(range_records_, count - at), values + at * record_bytes_});
    uint64_t ticket;
    {
        const Lock lock(mutex_);
        ticket = start_reads(batch);
    }
    wait(ticket);
}

void ColdFile::wait(uint64_t ticket) {
    Lock lock(mutex_);
    // After a failure, too: the threads must be done with the caller's memory.
    change_.wait(lock, [&] { return open_.empty() || *open_.begin() > ticket; });
}

void ColdFile::settle() {
    Lock lock(mutex_);
    change_.wait(lock, [&] { return waiting_bytes_ == 0; });
}

uint64_t ColdFile::done() {
    const Lock lock(mutex_);
    return open_.empty() ? issued_ : *open_.begin() - 1;
}

ColdFile::Failure ColdFile::failure() {
    const Lock lock(mutex_);
    return failure_;
}

// ------------------------------------------------------------------------------- in the threads

void ColdFile::work(uint8_t* bounce) {
    Lock lock(mutex_);
    for (;;) {
        const auto may_write = [&] { return !writes_.empty() && writing_ < most_writers_; };
        work_.wait(lock, [&] { return over_ || !reads_.empty() || may_write(); });
        if (over_) return;
        const bool writes = reads_.empty();  // somebody waits for what is read
        auto& queue = writes ? writes_ : reads_;
        const std::shared_ptr<Batch> batch = queue.front();
        const size_t begin = batch->next;
        const size_t end = std::min(begin + requests_at_a_time, batch->requests.size());
        batch->next = end;
        if (end == batch->requests.size()) queue.pop_front();
        writing_ += writes;
        lock.unlock();
        for (size_t i = begin; i < end; ++i) serve(*batch, batch->requests[i], bounce);
        lock.lock();
        writing_ -= writes;
        finish(*batch, begin, end);
    }
}

void ColdFile::serve(Batch& batch, const Request& request, uint8_t* bounce) {
    const size_t bytes = request.count * stride_, offset = request.first * stride_;
    if (batch.writes) return transfer(true, request.at, bytes, offset, request.first);
    transfer(false, bounce, bytes, offset, request.first);
    for (size_t i = 0; i < request.count; ++i) {
        const uint8_t* const block = bounce + i * stride_;
        if (kernels().crc32(0, block, record_bytes_) != batch.sums[request.first + i])
            return fail(false, 0, request.first + i);
        std::memcpy(request.at + i * record_bytes_, block, record_bytes_);
    }
}

void ColdFile::transfer(bool writes, uint8_t* at, size_t bytes, size_t offset, size_t record) {
    for (size_t moved = 0; moved < bytes;) {
        const auto where = static_cast<off_t>(offset + moved);
        const ssize_t some = writes ? pwrite(descriptor_, at + moved, bytes - moved, where)
                                    : pread(descriptor_, at + moved, bytes - moved, where);
        if (some < 0 && errno == EINTR) continue;
        if (some <= 0) return fail(writes, some < 0 ? errno : -1, record);
        moved += static_cast<size_t>(some);
    }
}

void ColdFile::finish(Batch& batch, size_t begin, size_t end) {
    if (batch.writes)
        for (size_t i = begin; i < end; ++i) {
            const auto found = pending_.find(batch.requests[i].first);
            if (found != pending_.end() && found->second == batch.requests[i].at)
                pending_.erase(found);
        }
    batch.left -= end - begin;
    if (batch.left == 0) {
        if (batch.writes)
            waiting_bytes_ -= batch.bytes;
        else
            open_.erase(batch.ticket);
    }
    if (batch.left == 0 || batch.writes) change_.notify_all();
    if (!writes_.empty()) work_.notify_one();  // as many may write again
}

void ColdFile::fail(bool writing, int error, size_t record) {
    const Lock lock(mutex_);
    if (!failure_.is) failure_ = {true, writing, error, record};
    change_.notify_all();
}

}  // namespace planaria
