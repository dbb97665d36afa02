// The collectives of a communicator's lanes: one after the other within a lane, and in any order between lanes.
//
// Where the ranks share memory, each rank writes on its Board that it has called a lane's next collective, and what it
// gives to a small one, which is done once everybody's entry is there. A large one runs in the slots of a Segment,
// which all ranks must fill with the same collectives in the same order. The first rank makes that order: it appends a
// collective when every rank has called it, and writes so on its own board; each rank runs them one after the other.
//
// Nobody waits in a circle. The collective at the head of the order has been called by every rank, and needs nothing
// but that all of them move it on, which their engines do whatever their programs wait for; so it ends, and so does
// each one behind it. If a rank appended what it alone has called, another rank might await a lane behind that, and
// never come to call it. The slots are others than those of the communicator's own collectives, whose order is that of
// the calls: in one sequence these could wait for a lane that is called after they are awaited.
//
// A rank may give a lane up, which all others do when they hear of it. Then a small collective ends at once: what this
// rank has given to it was copied. So does a large one that the first rank has not written into the order; and as that
// rank stops to append what it has given up, it is known once the rank has been heard. What is in the order runs to its
// end, on every rank: all have called it, and none drops it. So what has been said above of the head of the order holds
// there, too, and nobody waits for it longer than that takes; a large one that is not in the order waits for nothing
// but the first rank's word, which waits for no lane. Order is what is written on the first rank's board, and no less:
// an entry that has no room yet is taken back, and nobody would have seen it.
//
// Everywhere else they are schedules of messages, whose tag is the lane's number; those that come early wait in the
// inbox, and as a lane's collectives run one after the other, it needs no other number. The header carries the
// fingerprint, so that ranks that disagree find out when a message and its receive meet.
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

// What a rank gives to a collective.
struct Contribution {
  bool come = false;
  std::uint64_t fingerprint = 0;
  std::uint32_t bytes = 0;
  alignas(16) std::array<std::byte, Board::kInline> little;
  std::unique_ptr<std::byte[]> more;  // if they are not few
  const std::byte* data() const { return more ? more.get() : little.data(); }
};

// One collective, by rank. While it runs, contributions to the lane's next one may come, but not to the one after that:
// nobody ends that without everybody's contribution to the next.
struct Contributions {
  std::vector<Contribution> of;
  int come = 0;
  void clear();
  void clear(int rank);
};

// One lane: its collectives that have not ended, of which the first runs, and what the others have given.
class LaneCalls {
 public:
  explicit LaneCalls(Group& the_group) : group(the_group) {}

  Group& group;
  std::uint64_t number = 0;
  std::deque<Schedule> calls;
  bool running = false;   // the first of them has begun
  bool stuck = false;     // it cannot end: ranks disagree, or one has left, as the loop is told
  bool ordered = false;   // it is in the order
  bool ordering = false;  // this rank is about to write that it is
  bool given_up = false;  // the first ends when nobody needs it any more, and there is no other
  Contributions now, next;
  std::vector<int> awaited;  // the ranks whose messages it waits for
  int under_way = 0;         // messages of it that have not ended
  std::unique_ptr<Wire> wire;

  // ------------------------------------------------------------------------------------ for the schedules
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

  // Give the others so many bytes, at most Board::kLargest, which stay where they are until this ends; it waits for
  // what all of them give.
  Wait meet(const void* data, std::size_t bytes);
  // What a rank has given. This rank's is where it was.
  const void* given(int rank) const;
  // Wait until this lane has the slots.
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

// The lanes of a communicator that have collectives under way.
class Lanes final : public LaneSchedules {
 public:
  // memory: of this host's ranks, if they are all that there are; else its fd is -1.
  Lanes(Group& group, const SharedMemory& memory, Sender& sender, Inbox& inbox, Schedules& schedules, Reports& reports);

  LaneCalls& at(std::uint64_t number);
  // It has been looked up in vain.
  void forget(LaneCalls& lane) noexcept;
  // The schedule starts now, or after those before it. std::bad_alloc: it does not.
  void begin(LaneCalls& lane, Schedule schedule);
  // It has its place in its lane, and starts with the next call of start_next at the latest.
  void enqueue(LaneCalls& lane, Schedule schedule);
  void start_next(std::uint64_t number) noexcept;
  // Look at the shared memory. Returns whether something went on.
  bool poll();
  // A message of a lane has ended.
  void go_on(LaneCalls& lane);
  // A rank has closed the communicator: what needs it does not end.
  void end_with(int rank);
  void report_mismatch(LaneCalls& lane, int rank);
  void report_left(LaneCalls& lane, int rank);
  // This rank gives a lane up: what it has under way there is dropped, as soon as nobody uses its memory, or has ended
  // before. Nothing of the lane begins any more.
  void give_up(std::uint64_t number);
  // A rank has given a lane up, as this one has, and nothing of it comes from there any more: what has is forgotten.
  void forget_rank(std::uint64_t number, int rank);
  // The ticket of the collective that a lane has under way; 0: there is none.
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

  // What this rank has to tell of a lane's first collective.
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
  // What is in the order all ranks have called, though their entries of a lane that was given up may be gone.
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
  std::vector<Map::node_type> spare_;  // a few that have ended, for the next ones
  std::deque<Entry> unwritten_;        // for which there is no room yet
  std::deque<LaneCalls*> order_;       // the first of them has the slots
  bool left_ = false;                  // some rank has
};

// Of a communicator that is open.
inline Lanes& lanes_of(const Group& group) { return static_cast<Lanes&>(*group.keyed); }

}  // namespace aiocomms
