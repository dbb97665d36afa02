// The collectives of all communicators, one after the other within each, and whether the ranks agree on what they do.
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
  // wake_peer: rings the doorbell of a peer that sleeps, by the engine's number.
  Schedules(Reports& reports, const std::uint64_t& slice_ends, std::function<void(int)> wake_peer)
      : reports_(reports), slice_ends_(slice_ends), wake_peer_(std::move(wake_peer)) {}

  // The schedule starts now, or after those before it. std::bad_alloc: it does not.
  void begin(Group& group, Schedule schedule);
  // It has its place among the communicator's, and starts with the next call of start_next.
  void enqueue(Group& group, Schedule schedule) { group.schedules.push_back(std::move(schedule)); }
  void start_next(Group& group) noexcept {
    attempt(group, [&] { begin_next(group); });
    settle(group);
  }
  // Look at the shared memory for what the running ones wait for. Returns whether one went on.
  bool poll() noexcept {
    bool moved = false;
    for (std::size_t i = 0; i < active_.size(); ++i) {
      attempt(*active_[i], [&] { moved |= poll_group(*active_[i]); });
    }
    return moved;
  }
  // Those go on whose messages UCX has finished. Returns whether there are any.
  bool resume() noexcept;

  bool idle() const { return active_.empty(); }
  std::size_t count() const { return active_.size(); }  // of the communicators with something under way
  // Something of the communicator is under way.
  void activate(Group& group) {
    if (std::find(active_.begin(), active_.end(), &group) == active_.end()) active_.push_back(&group);
  }
  // What has begun between two looks may have ended at once. Nothing is left then that a thread would have to see to.
  void settle(const Group& group) {
    if (!group.running && group.lane_calls == 0) std::erase(active_, &group);
  }
  // The other ranks of this host may sleep until this one publishes something.
  void wake_peers(Group& group);
  const std::uint64_t& slice_ends() const { return slice_ends_; }
  // To the other ranks of this host: whoever publishes something rings.
  void announce_sleep(bool asleep);
  Events& events() { return events_; }
  // A step of a communicator's schedule, which has failed if that throws.
  template <typename Step>
  void attempt(Group& group, const Step& step) noexcept {
    try {
      step();
    } catch (...) {
      reports_.fail(group);
    }
  }

  // Rank `source` has begun a collective; is it the one that this rank has begun, or will begin, as that?
  void check_fingerprint(Group& group, int source, std::uint64_t collective, std::uint64_t fingerprint);
  // Nothing of a lost communicator goes on any more.
  void release(Group& group) noexcept;

 private:
  bool poll_group(Group& group);
  void begin_next(Group& group);
  void end_finished(Group& group);
  void report_mismatch(Group& group, int source, std::uint64_t collective);

  Reports& reports_;
  const std::uint64_t& slice_ends_;  // see Shared::slice_ends
  std::function<void(int)> wake_peer_;
  std::vector<Group*> active_;  // those with schedules that have begun
  Events events_;
};

}  // namespace aiocomms
