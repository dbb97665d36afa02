// Collectives of several engines, with random kinds and sizes that all ranks share, and the checks of their results.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/collectives.hpp"
#include "engine_world.hpp"

namespace aiocomms {

using Ints = std::vector<std::int32_t>;

// An unfinished op and the check of its result. Its memory lives as long as `check`.
struct Op {
  Ticket ticket;
  std::function<void()> check;
};

inline std::int32_t value(int rank, std::size_t at, std::uint64_t round) {
  return static_cast<std::int32_t>(static_cast<std::size_t>(rank) * 7919 + at * 31 + round * 101);
}

inline Ints filled(int rank, std::size_t count, std::uint64_t round) {
  Ints data(count);
  for (std::size_t at = 0; at < count; ++at) data[at] = value(rank, at, round);
  return data;
}

inline void matches(const Ints& data, int rank, std::uint64_t round, const char* what, std::size_t from = 0) {
  std::size_t at = 0;
  while (at < data.size() && data[at] == value(rank, from + at, round)) ++at;
  expect(at == data.size(), "%s: wrong at %zu of %zu, from rank %d, round %llu", what, at, data.size(), rank,
         static_cast<unsigned long long>(round));
}

inline const std::vector<std::size_t> kCounts = {0, 1, 5, 12, 13, 900, 5000, 20000, 300000};

// One rank's view of a communicator.
struct Comm {
  Rank& rank;
  std::vector<int> members;
  std::uint32_t group;
  int me;
  std::uint64_t round = 0;
  std::optional<std::uint64_t> lane;  // the lane of its collectives, or empty for the communicator's own
  Ints given, taken, reduced;         // for ops of a lost communicator. UCX may use them until the engine is closed.

  Comm(Rank& the_rank, std::vector<int> the_members)
      : rank(the_rank),
        members(std::move(the_members)),
        group(the_rank.open(members)),
        me(static_cast<int>(std::find(members.begin(), members.end(), rank.number) - members.begin())) {}
  int size() const { return static_cast<int>(members.size()); }
  template <class Make>
  Ticket collective(std::uint64_t mark, Make make) {
    return rank.post([&](Ticket ticket) {
      const auto elsewhere = rank.post_elsewhere(group, [&](Elsewhere& place) {
        lane ? place.collective(ticket, *lane, mark, make) : place.collective(ticket, group, mark, make);
      });
      if (elsewhere) return *elsewhere;
      Counting counting;
      if (lane) return rank.engine->lane_collective(ticket, group, *lane, mark, make) != 0;
      return rank.engine->collective(ticket, group, mark, make) != 0;
    });
  }
  void barrier() {
    const auto called = std::exchange(lane, std::nullopt);
    rank.finish(collective(1, [](auto& it, Unequal&) { return run_barrier(it); }), "barrier");
    lane = called;
  }
};

constexpr Reduction kSum{Operator::Sum, DType::Int32};

// --------------------------------------------------------------------------------------------------------- collectives

inline Op post_broadcast(Comm& comm, Random& common, std::uint64_t round) {
  const int root = static_cast<int>(common.below(comm.size()));
  const std::size_t count = common.of(kCounts);
  auto data = std::make_shared<Ints>(comm.me == root ? filled(root, count, round) : Ints(count));
  const auto make = [&](auto& it, Unequal&) { return run_broadcast(it, root, data->data(), count * 4); };
  return {comm.collective(10 + root, make), [=] { matches(*data, root, round, "broadcast"); }};
}

inline void matches_sum(const Ints& data, int ranks, std::uint64_t round, const char* what, std::size_t from = 0) {
  for (std::size_t at = 0; at < data.size(); ++at) {
    std::uint32_t sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += static_cast<std::uint32_t>(value(rank, from + at, round));
    if (data[at] == static_cast<std::int32_t>(sum)) continue;
    expect(false, "%s: wrong at %zu of %zu", what, at, data.size());
    return;
  }
  expect(true, "%s", what);
}

inline Op post_reduce(Comm& comm, Random& common, std::uint64_t round) {
  const int root = static_cast<int>(common.below(comm.size() + 1)) - 1;  // -1: all_reduce
  const std::size_t count = common.of(kCounts);
  auto data = std::make_shared<Ints>(filled(comm.me, count, round));
  const int me = comm.me, size = comm.size();
  return {comm.collective(30 + root,
                          [&](auto& it, Unequal&) {
                            return root < 0 ? run_all_reduce(it, kSum, data->data(), count)
                                            : run_reduce(it, kSum, root, data->data(), count);
                          }),
          [=] {
            if (root < 0 || root == me)
              matches_sum(*data, size, round, "reduce");
            else
              matches(*data, me, round, "an input of reduce");
          }};
}

inline Op post_reduce_scatter(Comm& comm, Random& common, std::uint64_t round) {
  const std::size_t count = common.of(kCounts) / 4;
  Bytes counts;
  for (int rank = 0; rank < comm.size(); ++rank) counts.push_back(count * (rank % 3));
  const std::size_t before = std::accumulate(counts.begin(), counts.begin() + comm.me, std::size_t{0});
  const std::size_t whole = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  auto in = std::make_shared<Ints>(filled(comm.me, whole, round));
  auto out = std::make_shared<Ints>(counts[comm.me]);
  Inputs ins;
  std::size_t offset = 0;
  for (std::size_t share : counts) {
    ins.push_back(in->data() + offset);
    offset += share;
  }
  const int size = comm.size();
  const auto make = [&](auto& it, Unequal&) { return run_reduce_scatter(it, kSum, ins, counts, out->data()); };
  return {comm.collective(40, make), [=] { matches_sum(*out, size, round, "reduce_scatter", before), (void)in; }};
}

// all_gather, or gather if there is a root.
inline Op post_gather(Comm& comm, Random& common, std::uint64_t round) {
  const int root = static_cast<int>(common.below(comm.size() + 1)) - 1, me = comm.me;
  const std::size_t count = common.of(kCounts) / 2;
  auto outs = std::make_shared<std::vector<Ints>>();
  Bytes bytes;
  Outputs places;
  for (int rank = 0; rank < comm.size(); ++rank) {
    bytes.push_back(4 * (root < 0 ? count * (rank % 2 + 1) : count));
    outs->emplace_back(bytes.back() / 4);
  }
  for (Ints& out : *outs) places.push_back(out.data());
  auto in = std::make_shared<Ints>(filled(me, bytes[me] / 4, round));
  if (root >= 0 && root != me) places.clear();
  return {comm.collective(50 + root,
                          [&](auto& it, Unequal&) {
                            return root < 0 ? run_all_gather(it, in->data(), places, bytes)
                                            : run_gather(it, root, in->data(), places, bytes[0]);
                          }),
          [=] {
            (void)in;
            for (int rank = 0; rank < static_cast<int>(outs->size()) && (root < 0 || root == me); ++rank) {
              matches((*outs)[rank], rank, round, "gather");
            }
          }};
}

inline Op post_scatter(Comm& comm, Random& common, std::uint64_t round) {
  const int root = static_cast<int>(common.below(comm.size())), me = comm.me;
  const std::size_t count = common.of(kCounts) / 2;
  auto in = std::make_shared<Ints>(me == root ? filled(root, count * comm.size(), round) : Ints());
  auto out = std::make_shared<Ints>(count);
  Inputs ins;
  for (int rank = 0; rank < comm.size() && me == root; ++rank) ins.push_back(in->data() + count * rank);
  const auto make = [&](auto& it, Unequal&) { return run_scatter(it, root, ins, out->data(), count * 4); };
  return {comm.collective(60 + root, make), [=] { matches(*out, root, round, "scatter", count * me), (void)in; }};
}

inline Op post_all_to_all(Comm& comm, Random& common, std::uint64_t round) {
  const bool equal = common.below(2);
  const std::size_t count = common.of(kCounts) / 4;
  const int me = comm.me, size = comm.size();
  auto in = std::make_shared<std::vector<Ints>>();
  auto out = std::make_shared<std::vector<Ints>>();
  Inputs ins;
  Outputs outs;
  Bytes in_bytes, out_bytes;
  for (int rank = 0; rank < size; ++rank) {
    in->push_back(filled(me, equal ? count : count * ((me + 2 * rank) % 3), round + static_cast<std::uint64_t>(rank)));
    out->emplace_back(equal ? count : count * ((rank + 2 * me) % 3));
    in_bytes.push_back(in->back().size() * 4);
    out_bytes.push_back(out->back().size() * 4);
  }
  for (int rank = 0; rank < size; ++rank) {
    ins.push_back((*in)[rank].data());
    outs.push_back((*out)[rank].data());
  }
  return {comm.collective(70 + equal,
                          [&](auto& it, Unequal& unequal) {
                            return run_all_to_all(it, ins, in_bytes, outs, out_bytes, equal, unequal);
                          }),
          [=] {
            (void)in;
            for (int rank = 0; rank < size; ++rank) {
              matches((*out)[rank], rank, round + static_cast<std::uint64_t>(me), "all_to_all");
            }
          }};
}

inline Op post_collective(Comm& comm) {
  const std::uint64_t round = ++comm.round;
  Random common(comm.rank.world.seed * 1000 + round);
  using Post = Op (*)(Comm&, Random&, std::uint64_t);
  static const std::vector<Post> kPosts = {post_broadcast, post_reduce,  post_reduce,    post_reduce_scatter,
                                           post_gather,    post_scatter, post_all_to_all};
  return common.of(kPosts)(comm, common, round);
}

inline void end(Rank& rank, std::vector<Op>& ops, Where where = Where::current()) {
  for (Op& op : ops) {
    rank.finish(op.ticket, "an op", where);
    op.check();
  }
  ops.clear();
}

// Some collectives queue up. Those of two communicators run at the same time.
inline void collectives(Comm& one, Comm& other, int count) {
  std::vector<Op> ops;
  for (int at = 0; at < count; ++at) {
    ops.push_back(post_collective(one));
    if (at % 2) ops.push_back(post_collective(other));
    if (one.rank.random.below(3) == 0) end(one.rank, ops);
  }
  end(one.rank, ops);
  one.barrier();
}

}  // namespace aiocomms
