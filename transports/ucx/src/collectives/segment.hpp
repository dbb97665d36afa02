// Shared memory of a communicator's ranks on one host.
//
// A collective is a sequence of rounds, which are counted through the life of the communicator. In round n each rank
// publishes a line. The line carries a few bytes, or refers to a slot of data. Other ranks wait for the line and read.
// A slot is reused kDepth rounds later, after every rank has finished with it. Slots belong to the family (pool.hpp),
// or, if none is free, to the segment. Each line of a rank has its own cache line, so a wait costs one transfer. (The
// scheme of MPICH's "release gather" and of Li, Hoefler, Snir: "NUMA-Aware Shared-Memory Collective Communication for
// MPI", HPDC 2013: adjacent contributions, separate flags.)
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

// One rank's view of the shared memory of its communicator and host.
struct SharedMemory {
  int fd;
  int rank;
  int ranks;
  Pool* pool = nullptr;          // the family's pool, or null if segments only use their own slots
  std::vector<int> places = {};  // of the ranks in the pool
};

class Segment {
 public:
  static constexpr std::uint64_t kDepth = 8;         // the most unfinished rounds
  static constexpr std::size_t kInline = 48;         // bytes inside a line
  static constexpr std::size_t kSlot = Pool::kSlot;  // bytes of a slot

  struct alignas(64) Line {
    std::atomic<std::uint64_t> round;  // n + 1 once round n is published
    std::uint64_t fingerprint;         // of the collective
    union {
      std::byte data[kInline];
      struct {
        std::uint32_t number;
        Filled how;
      } slot;  // the slot with the data
    };
  };

  // With more ranks, the part of a slot for one rank could be less than a cache line.
  static constexpr int kMostRanks = static_cast<int>(kSlot / sizeof(Line));

  static std::size_t bytes(int ranks);
  // Returns a descriptor of new, private, anonymous shared memory: two segments and a Board, which lanes need, and
  // optionally a Pool. Throws std::system_error. Throws std::invalid_argument if there are more than kMostRanks ranks,
  // or none.
  static int create(int ranks, bool with_pool);
  static std::size_t place_of_pool(int ranks);  // in that memory

  // Maps a descriptor from `offset` on, without closing it. Throws as create() does. std::system_error also if the
  // memory is too small.
  explicit Segment(SharedMemory memory, std::size_t offset = 0);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Whether every rank has finished with this rank's data of kDepth rounds before `round`.
  bool writable(std::uint64_t round);
  Line& line(int rank, std::uint64_t round) { return owners_[rank].lines[round % kDepth]; }
  // This rank's slot of a writable round.
  std::byte* own_slot(std::uint64_t round) noexcept {
    std::uint32_t& number = held_[round % kDepth];
    if (number == Pool::kNone) number = pool_ ? pool_->take(*this) : Pool::kOwn;
    last_slot_ = round;
    line(rank_, round).slot.number = number;
    return slot(rank_, round);
  }
  // The slot of this rank or another one, in a round that it has published. own_slot() must come first for this rank.
  std::byte* slot(int rank, std::uint64_t round) {
    const std::uint32_t number = line(rank, round).slot.number;
    return pool_ && number < Pool::kSlots ? pool_->slot(places_[rank], number) : own(rank, round);
  }
  // Copies into this rank's slot of a writable round, or out of a slot of a published one. `from` and `to` may have any
  // value if bytes is 0. `second` may advance meanwhile (see Filling::fill).
  void copy_in(std::uint64_t round, std::size_t offset, const void* from, std::size_t bytes,
               Copy* second = nullptr) noexcept;
  void copy_out(int rank, std::uint64_t round, std::size_t offset, void* to, std::size_t bytes) {
    const Timing timing(owners_[rank_].reads, how(rank, round), bytes);
    if (bytes) std::memcpy(to, slot(rank, round) + offset, bytes);
  }
  // Measures a rank that reads a slot itself. The rank keeps the result while it reads.
  Timing timing(int rank, std::uint64_t round, std::size_t bytes) {
    return {owners_[rank_].reads, how(rank, round), bytes};
  }
  // The last round in which this rank had a slot.
  std::uint64_t last_slot() const { return last_slot_; }
  // Returns the slots to the pool. False: other ranks may still read them.
  bool give_back() noexcept;
  // Whether it still has slots of the pool, because other ranks may read them.
  bool holds_slots() noexcept;
  // Returns the pages of its own slots to the system. False: other ranks may still read them.
  bool release_own() noexcept;

  // A round's line publishes its first phase. `second` publishes its second phase, if it has one.
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
  // This rank has finished reading all rounds below `rounds`.
  void finish(std::uint64_t rounds) { owners_[rank_].done.round.store(rounds, std::memory_order_seq_cst); }
  // A rank reads nothing any more: this rank, or a lost rank that cannot say so itself.
  void depart(int rank) { owners_[rank].done.round.store(kDeparted, std::memory_order_seq_cst); }

  // The condition that a rank waits for, in a round or of a rank. kAll: the lines of the ranks from `rank` on.
  struct Awaited {
    enum What : std::uint8_t { kAnything, kWritable, kAll, kOne, kSecond, kNever } what = kAnything;
    int rank = 0;
    std::uint64_t round = 0;
  };
  bool has_come(const Awaited& awaited);

  // A rank first announces its sleep, then looks again. A publishing rank looks for sleepers after it publishes. All
  // these accesses are sequentially consistent, so one of the two sees the other (Dekker).
  void sleep(bool asleep) {
    if (asleep) owners_[rank_].core.round.store(0, std::memory_order_relaxed);
    owners_[rank_].rest.is.store(asleep ? kAsleep : kAwake, std::memory_order_seq_cst);
  }
  // Whether the engine's thread of `rank` slept. The caller then wakes it. This function itself wakes a blocked post.
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
  // A post announces that it blocks, in the same way. It keeps its core while it waits. The rank that publishes the
  // last awaited line wakes it. If every publisher woke every waiter, n ranks would be woken n times. True: the
  // engine's thread slept, and no other rank wakes it from now on.
  bool begin_block(const Awaited& awaited) {
    owners_[rank_].rest.awaits.store(packed(awaited), std::memory_order_seq_cst);
    return owners_[rank_].rest.is.exchange(kBlocked, std::memory_order_seq_cst) == kAsleep;
  }
  void block(std::uint64_t most_ns);  // Returns at once if the condition holds.
  // UCX has a message for `rank`, which may need to act on it, whatever it awaits. A post that is just beginning to
  // block may miss this call. So may one whose message found no room in UCX yet. It then blocks for its full time. A
  // fence would cost each message more.
  void rouse(int rank) {
    std::atomic<std::uint64_t>& is = owners_[rank].rest.is;
    std::uint64_t was = kBlocked;
    if (is.load(std::memory_order_relaxed) != was) return;
    if (is.compare_exchange_strong(was, kAwake, std::memory_order_seq_cst)) unblock(rank);
  }
  void end_block() { owners_[rank_].rest.is.store(kAwake, std::memory_order_seq_cst); }

  // Notes the core of this rank's last post, for ranks that wait for this one. A waiting rank on the same core must
  // yield it. A sleeping rank has no core. The value orders nothing, and a stale one costs a turn of the scheduler.
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

  // The communicator is lost on this rank. Its program may now change memory that other ranks read or that is still to
  // be sent. Other ranks check this after their reads. If they do not see it, their data are valid.
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

  static constexpr std::uint64_t kDeparted = std::uint64_t{1} << 62;  // more rounds than a communicator can have
  // The values of Rest::is: who waits, and how to wake it.
  static constexpr std::uint64_t kAwake = 0, kAsleep = 1, kBlocked = 2;

  struct alignas(64) Rest {
    std::atomic<std::uint64_t> is;
    std::atomic<std::uint64_t> awaits;  // of a blocked post
  };

  struct Owner {
    Line lines[kDepth];
    Line second[kDepth];
    Line done;
    Rest rest;
    Line core;  // 1 + the core's number, or 0 for none
    Line gone;
    alignas(64) Costs reads;  // of the slots that this rank has read
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
  std::uint64_t all_done_ = 0;              // the rounds that every rank is known to have finished
  std::uint64_t last_slot_ = 0;             // the last round in which this rank had a slot
  std::array<std::uint32_t, kDepth> held_;  // the numbers of its slots
  Filling filling_;
  std::array<std::uint64_t, kDepth> filled_;  // 1 + the round for which each slot's filling was chosen
  void* memory_;
  Owner* owners_;
  std::byte* slots_;
};

}  // namespace aiocomms
