#include "slots.hpp"

#include <algorithm>

namespace planaria {
namespace {

constexpr size_t rows_ahead = 16;  // far enough for a miss to be over, near enough to be in cache

}  // namespace

Located locate(const Slots& table, const int64_t* index, size_t n, uint32_t call, int64_t* slots,
               int64_t* missing) {
    Located found{0, 0};
    for (size_t i = 0; i < n; ++i) {
        if (i + rows_ahead < n) __builtin_prefetch(&table.slot_of[index[i + rows_ahead]], 1);
        int32_t& slot = table.slot_of[index[i]];
        slots[i] = slot >= 0 ? slot : -1;
        if (slot >= 0) {
            table.pin[slot] = call;
            table.uses[slot] += table.uses[slot] < most_uses;
            found.ticket = std::max(found.ticket, table.ticket[slot]);
        } else if (slot == cold_record) {
            slot = claimed_record;
            missing[found.missing++] = index[i];
        }
    }
    return found;
}

Claimed claim(const Slots& table, uint32_t call, uint64_t done, size_t hand, size_t wanted,
              int64_t* slots) {
    size_t count = 0;
    for (size_t seen = 0; seen < table.slots * (most_uses + 1) && count < wanted; ++seen) {
        const size_t slot = hand;
        hand = hand + 1 < table.slots ? hand + 1 : 0;
        if (table.pin[slot] == call || table.ticket[slot] > done) continue;
        if (table.owner[slot] >= 0 && table.uses[slot] > 0) {
            --table.uses[slot];
            continue;
        }
        table.pin[slot] = call;
        slots[count++] = static_cast<int64_t>(slot);
    }
    return {count, hand};
}

}  // namespace planaria
