// Slots of shared memory that the communicators of a family use in turn.
//
// A family is a communicator and all communicators split from it. They share an engine. Each rank has slots here that
// only it writes. A Segment takes a slot when it publishes more than a line holds, and keeps it. So a communicator that
// is used again finds its slots in place. If no slot is free, the pool takes back the slots of a segment whose readers
// have all finished. That segment's own counters show this. So ranks need not agree. Communicators that run one after
// the other need no more memory than one.
//
// Collectives that run at once may need more slots than there are. They must not wait for each other. Otherwise rank 0
// could wait in one communicator for rank 1, which waits in another for rank 0. So a segment without a slot uses its
// own. Those pages return to the system after kIdle without use.
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
  static constexpr std::size_t kSlot = 128 * 1024;     // bytes of a slot, see docs/benchmarks/cpu.md
  static constexpr std::uint32_t kSlots = 32;          // of each rank, for collectives
  static constexpr std::uint64_t kForMessage = 4;      // of each rank, for a message. They fit in a second-level cache.
  static constexpr std::uint64_t kIdle = 100'000'000;  // ns

  // These replace the number of a slot in a segment.
  static constexpr std::uint32_t kOwn = kSlots;       // one of the segment's own slots
  static constexpr std::uint32_t kNone = kSlots + 1;  // no slot

  static std::size_t bytes(int ranks);
  // Maps a part of a descriptor, without closing it. rank: this engine's number. places: for each rank of the family,
  // its place among the ranks of this host, or -1. overflows: called when the first segment uses its own slots. From
  // then on the engine calls trim().
  Pool(int fd, std::size_t offset, int rank, std::vector<int> places, std::function<void()> overflows);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int place_of(int rank) const { return places_[static_cast<std::size_t>(rank)]; }
  std::byte* slot(int place, std::uint32_t number) { return slot_of(place, kForMessage + number); }

  // Registers a segment that takes slots during collectives, when nothing may fail. std::bad_alloc: it is not
  // registered.
  void admit();
  // Takes a slot of this rank, or returns kOwn.
  std::uint32_t take(Segment& segment) noexcept;
  void put_back(std::uint32_t number) noexcept { free_.push_back(number); }  // there is always room
  // The segment ends. The slots that it still has are never reused, because other ranks may read them.
  void forget(Segment& segment) noexcept;
  // Whether segments use their own slots.
  bool overflows() const { return !overflowing_.empty(); }
  // Returns the pages of segments' own slots that were unused for kIdle, a few segments at a time.
  void trim(std::uint64_t now) noexcept;

  // A large message whose sender assists with the copy (offers.hpp). A rank sends one such message at a time, and
  // receives one. So one set of slots and counters per rank is enough. Counters of an older message are harmless.
  // `filled` names its message, and the sender is called after `begin_message`. No rank reads its slots after the
  // answer.
  int place() const { return place_; }  // of this rank
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
  // The sender copies into a slot, and the receiver out of it.
  void copy_in(int receiver, std::uint64_t slot, const std::byte* from) {
    const Filled how = filling_.next([&](bool streamed) { return counters_[receiver].reads.of(streamed); });
    mine().how[slot % kForMessage] = how;
    filling_.fill(how, message_slot(place_, slot), from, kSlot);
  }
  void copy_out(int sender, std::uint64_t slot, std::byte* to) {
    const Timing timing(mine().reads, counters_[sender].how[slot % kForMessage], kSlot);
    std::memcpy(to, message_slot(sender, slot), kSlot);
  }
  // A rank's counters: bytes that it has read or is reading, slots that it has emptied, and slots of a message that it
  // has filled.
  std::uint64_t bytes_read(int place) { return counters_[place].read.load(std::memory_order_seq_cst); }
  std::uint64_t emptied(int place) { return counters_[place].emptied.load(std::memory_order_seq_cst); }
  std::uint64_t filled(int place, std::uint64_t message) {
    const std::uint64_t filled = counters_[place].filled.load(std::memory_order_seq_cst);
    return (filled ^ message << kSlotBits) >> kSlotBits == 0 ? filled & ((1u << kSlotBits) - 1) : 0;
  }

 private:
  static constexpr int kSlotBits = 24;  // up to 2 TiB

  struct Counters {
    alignas(64) std::atomic<std::uint64_t> read;  // as a receiver
    alignas(64) std::atomic<std::uint64_t> emptied;
    alignas(64) std::atomic<std::uint64_t> filled;  // as a sender
    Filled how[kForMessage];                        // for its slots
    alignas(64) Costs reads;                        // as a receiver
  };
  // A segment that uses its own slots: its last round with a slot, and when the pool first saw that round.
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
  std::size_t segments_ = 0;  // registered segments. Each has room below.
  std::vector<std::uint32_t> free_;
  std::vector<Segment*> holders_;  // segments with slots, in the order of their first slot
  std::vector<Overflow> overflowing_;
  Filling filling_;
};

}  // namespace aiocomms
