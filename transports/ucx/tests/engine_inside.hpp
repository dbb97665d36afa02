// The tests' access to the engine's internal state, and a description of that state for debugging a deadlock.
#pragma once

#include <poll.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>

#include "engine/elsewhere.hpp"
#include "engine/lanes.hpp"
#include "segment_inside.hpp"

namespace aiocomms {

[[gnu::format(printf, 1, 2)]] inline std::string words(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

struct EngineInside {
  static std::size_t lanes(Engine& engine, std::uint32_t group) {
    std::lock_guard lock(engine.lock_);
    return lanes_of(engine.groups_.at(group)).lanes_.size();
  }
  static std::size_t users(Engine& engine, std::uint32_t group) {
    std::lock_guard lock(engine.lock_);
    return engine.groups_.at(group).users;
  }
  static void refuse(Engine& engine, int peer) {
    std::lock_guard lock(engine.lock_);
    engine.worker_->refuse(peer);
  }
  static std::uint64_t heard(Engine& engine, int peer) {  // over the control connection
    std::lock_guard lock(engine.lock_);
    return engine.control_->signs({peer}).front();
  }
  static Pool& pool(Engine& engine) { return *engine.pool_; }
  static bool overflows(Engine& engine) {
    std::lock_guard lock(engine.lock_);
    return engine.pool_ && engine.pool_->overflows();
  }
  // No thread makes progress while this is held.
  static std::unique_lock<PriorityLock> hold(Engine& engine) { return std::unique_lock(engine.lock_); }
  static bool thread_sleeps(Engine& engine) {
    std::lock_guard lock(engine.lock_);
    return engine.pacer_.asleep() && engine.is_quiet();
  }
  static std::uint32_t received(Engine& engine, int peer) {  // messages
    std::lock_guard lock(engine.lock_);
    return engine.inbox_.received(peer);
  }

  // Describes what each part waits for, and who must make the progress. If a peer received fewer messages than were
  // sent, and all sleep, a message is lost. If a thread sleeps although it has work, a wake-up is lost.
  static std::string state(Engine& engine) {
    const std::uint64_t ends = now_ns() + 5'000'000'000;
    while (!engine.lock_.try_lock()) {
      if (now_ns() > ends) return "  its lock is held\n";
    }
    std::lock_guard lock(engine.lock_, std::adopt_lock);
    if (engine.stopping_) return "  its engine is closed\n";
    const auto readable = [](int fd) {
      pollfd it{fd, POLLIN, 0};
      return yes(poll(&it, 1, 0) > 0);
    };
    const Pacer& pacer = engine.pacer_;
    std::string all =
        words("  thread asleep: %s, at bulk: %s, quiet: %s, UCX's descriptor readable: %s\n", yes(pacer.asleep()),
              yes(pacer.bulk()), yes(engine.is_quiet()), readable(engine.worker_->event_fd()));
    all += words("  loop parked: %s, told: %s, its descriptor readable: %s; its ops: %zu\n", yes(pacer.parks()),
                 yes(engine.ready()), readable(engine.fileno()), engine.reports_.pending());
    all += words("  not sent off: %d; copies: %s, slots to fill: %s; jobs of windows: %s, ops: %s\n",
                 engine.worker_->unfinished(), yes(engine.offers_.pulls()), yes(engine.offers_.assists()),
                 yes(engine.windows_.has_jobs()), yes(engine.windows_.has_waiting_ops()));
    for (int peer = 0; peer < static_cast<int>(engine.peers_.size()); ++peer) {
      all += words("  peer %d: %u sent, %u received\n", peer, engine.worker_->sent(peer), engine.inbox_.received(peer));
    }
    engine.groups_.each([&](Group& group) { all += state(group); });
    return all;
  }

 private:
  static const char* yes(bool is) { return is ? "yes" : "no"; }
  static std::string state(Group& group) {
    if (group.lost || group.users == 0) return {};
    std::string all =
        words("  communicator %u: requests: %zu, vouches: %zu; collectives done: %llu, to do: %zu, of lanes: %zu\n",
              group.id, group.users, group.vouches.size(), static_cast<unsigned long long>(group.collectives),
              group.schedules.size(), group.lane_calls);
    if (group.shared && !group.shared->waits_for_nothing()) {
      const Segment::Awaited awaited = group.shared->awaited();
      all += words("    waits for %d of rank %d, round %llu\n", awaited.what, awaited.rank,
                   static_cast<unsigned long long>(awaited.round));
    }
    for (int rank = 0; group.shared && rank < group.shared->ranks(); ++rank) {
      all += words("    rank %d: %s\n", rank, SegmentInside::state(group.shared->segment, rank).c_str());
    }
    return all;
  }
};

}  // namespace aiocomms
