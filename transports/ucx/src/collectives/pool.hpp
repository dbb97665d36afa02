// Slots of shared memory that the communicators of a family use in turn.
//
// A family is a communicator and all that are split from it: they share an engine. Each rank has slots here that it
// alone writes. A Segment takes one when it publishes more than a line holds, and keeps it: a communicator that is used
// again finds its slots where they were. When another segment needs one and none is free, the pool takes back those of
// a segment whose readers are all done with them, which that segment's own counters tell. So no rank has to agree with
// another, and communicators that are used one after the other need no more memory than one of them.
//
// Collectives that are under way at once may need more slots than there are. They must not wait for each other: rank 0
// could wait in one communicator for rank 1, which waits in another for rank 0. So a segment that gets none uses its
// own, whose pages go back to the system when they have not been used for kIdle.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "collectives/filling.hpp"

namespace aiocomms {

class Segment;

class Pool {
 public:
  static constexpr std::size_t kSlot = 128 * 1024;     // bytes of a slot; see docs/benchmarks/cpu.md
  static constexpr std::uint32_t kSlots = 32;          // of each rank, for collectives
  static constexpr std::uint64_t kForMessage = 4;      // of each rank, for a message; less than a second-level cache
  static constexpr std::uint64_t kIdle = 100'000'000;  // ns

  // What a segment has in the place of a slot's number.
  static constexpr std::uint32_t kOwn = kSlots;       // one of its own
  static constexpr std::uint32_t kNone = kSlots + 1;  // none

  static std::size_t bytes(int ranks);
  // Maps a part of a descriptor, which it does not close. rank: this engine's number. places: by the numbers of all
  // ranks of the family, where each is among those of this host; -1: it is on another. overflows: is told when a first
  // segment uses slots of its own, so that somebody calls trim() from then on.
  Pool(int fd, std::size_t offset, int rank, std::vector<int> places, std::function<void()> overflows);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int place_of(int rank) const { return places_[static_cast<std::size_t>(rank)]; }
  std::byte* slot(int place, std::uint32_t number) { return slot_of(place, kForMessage + number); }

  // A segment that will take slots, amid collectives, where nothing may fail. std::bad_alloc: it will not.
  void admit();
  // The number of a slot of this rank's, or kOwn.
  std::uint32_t take(Segment& segment) noexcept;
  void put_back(std::uint32_t number) noexcept { free_.push_back(number); }  // as many as there are fit in
  // The segment is gone. What it still has is used no more, for somebody may read it.
  void forget(Segment& segment) noexcept;
  // Whether segments have slots of their own.
  bool overflows() const { return !overflowing_.empty(); }
  // Give the pages of slots back that segments have of their own and have not used for kIdle; of a few at a time.
  void trim(std::uint64_t now) noexcept;

  // A large message with whose copying its sender assists (offers.hpp). A rank sends one such message at a time, and
  // receives one at a time, so one set of slots and counters per rank does. Counters that are about an older message do
  // no harm: `filled` names its message; and a sender is called after `begin_message`, and nobody reads its slots after
  // the answer.
  int place() const { return place_; }  // this rank's
  std::byte* message_slot(int place, std::uint64_t slot) { return slot_of(place, slot % kForMessage); }
  void begin_message() {
    empty(0);
    read(0);
  }
  void read(std::uint64_t bytes) { mine().read.store(bytes, std::memory_order_seq_cst); }
  void empty(std::uint64_t slots) { mine().emptied.store(slots, std::memory_order_seq_cst); }
  void fill(std::uint64_t message, std::uint64_t slots) {
    mine().filled.store(message << kSlotBits | slots, std::memory_order_seq_cst);
  }
  // Copy into a slot, as the sender, and out of it, as the receiver.
  void copy_in(int receiver, std::uint64_t slot, const std::byte* from) {
    const Filled how = filling_.next([&](bool streamed) { return counters_[receiver].reads.of(streamed); });
    mine().how[slot % kForMessage] = how;
    filling_.fill(how, message_slot(place_, slot), from, kSlot);
  }
  void copy_out(int sender, std::uint64_t slot, std::byte* to) {
    const Timing timing(mine().reads, counters_[sender].how[slot % kForMessage], kSlot);
    std::memcpy(to, message_slot(sender, slot), kSlot);
  }
  // Bytes that a rank has read, or is reading, and slots that it has emptied; slots that it has filled of a message.
  std::uint64_t bytes_read(int place) { return counters_[place].read.load(std::memory_order_seq_cst); }
  std::uint64_t emptied(int place) { return counters_[place].emptied.load(std::memory_order_seq_cst); }
  std::uint64_t filled(int place, std::uint64_t message) {
    const std::uint64_t filled = counters_[place].filled.load(std::memory_order_seq_cst);
    return (filled ^ message << kSlotBits) >> kSlotBits == 0 ? filled & ((1u << kSlotBits) - 1) : 0;
  }

 private:
  static constexpr int kSlotBits = 24;  // 2 TiB

  struct Counters {
    alignas(64) std::atomic<std::uint64_t> read;  // as a receiver
    alignas(64) std::atomic<std::uint64_t> emptied;
    alignas(64) std::atomic<std::uint64_t> filled;  // as a sender
    Filled how[kForMessage];                        // of its slots
    alignas(64) Costs reads;                        // as a receiver
  };
  // A segment that uses slots of its own: how far it had come, and when that was first seen.
  struct Overflow {
    Segment* segment;
    std::uint64_t round;
    std::uint64_t since;
  };

  Counters& mine() { return counters_[place_]; }
  std::byte* slot_of(int place, std::uint64_t number) {
    return slots_ + (static_cast<std::uint64_t>(place) * (kForMessage + kSlots) + number) * kSlot;
  }
  void reclaim() noexcept;

  const std::vector<int> places_;
  const int place_;
  const std::size_t bytes_;
  const std::function<void()> overflows_;
  void* memory_;
  Counters* counters_;
  std::byte* slots_;
  std::size_t segments_ = 0;  // that have been admitted: there is room for each below
  std::vector<std::uint32_t> free_;
  std::vector<Segment*> holders_;  // segments that have slots, from when they took the first
  std::vector<Overflow> overflowing_;
  Filling filling_;
};

}  // namespace aiocomms
