// Lanes of several engines. Each rank calls them in a different order and waits for them in a different order. Some
// never end.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "engine_collectives.hpp"

namespace aiocomms {

constexpr std::uint64_t kLanes = 7;

// A collective of a lane, with the lane's own count of rounds.
inline Op post_in_lane(Comm& comm, std::uint64_t lane, std::uint64_t at) {
  const std::uint64_t round = std::exchange(comm.round, 1000 * (lane + 1) + at);
  comm.lane = lane << 40 | lane;
  Op posted = post_collective(comm);
  comm.lane.reset();
  comm.round = round;
  return posted;
}

inline std::vector<std::uint64_t> shuffled(Rank& rank, std::size_t count) {
  std::vector<std::uint64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t at = count; at > 1; --at) std::swap(order[at - 1], order[rank.random.below(at)]);
  return order;
}

// Each rank calls the lanes in a different order. In each round one rank waits for every lane before it calls the next.
// The other ranks first call all lanes. An order of collectives that only one rank has called would never end.
// Collectives of this communicator and of another one run between them.
inline void lanes(Comm& comm, Comm& other, int rounds) {
  Rank& rank = comm.rank;
  const int last = comm.size() - 1;
  std::uint64_t called = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<Op> ops;
    const bool waits = comm.me == round % comm.size();
    if (comm.me == last) ops.push_back(post_collective(comm));
    for (std::uint64_t lane : shuffled(rank, kLanes)) {
      for (std::uint64_t at = 0; at < 3; ++at) {
        ops.push_back(post_in_lane(comm, lane, called + at));
        if (waits) rank.wait_until_ended(ops.back().ticket, "a lane that is waited for before others are called");
      }
      if (comm.me != last && lane == 3) ops.push_back(post_collective(comm));
      if (lane == 5) ops.push_back(post_collective(other));
    }
    called += 3;
    std::ranges::reverse(ops);
    end(rank, ops);
  }
  // Hundreds of lanes at once exceed the board's room, while their buffers are reduced in place.
  std::vector<Op> ops;
  for (std::uint64_t lane : shuffled(rank, 400)) {
    auto data = std::make_shared<Ints>(filled(comm.me, 3 + lane % 900, lane));
    comm.lane = 1'000'000 + lane;
    const auto make = [&](auto& it, Unequal&) { return run_all_reduce(it, kSum, data->data(), data->size()); };
    const int size = comm.size();
    ops.push_back({comm.collective(3, make), [=] { matches_sum(*data, size, lane, "one of hundreds of lanes"); }});
  }
  comm.lane.reset();
  end(rank, ops);
  comm.barrier();
}

inline Ticket post_in_lane_of(Comm& comm, std::uint64_t lane, Ints& data, std::uint64_t mark) {
  comm.lane = lane;
  const Ticket ticket =
      comm.collective(mark, [&](auto& it, Unequal&) { return run_all_reduce(it, kSum, data.data(), data.size()); });
  comm.lane.reset();
  return ticket;
}

// Ranks that disagree in a lane notice it. Some notice it themselves and tell the others. Another lane continues.
inline void quarrels_in_a_lane(Comm& comm) {
  const bool large = comm.rank.world.seed % 2;
  Ints data(comm.me == 0 && large ? 30'000 : 5, 1), fine(5, 1);
  const Ticket ticket = post_in_lane_of(comm, 77, data, comm.me == 0 ? 5 : 6);
  comm.rank.finish(post_in_lane_of(comm, 78, fine, 5), "another lane");
  // This text differs from that of an earlier disagreement, whose message may still arrive.
  const std::string word = "we disagree in a lane";
  const Notice notice = comm.rank.wait_for(
      [&](const Notice& it) { return it.kind == Notice::kLaneDisagrees || it.frame == word; }, "a quarrel");
  if (notice.kind == Notice::kLaneDisagrees) {
    expect(notice.group == comm.group && notice.peer != comm.me && notice.detail == 77, "a strange disagreement");
    for (int other : comm.members) {
      if (other != comm.rank.number) comm.rank.engine->send_frame(other, word);
    }
  }
  comm.rank.world.meeting.arrive_and_wait();
  expect(!comm.rank.ended(ticket), "ranks that disagree get a result");
  comm.rank.engine->lose_group(comm.group);
  comm.rank.wait(ticket);
  comm.rank.engine->close_group(comm.group);
}

// The communicator is lost while lanes have small and large collectives. The last rank does not call them.
inline void losses_in_lanes(Comm& lost) {
  Rank& rank = lost.rank;
  const int last = lost.size() - 1;
  std::vector<Ints> buffers(12);
  std::vector<Ticket> tickets;
  for (std::uint64_t lane = 0; lane < buffers.size(); ++lane) {
    buffers[lane] = filled(lost.me, lane % 3 ? 7 : 100'000, lane);
    if (lost.me != last || lane % 4 == 0) tickets.push_back(post_in_lane_of(lost, lane / 2, buffers[lane], 1));
  }
  const std::vector<int> missing = rank.engine->missing_in_lane(lost.group, 1);
  expect(lost.me == last || std::ranges::find(missing, last) != missing.end() || rank.world.host_of[last] != 0,
         "nobody knows whom a lane waits for");
  std::thread aborting([&] { rank.engine->lose_group(lost.group); });
  aborting.join();
  rank.engine->close_group(lost.group);
  for (Ticket ticket : tickets) {
    const Status status = rank.wait(ticket, "what was lost in a lane").status;
    expect(status == Status::kDropped || status == Status::kDone, "it ends with %d", static_cast<int>(status));
  }
  rank.world.meeting.arrive_and_wait();
}

// The last rank closes the communicator. Collectives that it has called end. For the others, the remaining ranks get
// notices.
inline void departures_from_lanes(Comm& comm) {
  Rank& rank = comm.rank;
  Ints early = filled(comm.me, 5, 1), late(20'000, 1), never(5, 1);
  const bool leaves = comm.me == comm.size() - 1;
  const Ticket done = post_in_lane_of(comm, 1, early, 1);
  Ticket large = 0;
  if (!leaves) large = post_in_lane_of(comm, 2, late, 1);
  rank.finish(done, "a lane that all have called");
  matches_sum(early, comm.size(), 1, "a lane that all have called");
  if (leaves) {
    rank.engine->close_group(comm.group);
    rank.world.meeting.arrive_and_wait();
    return;
  }
  // Some ranks notice it themselves and tell the others.
  const auto hears_of = [&](std::uint64_t lane) {
    const std::string left = "left " + std::to_string(lane);
    const Notice notice = rank.wait_for(
        [&](const Notice& it) {
          return (it.kind == Notice::kLaneLeft && it.group == comm.group && it.detail == lane) || it.frame == left;
        },
        "a rank that has left a lane");
    if (notice.kind == Notice::kFrame) return;
    for (int other : comm.members) {
      if (other != rank.number && other != comm.members.back()) rank.engine->send_frame(other, left);
    }
  };
  hears_of(2);
  const Ticket small = post_in_lane_of(comm, 3, never, 1);  // called after the rank has left
  hears_of(3);
  expect(!rank.ended(large) && !rank.ended(small), "a lane ends without a rank that has left");
  rank.engine->lose_group(comm.group);
  rank.wait(large);
  rank.wait(small);
  rank.engine->close_group(comm.group);
  rank.world.meeting.arrive_and_wait();
}

}  // namespace aiocomms
