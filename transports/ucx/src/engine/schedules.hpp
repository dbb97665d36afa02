// Runs the collectives of all communicators, one after the other within each. It also checks that the ranks run the
// same ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine/group.hpp"
#include "engine/request.hpp"

namespace aiocomms {

class Schedules {
 public:
  // wake_peer: rings the doorbell of a sleeping peer, by the engine's number.
  Schedules(Reports& reports, const std::uint64_t& slice_ends, std::function<void(int)> wake_peer)
      : reports_(reports), slice_ends_(slice_ends), wake_peer_(std::move(wake_peer)) {}

  // The schedule starts now or after the earlier ones. std::bad_alloc: it does not start.
  void begin(Group& group, Schedule schedule);
  // The schedule takes its place in its communicator, and starts at the next start_next at the latest.
  void enqueue(Group& group, Schedule schedule) { group.schedules.push_back(std::move(schedule)); }
  void start_next(Group& group) noexcept {
    attempt(group, [&] { begin_next(group); });
    settle(group);
  }
  // Polls the shared memory for the running collectives. Returns whether one moved on.
  bool poll() noexcept {
    bool moved = false;
    for (std::size_t i = 0; i < active_.size(); ++i) {
      attempt(*active_[i], [&] { moved |= poll_group(*active_[i]); });
    }
    return moved;
  }
  // Resumes the schedules whose messages UCX has finished. Returns whether there are any.
  bool resume() noexcept;

  bool idle() const { return active_.empty(); }
  std::size_t count() const { return active_.size(); }  // communicators with unfinished collectives
  // The communicator has unfinished collectives.
  void activate(Group& group) {
    if (std::find(active_.begin(), active_.end(), &group) == active_.end()) active_.push_back(&group);
  }
  // A collective that began between two looks may have ended at once. Then the thread has nothing to poll.
  void settle(const Group& group) {
    if (!group.running && group.lane_calls == 0) std::erase(active_, &group);
  }
  // Other ranks of this host may sleep until this one publishes. This call wakes them.
  void wake_peers(Group& group);
  const std::uint64_t& slice_ends() const { return slice_ends_; }
  // Tells the other ranks of this host to ring when they publish.
  void announce_sleep(bool asleep);
  Events& events() { return events_; }
  // Runs a step of a communicator's schedule. An exception makes the communicator fail.
  template <typename Step>
  void attempt(Group& group, const Step& step) noexcept {
    try {
      step();
    } catch (...) {
      reports_.fail(group);
    }
  }

  // Rank `source` has begun a collective. Checks that this rank runs the same one at that position.
  void check_fingerprint(Group& group, int source, std::uint64_t collective, std::uint64_t fingerprint);
  // Stops the collectives of a lost communicator.
  void release(Group& group) noexcept;

 private:
  bool poll_group(Group& group);
  void begin_next(Group& group);
  void end_finished(Group& group);
  void report_mismatch(Group& group, int source, std::uint64_t collective);

  Reports& reports_;
  const std::uint64_t& slice_ends_;  // see Shared::slice_ends
  std::function<void(int)> wake_peer_;
  std::vector<Group*> active_;  // communicators with schedules that have begun
  Events events_;
};

}  // namespace aiocomms
