#include "collectives/collectives.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>

#include "collectives/hierarchical.hpp"
#include "collectives/message_collectives.hpp"
#include "collectives/schedule_parts.hpp"

namespace aiocomms {
namespace {

bool one_host(const Group& group) { return group.hosts.count() == 1 && group.shared; }

// Otherwise each rank is the only one of its host, and sharing within hosts gains nothing.
bool several_share_a_host(const Group& group) { return group.hosts.largest() > 1; }

// Whether small blocks of a host's ranks should travel together. One more copy of each takes less time than the
// messages that it saves. The limit comes from the critical path in critical_path_test.cpp. It is about 1 KiB if each
// rank has a block for each other one, or few ranks have one for a root. It is higher if the alternative is a tree of
// messages.
bool together(const Group& group, std::size_t block, bool rooted) {
  constexpr std::size_t kTogether = 1024;
  const bool tree = rooted && static_cast<int>(group.peers.size()) > kFlatRanks;
  return several_share_a_host(group) && block > 0 && block <= (tree ? kTreeBlock : kTogether) &&
         group.hosts.largest() * block <= Segment::kSlot;
}

std::size_t largest(const Bytes& sizes) { return *std::max_element(sizes.begin(), sizes.end()); }

Reach reach_of(const Group& group) { return {group.hosts, *group.wire, group.shared.get()}; }

// Spreads data between the ranks of this host.
Task spread_from(Group& group, int local_rank, void* data, std::size_t bytes, int taker = -1) {
  Shared& shared = *group.shared;
  Bytes sizes(static_cast<std::size_t>(shared.ranks()), 0);
  sizes[local_rank] = bytes;
  bool takes = shared.rank() != local_rank && (taker < 0 || taker == shared.rank());
  Outputs outs(takes ? sizes.size() : 0, data);
  return shared_spread(shared, data, std::move(outs), std::move(sizes));
}

// Reduces within each host and between the hosts' first ranks, and spreads the result within each host. Each byte
// crosses the network once per host (as in MPICH's and Open MPI's SMP-aware collectives; Karonis et al., IPDPS 2000).
// root -1: all ranks.
Task reduce_small(Group& group, Reduction reduction, int root, void* data, std::size_t count) {
  const Reduction local = after_lifting(reduction);
  const Scratch scratch = make_scratch(count * size_of(local.dtype));
  void* const partial = scratch.get();
  lift(reduction, partial, data, count);
  if (group.shared) {
    Task within = shared_reduce(*group.shared, local, 0, partial, partial, count);
    co_await within;
  }
  const bool here = root < 0 || group.leader_of[root] == group.leader_of[group.rank];
  if (group.leaders) {
    Task between = root < 0 ? all_reduce(*group.leaders, local, partial, count)
                            : reduce(*group.leaders, local, group.leader_of[root], partial, partial, count);
    co_await between;
  }
  const int ranks = static_cast<int>(group.peers.size());
  if (group.shared && here) {
    const int taker = root < 0 ? -1 : group.place(root);
    if (taker != 0) {
      Task down = spread_from(group, 0, partial, count * size_of(local.dtype), taker);
      co_await down;
    }
  }
  if (root < 0 || root == group.rank) lower(reduction, data, partial, count, ranks);
}

// A small reduction is fastest if it goes from host to host whole, in one step.
Task reduce_across(Group& group, Reduction reduction, int root, void* data, std::size_t count) {
  if (count * size_of(reduction.dtype) <= kSmallReduction) return reduce_small(group, reduction, root, data, count);
  return hierarchical_reduce(reach_of(group), reduction, root, data, count);
}

Task broadcast_across(Group& group, int root, void* data, std::size_t bytes) {
  const bool here = group.leader_of[root] == group.leader_of[group.rank];
  if (group.shared && here) {
    Task within = spread_from(group, group.place(root), data, bytes);
    co_await within;
  }
  if (group.leaders) {
    Task between = broadcast(*group.leaders, group.leader_of[root], data, bytes);
    co_await between;
  }
  if (group.shared && !here) {
    Task down = spread_from(group, 0, data, bytes);
    co_await down;
  }
}

Task barrier_across(Group& group) {
  if (group.shared) {
    Task within = shared_barrier(*group.shared);
    co_await within;
  }
  if (group.leaders) {
    Task between = barrier(*group.leaders);
    co_await between;
  }
  if (group.shared) {
    Task down = shared_barrier(*group.shared);
    co_await down;
  }
}

// The following tasks own the arrays that their schedules read.
Task reduce_scatter_across(Messages& wire, Reduction reduction, Inputs ins, Bytes counts, void* out) {
  Task task = reduce_scatter(wire, reduction, ins.data(), counts.data(), out);
  co_await task;
}

Task all_gather_across(Messages& wire, const void* in, Outputs outs, Bytes bytes) {
  Task task = all_gather(wire, in, outs.data(), bytes.data());
  co_await task;
}

Task gather_across(Messages& wire, int root, const void* in, Outputs outs, std::size_t bytes) {
  Task task = gather(wire, root, in, outs.data(), bytes);
  co_await task;
}

Task scatter_across(Messages& wire, int root, Inputs ins, void* out, std::size_t bytes) {
  Task task = scatter(wire, root, ins.data(), out, bytes);
  co_await task;
}

Task all_to_all_across(Messages& wire, Inputs ins, Bytes in_bytes, Outputs outs, Bytes out_bytes, bool equal,
                       Unequal& unequal) {
  if (!equal) {
    // A block of unexpected size could not be received, so the ranks first compare the sizes.
    const std::size_t ranks = ins.size();
    Bytes theirs(ranks), each(ranks, sizeof(std::size_t));
    Inputs given(ranks);
    Outputs taken(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      given[rank] = &in_bytes[rank];
      taken[rank] = &theirs[rank];
    }
    Task sizes = all_to_all(wire, given.data(), each.data(), taken.data(), each.data(), true);
    co_await sizes;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (theirs[rank] != out_bytes[rank]) {
        unequal = Unequal{static_cast<int>(rank), theirs[rank]};
        co_return;
      }
    }
  }
  Task task = all_to_all(wire, ins.data(), in_bytes.data(), outs.data(), out_bytes.data(), equal);
  co_await task;
}

}  // namespace

Task run_barrier(Group& group) { return one_host(group) ? shared_barrier(*group.shared) : barrier_across(group); }

Task run_broadcast(Group& group, int root, void* data, std::size_t bytes) {
  return one_host(group) ? spread_from(group, root, data, bytes) : broadcast_across(group, root, data, bytes);
}

Task run_all_reduce(Group& group, Reduction reduction, void* data, std::size_t count) {
  return one_host(group) ? shared_reduce(*group.shared, reduction, -1, data, data, count)
                         : reduce_across(group, reduction, -1, data, count);
}

Task run_reduce(Group& group, Reduction reduction, int root, void* data, std::size_t count) {
  return one_host(group) ? shared_reduce(*group.shared, reduction, root, data, data, count)
                         : reduce_across(group, reduction, root, data, count);
}

Task run_reduce_scatter(Group& group, Reduction reduction, Inputs ins, Bytes counts, void* out) {
  if (one_host(group)) {
    return shared_reduce_scatter(*group.shared, reduction, std::move(ins), std::move(counts), out);
  }
  if (several_share_a_host(group) && largest(counts) > 0) {
    return hierarchical_reduce_scatter(reach_of(group), reduction, std::move(ins), std::move(counts), out);
  }
  return reduce_scatter_across(*group.wire, reduction, std::move(ins), std::move(counts), out);
}

Task run_all_gather(Group& group, const void* in, Outputs outs, Bytes bytes) {
  if (one_host(group)) return shared_spread(*group.shared, in, std::move(outs), std::move(bytes));
  if (several_share_a_host(group) && largest(bytes) > 0) {
    return hierarchical_all_gather(reach_of(group), in, std::move(outs), std::move(bytes));
  }
  return all_gather_across(*group.wire, in, std::move(outs), std::move(bytes));
}

Task run_gather(Group& group, int root, const void* in, Outputs outs, std::size_t bytes) {
  if (one_host(group)) return shared_spread(*group.shared, in, std::move(outs), Bytes(group.peers.size(), bytes));
  return together(group, bytes, true) ? hierarchical_gather(reach_of(group), root, in, std::move(outs), bytes)
                                      : gather_across(*group.wire, root, in, std::move(outs), bytes);
}

Task run_scatter(Group& group, int root, Inputs ins, void* out, std::size_t bytes) {
  if (!one_host(group)) {
    return together(group, bytes, true) ? hierarchical_scatter(reach_of(group), root, std::move(ins), out, bytes)
                                        : scatter_across(*group.wire, root, std::move(ins), out, bytes);
  }
  const std::size_t ranks = group.peers.size();
  Bytes given(ranks, group.rank == root ? bytes : 0), taken(ranks, 0);
  taken[root] = bytes;
  if (ins.empty()) ins.assign(ranks, nullptr);
  return shared_exchange(*group.shared, std::move(ins), std::move(given), Outputs(ranks, out), std::move(taken), bytes);
}

Task run_all_to_all(Group& group, Inputs ins, Bytes in_bytes, Outputs outs, Bytes out_bytes, bool equal,
                    Unequal& unequal) {
  if (!one_host(group)) {
    if (equal && together(group, in_bytes[0], false)) {
      return hierarchical_all_to_all(reach_of(group), std::move(ins), std::move(outs), in_bytes[0]);
    }
    return all_to_all_across(*group.wire, std::move(ins), std::move(in_bytes), std::move(outs), std::move(out_bytes),
                             equal, unequal);
  }
  if (!equal) {
    return shared_exchange_v(*group.shared, std::move(ins), std::move(in_bytes), std::move(outs), std::move(out_bytes),
                             &unequal);
  }
  const std::size_t block = in_bytes[0];
  return shared_exchange(*group.shared, std::move(ins), std::move(in_bytes), std::move(outs), std::move(out_bytes),
                         block);
}

// ------------------------------------------------------------------------------------------------------------ of lanes

namespace {

bool small(std::size_t bytes) { return bytes <= Board::kLargest; }

Task in_turn(LaneCalls& lane, Task task) {
  co_await lane.turn();
  co_await task;
}

Task meet_in_barrier(LaneCalls& lane) { co_await lane.meet(nullptr, 0); }

Task reduce_given(LaneCalls& lane, Reduction reduction, int root, void* data, std::size_t count) {
  co_await lane.meet(data, count * size_of(reduction.dtype));
  if (root >= 0 && root != lane.rank()) co_return;
  Shared& shared = lane.slots();
  for (int rank = 0; rank < lane.ranks(); ++rank) shared.inputs[rank] = lane.given(rank);
  reduce(reduction, data, shared.inputs.data(), lane.ranks(), count);
}

// Each rank r gives bytes[r] bytes to all that take. `outs` is empty on a rank that takes nothing.
Task spread_given(LaneCalls& lane, const void* in, Outputs outs, Bytes bytes) {
  co_await lane.meet(in, bytes[lane.rank()]);
  for (std::size_t rank = 0; rank < outs.size(); ++rank) {
    const void* given = lane.given(static_cast<int>(rank));
    if (bytes[rank] && outs[rank] != given) std::memcpy(outs[rank], given, bytes[rank]);
  }
}

// Joins the blocks of a rank, all of one size. A giving rank gives all its blocks to all ranks.
std::unique_ptr<std::byte[]> joined(const Inputs& ins, std::size_t block) {
  auto all = std::make_unique_for_overwrite<std::byte[]>(ins.size() * block);
  for (std::size_t rank = 0; block && rank < ins.size(); ++rank)
    std::memcpy(all.get() + rank * block, ins[rank], block);
  return all;
}

const std::byte* block_of(const LaneCalls& lane, int rank, std::size_t block) {
  return static_cast<const std::byte*>(lane.given(rank)) + static_cast<std::size_t>(lane.rank()) * block;
}

Task exchange_given(LaneCalls& lane, Inputs ins, Outputs outs, std::size_t block) {
  const auto all = joined(ins, block);
  co_await lane.meet(all.get(), ins.size() * block);
  for (std::size_t rank = 0; block && rank < outs.size(); ++rank) {
    std::memcpy(outs[rank], block_of(lane, static_cast<int>(rank), block), block);
  }
}

Task scatter_given(LaneCalls& lane, int root, Inputs ins, void* out, std::size_t block) {
  const auto all = joined(ins, block);
  co_await lane.meet(all.get(), ins.size() * block);
  if (block) std::memcpy(out, block_of(lane, root, block), block);
}

Task reduce_scatter_given(LaneCalls& lane, Reduction reduction, Inputs ins, Bytes counts, void* out) {
  const std::size_t size = size_of(reduction.dtype), me = static_cast<std::size_t>(lane.rank());
  const std::size_t whole = std::accumulate(counts.begin(), counts.end(), std::size_t{0}) * size;
  const std::size_t before = std::accumulate(counts.begin(), counts.begin() + lane.rank(), std::size_t{0}) * size;
  const auto all = std::make_unique_for_overwrite<std::byte[]>(whole);
  for (std::size_t rank = 0, done = 0; rank < ins.size(); done += counts[rank++] * size) {
    if (counts[rank]) std::memcpy(all.get() + done, ins[rank], counts[rank] * size);
  }
  co_await lane.meet(all.get(), whole);
  Shared& shared = lane.slots();
  for (int rank = 0; rank < lane.ranks(); ++rank) {
    shared.inputs[rank] = static_cast<const std::byte*>(lane.given(rank)) + before;
  }
  reduce(reduction, out, shared.inputs.data(), lane.ranks(), counts[me]);
}

Bytes only(const LaneCalls& lane, int rank, std::size_t bytes) {
  Bytes sizes(static_cast<std::size_t>(lane.ranks()), 0);
  sizes[rank] = bytes;
  return sizes;
}

}  // namespace

Task run_barrier(LaneCalls& lane) { return lane.messages() ? barrier(*lane.messages()) : meet_in_barrier(lane); }

Task run_broadcast(LaneCalls& lane, int root, void* data, std::size_t bytes) {
  if (lane.messages()) return broadcast(*lane.messages(), root, data, bytes);
  Outputs outs(lane.rank() == root ? 0 : static_cast<std::size_t>(lane.ranks()), data);
  if (small(bytes)) return spread_given(lane, data, std::move(outs), only(lane, root, bytes));
  return in_turn(lane, shared_spread(lane.slots(), data, std::move(outs), only(lane, root, bytes)));
}

Task run_all_reduce(LaneCalls& lane, Reduction reduction, void* data, std::size_t count) {
  if (lane.messages()) return all_reduce(*lane.messages(), reduction, data, count);
  if (small(count * size_of(reduction.dtype))) return reduce_given(lane, reduction, -1, data, count);
  return in_turn(lane, shared_reduce(lane.slots(), reduction, -1, data, data, count));
}

Task run_reduce(LaneCalls& lane, Reduction reduction, int root, void* data, std::size_t count) {
  if (lane.messages()) return reduce(*lane.messages(), reduction, root, data, data, count);
  if (small(count * size_of(reduction.dtype))) return reduce_given(lane, reduction, root, data, count);
  return in_turn(lane, shared_reduce(lane.slots(), reduction, root, data, data, count));
}

Task run_reduce_scatter(LaneCalls& lane, Reduction reduction, Inputs ins, Bytes counts, void* out) {
  if (lane.messages()) {
    return reduce_scatter_across(*lane.messages(), reduction, std::move(ins), std::move(counts), out);
  }
  if (small(std::accumulate(counts.begin(), counts.end(), std::size_t{0}) * size_of(reduction.dtype))) {
    return reduce_scatter_given(lane, reduction, std::move(ins), std::move(counts), out);
  }
  return in_turn(lane, shared_reduce_scatter(lane.slots(), reduction, std::move(ins), std::move(counts), out));
}

Task run_all_gather(LaneCalls& lane, const void* in, Outputs outs, Bytes bytes) {
  if (lane.messages()) return all_gather_across(*lane.messages(), in, std::move(outs), std::move(bytes));
  const bool fits = small(*std::max_element(bytes.begin(), bytes.end()));
  return fits ? spread_given(lane, in, std::move(outs), std::move(bytes))
              : in_turn(lane, shared_spread(lane.slots(), in, std::move(outs), std::move(bytes)));
}

Task run_gather(LaneCalls& lane, int root, const void* in, Outputs outs, std::size_t bytes) {
  if (lane.messages()) return gather_across(*lane.messages(), root, in, std::move(outs), bytes);
  return run_all_gather(lane, in, std::move(outs), Bytes(static_cast<std::size_t>(lane.ranks()), bytes));
}

Task run_scatter(LaneCalls& lane, int root, Inputs ins, void* out, std::size_t bytes) {
  if (lane.messages()) return scatter_across(*lane.messages(), root, std::move(ins), out, bytes);
  const std::size_t ranks = static_cast<std::size_t>(lane.ranks());
  if (small(bytes * ranks)) return scatter_given(lane, root, std::move(ins), out, bytes);
  Bytes given(ranks, lane.rank() == root ? bytes : 0);
  if (ins.empty()) ins.assign(ranks, nullptr);
  return in_turn(lane, shared_exchange(lane.slots(), std::move(ins), std::move(given), Outputs(ranks, out),
                                       only(lane, root, bytes), bytes));
}

Task run_all_to_all(LaneCalls& lane, Inputs ins, Bytes in_bytes, Outputs outs, Bytes out_bytes, bool equal,
                    Unequal& unequal) {
  if (lane.messages()) {
    return all_to_all_across(*lane.messages(), std::move(ins), std::move(in_bytes), std::move(outs),
                             std::move(out_bytes), equal, unequal);
  }
  if (!equal) {
    return in_turn(lane, shared_exchange_v(lane.slots(), std::move(ins), std::move(in_bytes), std::move(outs),
                                           std::move(out_bytes), &unequal));
  }
  const std::size_t block = in_bytes[0];
  if (small(block * ins.size())) return exchange_given(lane, std::move(ins), std::move(outs), block);
  return in_turn(lane, shared_exchange(lane.slots(), std::move(ins), std::move(in_bytes), std::move(outs),
                                       std::move(out_bytes), block));
}

}  // namespace aiocomms
