// One rank's state in the shared memory of its communicator and host.
#pragma once

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "collectives/segment.hpp"
#include "net/clock.hpp"

namespace aiocomms {

// One rank's state at a segment: its round, and the condition that its schedule waits for.
class Shared {
 public:
  explicit Shared(SharedMemory memory, std::size_t offset = 0)
      : segment(memory, offset), inputs(static_cast<std::size_t>(memory.ranks)) {}

  Segment segment;
  std::uint64_t fingerprint = 0;              // of the running collective
  const std::uint64_t* slice_ends = nullptr;  // when a schedule gives others their turn, in ns
  std::vector<const void*> inputs;            // scratch with one pointer per rank
  // the processes of the ranks if they read parts from each other's memory, else empty
  std::vector<int> pids;
  int disagrees = -1;          // a rank that runs another collective
  bool published_any = false;  // since this was last set to false

  // Polls the schedule's condition. Returns whether the schedule resumed.
  bool poll() {
    if (waiting_ == nullptr || !waiting_->ready()) return false;
    waiting_ = nullptr;
    std::exchange(handle_, nullptr).resume();
    return true;
  }
  bool waits_for_nothing() const { return waiting_ == nullptr; }
  Segment::Awaited awaited() const { return waiting_ ? waiting_->awaited() : Segment::Awaited{}; }
  void forget() { waiting_ = nullptr; }  // the schedule has ended
  // The ranks whose first line of the running collective is missing.
  std::vector<int> missing() const;

  // ------------------------------------------------------------------------------------------------- for the schedules
  int rank() const { return segment.rank(); }
  int ranks() const { return segment.ranks(); }
  // Takes `count` rounds. Returns the first.
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
    Wait(Shared& shared, const Segment::Awaited& awaited) : shared_(shared), awaited_(awaited) {}
    bool ready();
    bool await_ready() { return is_turn() ? now_ns() < *shared_.slice_ends : ready(); }
    void await_suspend(std::coroutine_handle<> handle) {
      shared_.waiting_ = this;
      shared_.handle_ = handle;
    }
    void await_resume() const {}
    const Segment::Awaited& awaited() const { return awaited_; }

   private:
    bool is_turn() const { return awaited_.what == Segment::Awaited::kAnything; }

    Shared& shared_;
    Segment::Awaited awaited_;
  };

  Wait writable(std::uint64_t round) { return {*this, {Segment::Awaited::kWritable, 0, round}}; }
  Wait all(std::uint64_t round) { return {*this, {Segment::Awaited::kAll, 0, round}}; }
  Wait one(int rank, std::uint64_t round) { return {*this, {Segment::Awaited::kOne, rank, round}}; }
  Wait second(int rank, std::uint64_t round) { return {*this, {Segment::Awaited::kSecond, rank, round}}; }
  Wait never() { return {*this, {Segment::Awaited::kNever}}; }    // A rank is lost, and the engine reports it.
  Wait turn() { return {*this, {Segment::Awaited::kAnything}}; }  // The schedule suspends if its slice is over.

 private:
  std::uint64_t next_ = 0;
  std::uint64_t first_ = 0;
  Wait* waiting_ = nullptr;
  std::coroutine_handle<> handle_;
};

}  // namespace aiocomms
