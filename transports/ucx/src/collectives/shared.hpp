// One rank's place in the shared memory of a communicator's ranks on one host, and what its schedules wait for there.
#pragma once

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "collectives/segment.hpp"
#include "net/clock.hpp"

namespace aiocomms {

// One rank's place at a segment: the round it is in, and what its schedule waits for.
class Shared {
 public:
  explicit Shared(SharedMemory memory, std::size_t offset = 0)
      : segment(memory, offset), inputs(static_cast<std::size_t>(memory.ranks)) {}

  Segment segment;
  std::uint64_t fingerprint = 0;              // of the collective under way
  const std::uint64_t* slice_ends = nullptr;  // when a schedule lets others have their turn, ns
  std::vector<const void*> inputs;            // scratch: one pointer per rank
  std::vector<int> pids;                      // of the ranks, if they read parts out of each other's memory; else empty
  int disagrees = -1;                         // a rank that is doing something else
  bool published_any = false;                 // since this was last set to false

  // Polls what the schedule waits for. Returns whether it went on.
  bool poll() {
    if (waiting_ == nullptr || !waiting_->ready()) return false;
    waiting_ = nullptr;
    std::exchange(handle_, nullptr).resume();
    return true;
  }
  bool waits_for_nothing() const { return waiting_ == nullptr; }
  void forget() { waiting_ = nullptr; }  // the schedule is gone
  // The ranks whose first line of the collective under way has not come.
  std::vector<int> missing() const;

  // ------------------------------------------------------------------------------------ for the schedules
  int rank() const { return segment.rank(); }
  int ranks() const { return segment.ranks(); }
  // Take `count` rounds. Returns the first.
  std::uint64_t take(std::uint64_t count) {
    first_ = next_;
    next_ += count;
    return first_;
  }
  void publish(std::uint64_t round) {
    segment.line(rank(), round).fingerprint = fingerprint;
    segment.publish(round);
    published_any = true;
  }
  void publish_second(std::uint64_t round) {
    segment.publish_second(round);
    published_any = true;
  }
  void finish(std::uint64_t round) {
    segment.finish(round + 1);
    published_any = true;
  }

  class Wait {
   public:
    enum What { kWritable, kAll, kOne, kSecond, kTurn, kNever };
    Wait(Shared& shared, What what, std::uint64_t round, int rank = 0)
        : shared_(shared), round_(round), rank_(rank), what_(what) {}
    bool ready();
    bool await_ready() { return what_ == kTurn ? now_ns() < *shared_.slice_ends : ready(); }
    void await_suspend(std::coroutine_handle<> handle) {
      shared_.waiting_ = this;
      shared_.handle_ = handle;
    }
    void await_resume() const {}

   private:
    Shared& shared_;
    std::uint64_t round_;
    int rank_;
    What what_;
  };

  Wait writable(std::uint64_t round) { return Wait(*this, Wait::kWritable, round); }
  Wait all(std::uint64_t round) { return Wait(*this, Wait::kAll, round); }
  Wait one(int rank, std::uint64_t round) { return Wait(*this, Wait::kOne, round, rank); }
  Wait second(int rank, std::uint64_t round) { return Wait(*this, Wait::kSecond, round, rank); }
  Wait never() { return Wait(*this, Wait::kNever, 0); }  // a rank is gone, as others will be told
  Wait turn() { return Wait(*this, Wait::kTurn, 0); }    // lets others run if this schedule's slice is over

 private:
  std::uint64_t next_ = 0;
  std::uint64_t first_ = 0;
  Wait* waiting_ = nullptr;
  std::coroutine_handle<> handle_;
};

}  // namespace aiocomms
