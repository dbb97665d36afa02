// Collectives of more communicators at once than the family has slots for, and the fate of their slots.
#pragma once

#include <algorithm>
#include <deque>
#include <numeric>

#include "engine_collectives.hpp"
#include "engine_given_up.hpp"

namespace aiocomms {

constexpr int kCrowd = 7;  // number of communicators
constexpr std::size_t kSeveralSlots = 300'000;

// Waits until this rank has slots beyond the pool's, or none any more. The loop is away, so the engine's thread does
// the work.
inline void wait_for_overflow(Rank& rank, bool wanted, Where where = Where::current()) {
  const std::uint64_t gives_up = when_patience_ends();
  while (EngineInside::overflows(*rank.engine) != wanted) {
    if (now_ns() > gives_up) {
      expect(false, "rank %d has %s slots beyond the pool's, line %u", rank.number, wanted ? "no" : "still",
             where.line());
      std::abort();
    }
    usleep(1000);
  }
}

// The first rank fills slots of all communicators before the other ranks call any. The others call them in another
// order.
inline void crowd(Rank& rank, std::deque<Comm>& comms, bool one_host) {
  std::vector<Op> ops;
  const auto call = [&](Comm& comm) {
    const std::uint64_t round = ++comm.round;
    auto data = std::make_shared<Ints>(comm.me == 0 ? filled(0, kSeveralSlots, round) : Ints(kSeveralSlots));
    const auto make = [&](auto& it, Unequal&) { return run_broadcast(it, 0, data->data(), kSeveralSlots * 4); };
    ops.push_back({comm.collective(round, make), [=] { matches(*data, 0, round, "one of many broadcasts"); }});
  };
  if (rank.number == 0) {
    for (Comm& comm : comms) call(comm);
    if (one_host) wait_for_overflow(rank, true);
  }
  rank.world.meeting.arrive_and_wait();
  if (rank.number != 0) std::for_each(comms.rbegin(), comms.rend(), call);
  end(rank, ops);
}

inline void crowds_of_communicators(Rank& rank, const std::vector<int>& all) {
  const auto& host_of = rank.world.host_of;
  const bool one_host = all.size() > 1 && host_of.front() == host_of.back();
  std::deque<Comm> comms;
  for (int at = 0; at < kCrowd; ++at) comms.emplace_back(rank, all);
  for (int time = 0; time < 3; ++time) {
    crowd(rank, comms, one_host);
    for (Comm& comm : comms) {  // one after the other, while the slots of others may still be read
      std::vector<Op> ops{post_collective(comm)};
      end(rank, ops);
    }
    if (time == 1) wait_for_overflow(rank, false);
    // Some communicators are closed as soon as they have done their part. Other ranks may still read their slots. Some
    // are lost. New ones follow them.
    Comm& doomed = comms.front();
    if (time == 1) rank.engine->lose_group(doomed.group);
    rank.engine->close_group(doomed.group);
    comms.pop_front();
    comms.emplace_back(rank, all);
  }
  for (Comm& comm : comms) rank.engine->close_group(comm.group);
  wait_for_overflow(rank, false);
}

}  // namespace aiocomms
