// Shared memory of the ranks of one communicator on one host.
//
// A collective is a sequence of rounds, counted through the life of the communicator. In round n each rank publishes a
// line, with a few bytes in it or a slot of data behind it; others wait for the line and read. A slot serves again
// kDepth rounds later, when every rank has said that it is done with it. Slots are the family's (pool.hpp), or, if none
// is free, the segment's own. The lines of a rank are each on a cache line
// of their own, so that a wait costs one transfer. (The scheme of MPICH's "release gather" and of Li, Hoefler, Snir:
// "NUMA-Aware Shared-Memory Collective Communication for MPI", HPDC 2013: contributions side by side, flags apart.)
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/filling.hpp"
#include "collectives/pool.hpp"
#include "net/fence.hpp"

namespace aiocomms {

// The memory that the ranks of a communicator share on one host, as one of them sees it.
struct SharedMemory {
  int fd;
  int rank;
  int ranks;
  Pool* pool = nullptr;          // of their family; null: segments have their own slots alone
  std::vector<int> places = {};  // of the ranks in it
};

class Segment {
 public:
  static constexpr std::uint64_t kDepth = 8;         // rounds that may be under way at once
  static constexpr std::size_t kInline = 48;         // bytes that travel in a line itself
  static constexpr std::size_t kSlot = Pool::kSlot;  // bytes of a slot

  struct alignas(64) Line {
    std::atomic<std::uint64_t> round;  // n + 1 once round n is published
    std::uint64_t fingerprint;         // of the collective
    union {
      std::byte data[kInline];
      struct {
        std::uint32_t number;
        Filled how;
      } slot;  // that has the data
    };
  };

  // More ranks would have less than a cache line each of a slot that they share.
  static constexpr int kMostRanks = static_cast<int>(kSlot / sizeof(Line));

  static std::size_t bytes(int ranks);
  // A descriptor of fresh, private, anonymous shared memory: for a segment, another one, and a Board, as lanes need
  // them; and for a Pool behind them. Throws std::system_error; std::invalid_argument: there are more than kMostRanks
  // ranks, or none.
  static int create(int ranks, bool with_pool);
  static std::size_t place_of_pool(int ranks);  // in that memory

  // Maps a descriptor from `offset` on, and does not close it. Throws the same, std::system_error also if it is too
  // small.
  explicit Segment(SharedMemory memory, std::size_t offset = 0);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Whether every rank is done with what this one has published kDepth rounds before `round`.
  bool writable(std::uint64_t round);
  Line& line(int rank, std::uint64_t round) { return owners_[rank].lines[round % kDepth]; }
  // This rank's slot in a round that is writable.
  std::byte* own_slot(std::uint64_t round) noexcept {
    std::uint32_t& number = held_[round % kDepth];
    if (number == Pool::kNone) number = pool_ ? pool_->take(*this) : Pool::kOwn;
    last_slot_ = round;
    line(rank_, round).slot.number = number;
    return slot(rank_, round);
  }
  // The same once it has that, or another rank's, of a round that it has published.
  std::byte* slot(int rank, std::uint64_t round) {
    const std::uint32_t number = line(rank, round).slot.number;
    return pool_ && number < Pool::kSlots ? pool_->slot(places_[rank], number) : own(rank, round);
  }
  // Copy into this rank's slot of a round that is writable, or out of one that is published. `from` and `to` may be
  // anything where there are no bytes.
  void copy_in(std::uint64_t round, std::size_t offset, const void* from, std::size_t bytes) noexcept;
  void copy_out(int rank, std::uint64_t round, std::size_t offset, void* to, std::size_t bytes) {
    const Timing timing(owners_[rank_].reads, how(rank, round), bytes);
    if (bytes) std::memcpy(to, slot(rank, round) + offset, bytes);
  }
  // The same of whoever reads the slot itself: to be kept while it does.
  Timing timing(int rank, std::uint64_t round, std::size_t bytes) {
    return {owners_[rank_].reads, how(rank, round), bytes};
  }
  // The last round in which this rank had a slot.
  std::uint64_t last_slot() const { return last_slot_; }
  // Give the pool's slots back to it. False: somebody may still read what is in them.
  bool give_back() noexcept;
  // Whether it has slots of the pool, which it would have given back if nobody read them.
  bool holds_slots() noexcept;
  // Give the pages of its own slots back to the system. False: somebody may still read them.
  bool release_own() noexcept;

  // Phase 1 of a round is published in its line, phase 2, where there is one, beside it.
  void publish(std::uint64_t round) { line(rank_, round).round.store(round + 1, std::memory_order_seq_cst); }
  bool published(int rank, std::uint64_t round) {
    return line(rank, round).round.load(std::memory_order_seq_cst) > round;
  }
  void publish_second(std::uint64_t round) {
    owners_[rank_].second[round % kDepth].round.store(round + 1, std::memory_order_seq_cst);
  }
  bool published_second(int rank, std::uint64_t round) {
    return owners_[rank].second[round % kDepth].round.load(std::memory_order_seq_cst) > round;
  }
  // This rank reads nothing of the rounds below `rounds` any more.
  void finish(std::uint64_t rounds) { owners_[rank_].done.round.store(rounds, std::memory_order_seq_cst); }
  // A rank reads nothing at all any more: this one, or one that is gone and cannot say so.
  void depart(int rank) { owners_[rank].done.round.store(kDeparted, std::memory_order_seq_cst); }

  // What is waited for: in a round, or of a rank. kAll: the lines of the ranks from `rank` on.
  struct Awaited {
    enum What : std::uint8_t { kAnything, kWritable, kAll, kOne, kSecond, kNever } what = kAnything;
    int rank = 0;
    std::uint64_t round = 0;
  };
  bool has_come(const Awaited& awaited);

  // A rank that is about to sleep says so first, then looks again; one that publishes looks who sleeps afterwards. All
  // of it sequentially consistent, so that one of the two sees the other (Dekker's way).
  void sleep(bool asleep) {
    if (asleep) owners_[rank_].core.round.store(0, std::memory_order_relaxed);
    owners_[rank_].rest.is.store(asleep ? kAsleep : kAwake, std::memory_order_seq_cst);
  }
  // Whether the engine's thread of `rank` slept; whoever is told so wakes it. A post that blocks is woken here.
  bool claim_wake(int rank) {
    Rest& rest = owners_[rank].rest;
    const std::uint64_t is = rest.is.load(std::memory_order_seq_cst);
    if (is == kAwake || (is == kBlocked && !has_come(unpacked(rest.awaits.load(std::memory_order_seq_cst))))) {
      return false;
    }
    const std::uint64_t was = rest.is.exchange(kAwake, std::memory_order_seq_cst);
    if (was == kBlocked) unblock(rank);
    return was == kAsleep;
  }
  // A post that blocks does likewise. It keeps its core, for which it waits, and is woken by the rank that publishes
  // the last of what it awaits: if each rank that publishes woke each that waits for all, n ranks would be woken n
  // times. True: the engine's thread slept, and nobody else wakes it from now on.
  bool begin_block(const Awaited& awaited) {
    owners_[rank_].rest.awaits.store(packed(awaited), std::memory_order_seq_cst);
    return owners_[rank_].rest.is.exchange(kBlocked, std::memory_order_seq_cst) == kAsleep;
  }
  void block(std::uint64_t most_ns);  // returns at once if it has come since
  // A message for `rank` has been given to UCX, which may want it to look whatever it awaits. One that begins to block
  // just now, or for which UCX has no room yet, may miss it, and then blocks for as long as it may: a fence would cost
  // each message more.
  void rouse(int rank) {
    std::atomic<std::uint64_t>& is = owners_[rank].rest.is;
    std::uint64_t was = kBlocked;
    if (is.load(std::memory_order_relaxed) != was) return;
    if (is.compare_exchange_strong(was, kAwake, std::memory_order_seq_cst)) unblock(rank);
  }
  void end_block() { owners_[rank_].rest.is.store(kAwake, std::memory_order_seq_cst); }

  // The core that this rank last posted from, for ranks that wait for it: one that has the same core must give it away
  // first. A rank that sleeps has none. Nothing is ordered by it, and one that is out of date costs a turn.
  void note_core(std::uint64_t core) {
    std::atomic<std::uint64_t>& mine = owners_[rank_].core.round;
    if (mine.load(std::memory_order_relaxed) != core + 1) mine.store(core + 1, std::memory_order_relaxed);
  }
  bool shares_core(std::uint64_t core) const {
    for (int rank = 0; rank < ranks_; ++rank) {
      const Owner& other = owners_[rank];
      if (rank != rank_ && other.core.round.load(std::memory_order_relaxed) == core + 1 &&
          other.rest.is.load(std::memory_order_relaxed) != kBlocked) {
        return true;
      }
    }
    return false;
  }

  // The communicator is lost on this rank: its program may do as it likes with memory that is still to be sent, or read
  // by others. They look at that after they have read: who does not see it has read what was meant for it.
  void let_go() {
    owners_[rank_].gone.round.store(1, std::memory_order_seq_cst);
    fence(std::memory_order_release);
  }
  bool has_let_go(int rank) {
    fence(std::memory_order_acquire);
    return owners_[rank].gone.round.load(std::memory_order_relaxed) != 0;
  }

 private:
  friend struct SegmentInside;  // of the tests

  static constexpr std::uint64_t kDeparted = std::uint64_t{1} << 62;  // more rounds than there will ever be
  // What Rest::is says: who waits, and how it is woken.
  static constexpr std::uint64_t kAwake = 0, kAsleep = 1, kBlocked = 2;

  struct alignas(64) Rest {
    std::atomic<std::uint64_t> is;
    std::atomic<std::uint64_t> awaits;  // of one that blocks
  };

  struct Owner {
    Line lines[kDepth];
    Line second[kDepth];
    Line done;
    Rest rest;
    Line core;  // 1 + its number; 0: none
    Line gone;
    alignas(64) Costs reads;  // of slots that this rank has read
  };

  static constexpr int kRoundBits = 45, kRankBits = 16;
  static_assert(kMostRanks <= 1 << kRankBits);
  static std::uint64_t packed(const Awaited& awaited) {
    return (std::uint64_t{awaited.what} << kRankBits | static_cast<std::uint64_t>(awaited.rank)) << kRoundBits |
           awaited.round;
  }
  static Awaited unpacked(std::uint64_t packed) {
    const std::uint64_t front = packed >> kRoundBits;
    return {static_cast<Awaited::What>(front >> kRankBits), static_cast<int>(front & ((1 << kRankBits) - 1)),
            packed & ((std::uint64_t{1} << kRoundBits) - 1)};
  }

  std::byte* own(int rank, std::uint64_t round) { return slots_ + (rank * kDepth + round % kDepth) * kSlot; }
  Filled& how(int rank, std::uint64_t round) { return line(rank, round).slot.how; }
  bool rests() noexcept { return writable(last_slot_ + kDepth); }
  std::uint32_t* futex_of(int rank);
  void unblock(int rank);

  int rank_;
  int ranks_;
  Pool* pool_;
  std::vector<int> places_;
  std::size_t bytes_;
  std::uint64_t all_done_ = 0;              // the rounds that every rank is known to be done with
  std::uint64_t last_slot_ = 0;             // the last round in which this rank had a slot
  std::array<std::uint32_t, kDepth> held_;  // the numbers of its slots
  Filling filling_;
  std::array<std::uint64_t, kDepth> filled_;  // 1 + the rounds for whose slots it has chosen
  void* memory_;
  Owner* owners_;
  std::byte* slots_;
};

}  // namespace aiocomms
