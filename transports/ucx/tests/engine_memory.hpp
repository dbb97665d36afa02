// Memory runs out during an op. Each allocation of the op fails in turn, on any rank and thread. The op or its
// communicator fails on every rank. Nothing else fails, and every op has an outcome.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>

#include "engine_collectives.hpp"

namespace aiocomms {

inline void post_messages(Comm& comm, std::vector<Op>& posted, std::size_t count) {
  const int other = 1 - comm.me;
  auto give = std::make_shared<Ints>(filled(comm.me, count, 1));
  auto take = std::make_shared<Ints>(count);
  Engine& engine = *comm.rank.engine;
  posted.push_back({comm.rank.post([&](Ticket ticket) {
                      Counting counting;
                      return engine.send(ticket, comm.group, give->data(), count * 4, other, 0, 1, 4);
                    }),
                    [give] {}});
  posted.push_back({comm.rank.post([&](Ticket ticket) {
                      Counting counting;
                      return engine.recv(ticket, comm.group, take->data(), count * 4, other, 0, 1, 4);
                    }),
                    [=] { matches(*take, other, 1, "a message"); }});
}

inline void post_window_ops(Comm& comm, std::vector<Op>& posted) {
  Engine& engine = *comm.rank.engine;
  auto own = std::make_shared<std::vector<std::int64_t>>(64), data = std::make_shared<std::vector<std::int64_t>>(64);
  posted.push_back({0, [own, data] {}});  // The other rank writes this memory.
  const bool far = comm.rank.world.host_of.front() != comm.rank.world.host_of.back();
  static std::string rkeys[2];
  static std::int64_t* owns[2];
  owns[comm.me] = own->data();
  rkeys[comm.me] = engine.map_window(comm.group, 0, own->data(), 512, far);
  comm.rank.world.meeting.arrive_and_wait();
  const int other = 1 - comm.me;
  engine.open_window(comm.group, 0, other, far ? nullptr : owns[other], far ? rkeys[other] : std::string(),
                     reinterpret_cast<std::uint64_t>(owns[other]), 512);
  comm.rank.world.meeting.arrive_and_wait();
  const auto post = [&](auto op, auto... arguments) {
    const Ticket ticket = comm.rank.post([&](Ticket it) {
      Counting counting;
      return post_on_window(engine, op, it, comm.group, 0, arguments...);
    });
    posted.push_back({ticket, [own, data] {}});
  };
  post(&Engine::put, other, std::uint64_t{0}, static_cast<const void*>(data->data()), std::size_t{256});
  post(&Engine::put, other, std::uint64_t{128}, static_cast<const void*>(data->data()), std::size_t{256});
  post(&Engine::get, other, std::uint64_t{256}, static_cast<void*>(data->data() + 32), std::size_t{128});
  post(&Engine::atomic, other, std::uint64_t{0}, false, std::size_t{8}, std::uint64_t{1}, std::uint64_t{0});
  post(&Engine::signal, other);
  post(&Engine::wait_signal, other);
  post(&Engine::flush, -1);
}

constexpr int kWindowStep = 16, kMemorySteps = 17;

inline void post_step(Comm& comm, std::vector<Op>& posted, int step) {
  using Post = Op (*)(Comm&, Random&, std::uint64_t);
  static constexpr Post kCollectives[] = {post_broadcast, post_reduce,  post_reduce_scatter,
                                          post_gather,    post_scatter, post_all_to_all};
  Random common(comm.rank.world.seed * 1000 + static_cast<std::uint64_t>(step));
  if (step < 8) return posted.push_back(kCollectives[step % 6](comm, common, 7));
  if (step < 10) return post_messages(comm, posted, step == 8 ? 5 : 100'000);
  if (step == kWindowStep) return post_window_ops(comm, posted);
  comm.lane = 9;  // The seed makes them small or large.
  posted.push_back(kCollectives[step - 10](comm, common, 7));
}

// Runs one step, whose n-th allocation fails. Returns whether there were so many.
inline bool fails_at(Comm& comm, int step, long n, std::atomic<bool>& failed, std::atomic<int>& ended) {
  Rank& rank = comm.rank;
  std::barrier<>& meeting = rank.world.meeting;
  std::vector<Op> posted;
  const std::size_t told = rank.notices.size();
  if (comm.me == 0) failed = false, ended = 0;
  if (comm.me == 0 && step != kWindowStep) allocations_until_failure = n;
  meeting.arrive_and_wait();
  if (comm.me == 0 && step == kWindowStep) allocations_until_failure = n;
  try {
    post_step(comm, posted, step);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  // As in aiocomms, a rank whose communicator has failed tells the others.
  const auto hears = [&] {
    for (std::size_t at = told; at < rank.notices.size(); ++at) {
      if (rank.notices[at].kind != Notice::kFailed || rank.notices[at].group != comm.group) continue;
      expect(rank.notices[at].frame == "std::bad_alloc", "it fails with %s", rank.notices[at].frame.c_str());
      failed = true;
    }
    return failed.load();
  };
  // A parked loop is not woken when another rank's op has failed. Sometimes only the engine's thread makes progress.
  const std::uint64_t gives_up = when_patience_ends();
  const auto turn = [&] {
    if (rank.random.below(4) == 0) usleep(1000);
    rank.turn();
    if (now_ns() < gives_up) return;
    expect(false, "rank %d waits in vain at step %d, whose allocation %ld fails", comm.me, step, n);
    std::abort();
  };
  for (const Op& op : posted) {
    if (op.ticket == 0) continue;
    while (!hears() && !rank.ended(op.ticket)) turn();
    if (rank.ended(op.ticket) && rank.outcome(op.ticket).status == Status::kBroken) failed = true;
  }
  // A rank whose own op has ended may still learn that its communicator has failed. Another rank waits for that.
  for (++ended; !hears() && ended < comm.size();) turn();
  meeting.arrive_and_wait();
  const bool spent = allocations_until_failure == 0;
  meeting.arrive_and_wait();
  if (comm.me == 0) allocations_until_failure = -1;
  if (failed) {  // Ops that UCX still handles end when the communicator is closed.
    rank.engine->lose_group(comm.group);
    rank.engine->close_group(comm.group);
  }
  for (const Op& op : posted) {
    if (op.ticket == 0) continue;
    const Status status = rank.wait(op.ticket, "an op whose communicator is lost").status;
    expect(status == Status::kDone || failed, "it ends with %d, and nothing has failed", static_cast<int>(status));
    if (status == Status::kDone) op.check();
  }
  meeting.arrive_and_wait();
  if (!failed) rank.engine->close_group(comm.group);
  return spent;
}

// The progress of the walk over several worlds. An engine that has failed as a whole cannot continue.
struct Walk {
  int step = 0;
  long n = 1;
};

inline void runs_out_of_memory(Rank& rank, Walk& walk, std::atomic<bool>& failed, std::atomic<bool>& broken,
                               std::atomic<int>& ended) {
  counts_allocations = false;
  Comm other(rank, {1, 0});
  while (!broken && walk.step < kMemorySteps) {
    Comm comm(rank, {0, 1});
    const bool spent = fails_at(comm, walk.step, walk.n, failed, ended);
    try {
      rank.engine->close_group(rank.engine->add_group(0, {rank.number}));
    } catch (const std::runtime_error&) {
      broken = true;
    }
    rank.world.meeting.arrive_and_wait();
    if (!broken) other.barrier();  // The other communicator has the same engines, and continues.
    if (rank.number == 0) walk = spent ? Walk{walk.step, walk.n + 1} : Walk{walk.step + 1, 1};
    rank.world.meeting.arrive_and_wait();
  }
  rank.engine->lose_group(other.group);
  rank.engine->close_group(other.group);
  rank.close(!broken);
}

inline unsigned walk_through_memory(Spread hosts, std::uint64_t seed) {
  Walk walk;
  unsigned worlds = 0;
  for (; walk.step < kMemorySteps; ++worlds) {
    std::atomic<bool> failed = false, broken = false;
    std::atomic<int> ended = 0;  // ranks whose ops have ended
    World world(2, hosts, seed);
    world.run([&](Rank& rank) { runs_out_of_memory(rank, walk, failed, broken, ended); });
  }
  return worlds;
}

}  // namespace aiocomms
