// What a server with cold records needs: slots in memory, and the file that the others lie in.
#include "arguments.hpp"
#include "cold_file.hpp"
#include "slots.hpp"

namespace planaria {
namespace {

using Slot = Array<int32_t, 1>;

Slots make_slots(const Slot& slot_of, const Slot& owner, const Array<uint32_t, 1>& pin,
                 const Array<uint64_t, 1>& ticket, const Bytes& uses) {
    const size_t slots = owner.shape(0);
    require(slots > 0 && slots < size_t{1} << 31 && pin.shape(0) == slots &&
                ticket.shape(0) == slots && uses.shape(0) == slots,
            "owner, pin, ticket and uses need an entry for every slot");
    return {slot_of.data(), owner.data(),     pin.data(), ticket.data(),
            uses.data(),    slot_of.shape(0), slots};
}

nb::tuple locate_slots(Slot slot_of, Slot owner, Array<uint32_t, 1> pin, Array<uint64_t, 1> ticket,
                       Bytes uses, Index index, uint32_t call, IndexOut slots, IndexOut missing) {
    const Slots table = make_slots(slot_of, owner, pin, ticket, uses);
    const size_t n = index.shape(0);
    require(slots.shape(0) == n && missing.shape(0) >= n, "slots and missing do not fit the index");
    Located found;
    {
        nb::gil_scoped_release release;
        check_range(index.data(), n, table.records, "index");
        for (size_t i = 0; i < n; ++i)
            require(table.slot_of[index.data()[i]] < static_cast<int64_t>(table.slots),
                    "slot_of names a slot that is not there");
        found = locate(table, index.data(), n, call, slots.data(), missing.data());
    }
    return nb::make_tuple(found.missing, found.ticket);
}

nb::tuple claim_slots(Slot slot_of, Slot owner, Array<uint32_t, 1> pin, Array<uint64_t, 1> ticket,
                      Bytes uses, uint32_t call, uint64_t done, size_t hand, IndexOut slots) {
    const Slots table = make_slots(slot_of, owner, pin, ticket, uses);
    require(hand < table.slots, "hand is behind the last slot");
    Claimed found;
    {
        nb::gil_scoped_release release;
        found = claim(table, call, done, hand, slots.shape(0), slots.data());
    }
    return nb::make_tuple(found.count, found.hand);
}

// A ColdFile that knows how many records there are, and refuses what lies outside.
struct Cold {
    size_t record_bytes;
    ColdFile file;

    Cold(int descriptor, size_t bytes, size_t stride, size_t threads, size_t room)
        : record_bytes(bytes), file(descriptor, bytes, stride, threads, room) {}

    void check(const Index& records, const Index& slots, size_t held, size_t words,
               size_t sums) const {
        require(records.shape(0) == slots.shape(0), "records and slots must be as many");
        require(words * 4 == record_bytes, "values do not have the size of a record");
        check_range(records.data(), records.shape(0), sums, "records");
        check_range(slots.data(), slots.shape(0), held, "slots");
    }
    void check(size_t first, size_t count, size_t words, size_t sums) const {
        require(words * 4 == record_bytes, "values do not have the size of a record");
        require(first <= sums && count <= sums - first, "the range ends behind the last record");
    }
};

void write_cold(Cold& cold, Index records, Index slots, ConstRecords values,
                Array<uint32_t, 1> sums) {
    nb::gil_scoped_release release;
    cold.check(records, slots, values.shape(0), values.shape(1), sums.shape(0));
    check_distinct(records.data(), records.shape(0), sums.shape(0), "records");
    cold.file.write(records.data(), slots.data(), records.shape(0),
                    reinterpret_cast<const uint8_t*>(values.data()), sums.data());
}

uint64_t read_cold(Cold& cold, Index records, Index slots, Records values,
                   Array<const uint32_t, 1> sums) {
    nb::gil_scoped_release release;
    cold.check(records, slots, values.shape(0), values.shape(1), sums.shape(0));
    check_distinct(slots.data(), slots.shape(0), values.shape(0), "slots");
    return cold.file.read(records.data(), slots.data(), records.shape(0),
                          reinterpret_cast<uint8_t*>(values.data()), sums.data());
}

void write_range(Cold& cold, size_t first, ConstRecords values, Array<uint32_t, 1> sums) {
    cold.check(first, values.shape(0), values.shape(1), sums.shape(0));
    nb::gil_scoped_release release;
    cold.file.write_range(first, values.shape(0), reinterpret_cast<const uint8_t*>(values.data()),
                          sums.data());
}

void read_range(Cold& cold, size_t first, Records values, Array<const uint32_t, 1> sums) {
    cold.check(first, values.shape(0), values.shape(1), sums.shape(0));
    nb::gil_scoped_release release;
    cold.file.read_range(first, values.shape(0), reinterpret_cast<uint8_t*>(values.data()),
                         sums.data());
}

// None, or (whether it was written to, the error's number, the record).
std::optional<std::tuple<bool, int, size_t>> failure(Cold& cold) {
    const auto found = cold.file.failure();
    if (!found.is) return std::nullopt;
    return std::make_tuple(found.writing, found.error, found.record);
}

void open_cold(Cold* at, int descriptor, size_t record_bytes, size_t stride, size_t threads,
               size_t room) {
    require(record_bytes > 0 && record_bytes <= stride && stride < size_t{1} << 32,
            "stride must be a record's size or more");
    require(threads > 0 && threads <= 256, "threads must be between 1 and 256");
    new (at) Cold(descriptor, record_bytes, stride, threads, room);
}

}  // namespace

void bind_tiers(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> released;
    m.def("locate_slots", &locate_slots);
    m.def("claim_slots", &claim_slots);
    nb::class_<Cold>(m, "ColdFile")
        .def("__init__", &open_cold)
        .def("write", &write_cold)
        // Read into by other threads, until a later wait.
        .def("read", &read_cold, nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
        .def("write_range", &write_range)
        .def("read_range", &read_range)
        .def(
            "wait", [](Cold& cold, uint64_t ticket) { cold.file.wait(ticket); }, released)
        .def(
            "settle", [](Cold& cold) { cold.file.settle(); }, released)
        .def("done", [](Cold& cold) { return cold.file.done(); })
        .def("failure", &failure);
}

}  // namespace planaria
