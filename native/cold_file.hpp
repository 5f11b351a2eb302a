// The file of an arena's cold records: each in whole blocks of its own, with a checksum in memory.
// Threads read and write it, many requests at a time, while the owner goes on; what is still to be
// written is read from memory. It is the memory of a living process, and says nothing to the next.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

namespace planaria {

class ColdFile {
  public:
    // stride: from one record to the next in the file. room: bytes that may wait to be written.
    // Closes the descriptor in the end.
    ColdFile(int descriptor, size_t record_bytes, size_t stride, size_t threads, size_t room);
    ~ColdFile();
    ColdFile(const ColdFile&) = delete;
    ColdFile& operator=(const ColdFile&) = delete;

    // Takes copies of values[slots[i]], to be written as records[i], and notes their checksums.
    // Waits while there is no room.
    void write(const int64_t* records, const int64_t* slots, size_t n, const uint8_t* values,
               uint32_t* sums);
    // Begins to read records[i] into values[slots[i]]. Both arrays must live until that is done.
    uint64_t read(const int64_t* records, const int64_t* slots, size_t n, uint8_t* values,
                  const uint32_t* sums);
    // Records in a row; returns when they are there.
    void write_range(size_t first, size_t count, const uint8_t* values, uint32_t* sums);
    void read_range(size_t first, size_t count, uint8_t* values, const uint32_t* sums);
    // Until that read, or every write, is done, or something has failed.
    void wait(uint64_t ticket);
    void settle();
    // All reads up to this one are done.
    uint64_t done();

    struct Failure {
        bool is, writing;
        int error;  // 0: other bytes came back than were written; -1: fewer
        size_t record;
    };
    Failure failure();

  private:
    struct Request {
        size_t first, count;
        uint8_t* at;  // a record's bytes one behind the other, or blocks if they are written
    };
    struct Batch {
        std::vector<Request> requests;
        size_t next = 0, left = 0;
        uint64_t ticket = 0;
        const uint32_t* sums = nullptr;
        std::unique_ptr<uint8_t, void (*)(void*)> blocks{nullptr, nullptr};
        size_t bytes = 0;
        bool writes = false;
    };
    using Lock = std::unique_lock<std::mutex>;

    std::shared_ptr<Batch> new_writes(Lock& lock, size_t records);
    uint64_t start_reads(const std::shared_ptr<Batch>& batch);
    void queue_writes(const std::shared_ptr<Batch>& batch);
    void end();
    void work(uint8_t* bounce);
    void serve(Batch& batch, const Request& request, uint8_t* bounce);
    void transfer(bool writes, uint8_t* at, size_t bytes, size_t offset, size_t record);
    void finish(Batch& batch, size_t begin, size_t end);
    void fail(bool writing, int error, size_t record);

    const int descriptor_;
    const size_t record_bytes_, stride_, most_writers_, room_, range_records_;
    std::mutex mutex_;
    std::condition_variable work_, change_;
    std::deque<std::shared_ptr<Batch>> reads_, writes_;   // with requests that nobody has taken
    std::unordered_map<size_t, const uint8_t*> pending_;  // by record: what is to be written
    std::set<uint64_t> open_;                             // tickets of reads under way
    uint64_t issued_ = 0;
    size_t waiting_bytes_ = 0, writing_ = 0;
    bool over_ = false;
    Failure failure_{false, false, 0, 0};
    std::vector<std::thread> threads_;
};

}  // namespace planaria
