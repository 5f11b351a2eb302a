// Which records of an arena lie in memory: a slot per record that does. Slots make room by a clock
// whose hand passes over what was used, once for every use of late.
#pragma once

#include <cstddef>
#include <cstdint>

namespace planaria {

constexpr int32_t cold_record = -1;     // it lies in the file
constexpr int32_t claimed_record = -2;  // it is about to get a slot
constexpr uint8_t most_uses = 15;       // that a slot is remembered for

struct Slots {
    int32_t* slot_of;  // [records]
    int32_t* owner;    // [slots], or cold_record: free
    uint32_t* pin;     // [slots], the last call that needed it
    uint64_t* ticket;  // [slots], of the read that fills it
    uint8_t* uses;     // [slots]
    size_t records, slots;
};

struct Located {
    size_t missing;
    uint64_t ticket;  // the latest of those that lie in memory
};

// slots[i] is that of index[i], or -1; `missing` has each record without one, once. Those are
// claimed: whoever calls gives them slots.
Located locate(const Slots& table, const int64_t* index, size_t n, uint32_t call, int64_t* slots,
               int64_t* missing);

struct Claimed {
    size_t count;
    size_t hand;
};

// Up to `wanted` slots that this call has not used and that no read later than `done` fills.
Claimed claim(const Slots& table, uint32_t call, uint64_t done, size_t hand, size_t wanted,
              int64_t* slots);

}  // namespace planaria
