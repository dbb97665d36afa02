// The collectives of a communicator's lanes. They run one after the other within a lane, and in any order between
// lanes.
//
// If the ranks share memory, each rank writes an entry on its Board for each collective that it calls. A small
// collective's entry carries the contribution. It is done when all entries have arrived.
//
// A large collective runs in the slots of a Segment, and all ranks must use those slots in the same order. The first
// rank makes that order. It appends a collective when every rank has called it, and writes the order on its own board.
// Each rank runs the ordered collectives one after the other.
//
// There is no deadlock. Every rank has called the collective at the head of the order, and the ranks' engines move it
// on without their programs. So it ends, and so do the collectives behind it. If a rank could append a collective that
// it alone has called, another rank might await a lane behind it. That rank would never call it.
//
// The lanes have other slots than the communicator's own collectives, which run in the order of the calls. With common
// slots, such a collective could wait for a lane that is called only after the wait.
//
// A rank may give up a lane, and all other ranks then do so too. A small collective then ends at once, because its
// contribution was copied. A large collective that is not in the order also ends, as soon as the first rank has given
// up the lane. The first rank appends no collectives of a lane that it has given up. This wait ends, because the first
// rank's message waits for no lane. A collective in the order runs to its end on every rank. All ranks have called it,
// and none drops it.
//
// The order consists of the entries on the first rank's board. An entry that found no room yet is withdrawn, because no
// rank has seen it.
//
// Without shared memory, the collectives are schedules of messages with the lane's number as the tag. Early messages
// wait in the inbox. A lane's collectives run one after the other, so the tag needs no further number. The header
// carries the fingerprint. Ranks that disagree notice it when a message meets its receive.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "collectives/board.hpp"
#include "engine/group.hpp"
#include "engine/messages.hpp"
#include "engine/schedules.hpp"

namespace aiocomms {

// The contribution of a rank to a collective.
struct Contribution {
  bool come = false;
  std::uint64_t fingerprint = 0;
  std::uint32_t bytes = 0;
  alignas(16) std::array<std::byte, Board::kInline> little;
  std::unique_ptr<std::byte[]> more;  // for more than kInline bytes
  const std::byte* data() const { return more ? more.get() : little.data(); }
};

// The contributions to one collective, by rank. While it runs, contributions to the lane's next collective may arrive,
// but none to the one after it. No rank ends the next one without the contribution of every rank.
struct Contributions {
  std::vector<Contribution> of;
  int come = 0;
  void clear();
  void clear(int rank);
};

// One lane: its unfinished collectives, and the contributions of the ranks. The first collective runs.
class LaneCalls {
 public:
  explicit LaneCalls(Group& the_group) : group(the_group) {}

  Group& group;
  std::uint64_t number = 0;
  std::deque<Schedule> calls;
  bool running = false;   // the first call has begun
  bool stuck = false;     // it cannot end because ranks disagree or one has left. The loop has a notice.
  bool ordered = false;   // the first call is in the order
  bool ordering = false;  // this rank is about to write the order
  bool given_up = false;  // the first call ends once no rank needs it, and no call follows
  Contributions now, next;
  std::vector<int> awaited;  // the ranks whose messages the lane waits for
  int under_way = 0;         // its unfinished messages
  std::unique_ptr<Wire> wire;

  // ------------------------------------------------------------------------------------------------- for the schedules
  enum class Waits { kNothing, kMeeting, kTurn };
  class Wait {
   public:
    Wait(LaneCalls& lane, Waits what) : lane_(lane), what_(what) {}
    bool await_ready() const { return false; }
    void await_suspend(std::coroutine_handle<> handle) {
      lane_.handle_ = handle;
      lane_.waits_ = what_;
    }
    void await_resume() const {}

   private:
    LaneCalls& lane_;
    Waits what_;
  };

  // Gives `bytes` bytes, at most Board::kLargest, to the other ranks, and waits for all contributions. The data must
  // not change until the wait ends.
  Wait meet(const void* data, std::size_t bytes);
  // The contribution of a rank. This rank's is its original memory.
  const void* given(int rank) const;
  // Waits until this lane has the slots.
  Wait turn();
  Shared& slots();
  // Null: all ranks share memory.
  Messages* messages() { return wire.get(); }
  int rank() const { return group.rank; }
  int ranks() const { return static_cast<int>(group.peers.size()); }

 private:
  friend class Lanes;

  Waits waits_ = Waits::kNothing;
  std::coroutine_handle<> handle_;
  const void* mine_ = nullptr;
};

// The lanes of a communicator that have unfinished collectives.
class Lanes final : public LaneSchedules {
 public:
  // memory: the shared memory if all ranks are on this host. Otherwise its fd is -1.
  Lanes(Group& group, const SharedMemory& memory, Sender& sender, Inbox& inbox, Schedules& schedules, Reports& reports);

  LaneCalls& at(std::uint64_t number);
  // Releases a lane that at() has returned and that is idle.
  void forget(LaneCalls& lane) noexcept;
  // The schedule starts now or after the earlier ones. std::bad_alloc: it does not start.
  void begin(LaneCalls& lane, Schedule schedule);
  // The schedule takes its place in its lane, and starts at the next start_next at the latest.
  void enqueue(LaneCalls& lane, Schedule schedule);
  void start_next(std::uint64_t number) noexcept;
  // Reads the shared memory. Returns whether a lane moved on.
  bool poll();
  // A message of a lane has ended.
  void go_on(LaneCalls& lane);
  // A rank has closed the communicator. Collectives that need it do not end.
  void end_with(int rank);
  void report_mismatch(LaneCalls& lane, int rank);
  void report_left(LaneCalls& lane, int rank);
  // This rank gives up a lane. Its collectives are dropped once no rank uses their memory, unless they have already
  // ended. The lane starts no more collectives.
  void give_up(std::uint64_t number);
  // Another rank has given up a lane, as this rank has, and sends no more for it. The rank's contributions are
  // forgotten.
  void forget_rank(std::uint64_t number, int rank);
  // The ticket of a lane's running collective. 0: the lane is idle.
  Ticket under_way(std::uint64_t number) const;
  // The ranks that a lane's collective waits for.
  std::vector<int> missing(std::uint64_t number) const;
  void let_go() {
    if (slots_) slots_->segment.let_go();
  }
  void drop_schedules() noexcept override;
  void depart(int place) noexcept override {
    if (slots_) slots_->segment.depart(place);
  }
  bool holds_slots() noexcept override { return slots_ && slots_->segment.holds_slots(); }

 private:
  friend class LaneCalls;
  friend struct EngineInside;  // of the tests

  // This rank's next entry about a lane's first collective.
  struct Entry {
    Board::Kind kind;
    LaneCalls* lane;
    const void* data;
    std::size_t bytes;
  };

  void tell(const Entry& entry);
  bool write(const Entry& entry);
  bool write_rest();
  bool take_from(int rank);
  void accept(int rank, const Board::Entry& entry);
  void accept_contribution(LaneCalls& lane, int rank, const Board::Entry& entry);
  void start(LaneCalls& lane);
  void end(LaneCalls& lane);
  void append(LaneCalls& lane);
  bool resume(LaneCalls& lane);
  void follow_order();
  // All ranks have called each collective in the order, although the entries of a lane that is given up may be
  // forgotten.
  bool met(const LaneCalls& lane) const { return lane.now.come == lane.ranks() || (lane.given_up && lane.ordered); }
  bool may_be_ordered(const LaneCalls& lane) const;
  bool is_free(const LaneCalls& lane) const;
  void drop_last(LaneCalls& lane) noexcept;
  void drop_first(LaneCalls& lane) noexcept;
  void forget_left(int rank);

  Group& group_;
  Sender& sender_;
  Inbox& inbox_;
  Schedules& schedules_;
  Reports& reports_;
  std::unique_ptr<Board> board_;
  std::unique_ptr<Shared> slots_;
  using Map = std::unordered_map<std::uint64_t, std::unique_ptr<LaneCalls>>;
  Map lanes_;
  std::vector<Map::node_type> spare_;  // nodes of ended lanes, for reuse
  std::deque<Entry> unwritten_;        // entries that found no room yet
  std::deque<LaneCalls*> order_;       // the first of them has the slots
  bool left_ = false;                  // some rank has closed the communicator
};

// The communicator must be open.
inline Lanes& lanes_of(const Group& group) { return static_cast<Lanes&>(*group.keyed); }

}  // namespace aiocomms
