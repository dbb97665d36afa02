#include "collectives/collectives.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>

#include "collectives/message_collectives.hpp"

namespace aiocomms {
namespace {

// Bytes that are reduced across hosts at a time.
constexpr std::size_t kPiece = 2 * 1024 * 1024;

bool one_host(const Group& group) { return group.hosts == 1 && group.shared; }

// Between the ranks of this host, if there are others than this.
Task spread_from(Group& group, int local_rank, void* data, std::size_t bytes, int taker = -1) {
  Shared& shared = *group.shared;
  Bytes sizes(static_cast<std::size_t>(shared.ranks()), 0);
  sizes[local_rank] = bytes;
  bool takes = shared.rank() != local_rank && (taker < 0 || taker == shared.rank());
  Outputs outs(takes ? sizes.size() : 0, data);
  return shared_spread(shared, data, std::move(outs), std::move(sizes));
}

int local_index(const Group& group, int rank) {
  return static_cast<int>(std::find(group.local.begin(), group.local.end(), rank) - group.local.begin());
}

// What remains to be done with contributions that have been lifted.
Reduction plain(const Reduction& reduction) {
  bool sum = reduction.op == Operator::Avg || reduction.op == Operator::PremulSum;
  return {sum ? Operator::Sum : reduction.op, lifted(reduction.dtype), 1.0};
}

// Reduce within each host, between the hosts' first ranks, and hand the result down: each byte crosses the network once
// per host (as in MPICH's and Open MPI's SMP-aware collectives; Karonis et al., IPDPS 2000). root -1: all ranks.
Task reduce_piece(Group& group, Reduction reduction, int root, void* data, std::size_t count, void* partial) {
  const Reduction local = plain(reduction);
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
    const int taker = root < 0 ? -1 : local_index(group, root);
    if (taker != 0) {
      Task down = spread_from(group, 0, partial, count * size_of(local.dtype), taker);
      co_await down;
    }
  }
  if (root < 0 || root == group.rank) lower(reduction, data, partial, count, ranks);
}

// Piece by piece: to copy all of a large tensor at one go would keep the loop, 64 MiB for 25 ms and more.
Task reduce_across(Group& group, Reduction reduction, int root, void* data, std::size_t count) {
  const std::size_t element = size_of(lifted(reduction.dtype)), most = kPiece / element;
  const auto scratch = std::make_unique_for_overwrite<std::byte[]>(std::min(count, most) * element);
  std::size_t done = 0;
  do {
    const std::size_t now = std::min(count - done, most);
    void* const first = static_cast<std::byte*>(data) + done * size_of(reduction.dtype);
    Task piece = reduce_piece(group, reduction, root, first, now, scratch.get());
    co_await piece;
    done += now;
  } while (done < count);
}

Task broadcast_across(Group& group, int root, void* data, std::size_t bytes) {
  const bool here = group.leader_of[root] == group.leader_of[group.rank];
  if (group.shared && here) {
    Task within = spread_from(group, local_index(group, root), data, bytes);
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

// The rest keep the arrays that their schedules read.
Task reduce_scatter_across(Group& group, Reduction reduction, Inputs ins, Bytes counts, void* out) {
  Task task = reduce_scatter(*group.wire, reduction, ins.data(), counts.data(), out);
  co_await task;
}

Task all_gather_across(Group& group, const void* in, Outputs outs, Bytes bytes) {
  Task task = all_gather(*group.wire, in, outs.data(), bytes.data());
  co_await task;
}

Task gather_across(Group& group, int root, const void* in, Outputs outs, std::size_t bytes) {
  Task task = gather(*group.wire, root, in, outs.data(), bytes);
  co_await task;
}

Task scatter_across(Group& group, int root, Inputs ins, void* out, std::size_t bytes) {
  Task task = scatter(*group.wire, root, ins.data(), out, bytes);
  co_await task;
}

Task all_to_all_across(Group& group, Inputs ins, Bytes in_bytes, Outputs outs, Bytes out_bytes, bool equal,
                       Unequal& unequal) {
  if (!equal) {
    // Blocks that do not fit each other would not be received as they were sent: compare their sizes first.
    const std::size_t ranks = ins.size();
    Bytes theirs(ranks), each(ranks, sizeof(std::size_t));
    Inputs given(ranks);
    Outputs taken(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      given[rank] = &in_bytes[rank];
      taken[rank] = &theirs[rank];
    }
    Task sizes = all_to_all(*group.wire, given.data(), each.data(), taken.data(), each.data(), true);
    co_await sizes;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (theirs[rank] != out_bytes[rank]) {
        unequal = Unequal{static_cast<int>(rank), theirs[rank]};
        co_return;
      }
    }
  }
  Task task = all_to_all(*group.wire, ins.data(), in_bytes.data(), outs.data(), out_bytes.data(), equal);
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
  return one_host(group) ? shared_reduce_scatter(*group.shared, reduction, std::move(ins), std::move(counts), out)
                         : reduce_scatter_across(group, reduction, std::move(ins), std::move(counts), out);
}

Task run_all_gather(Group& group, const void* in, Outputs outs, Bytes bytes) {
  return one_host(group) ? shared_spread(*group.shared, in, std::move(outs), std::move(bytes))
                         : all_gather_across(group, in, std::move(outs), std::move(bytes));
}

Task run_gather(Group& group, int root, const void* in, Outputs outs, std::size_t bytes) {
  return one_host(group) ? shared_spread(*group.shared, in, std::move(outs), Bytes(group.peers.size(), bytes))
                         : gather_across(group, root, in, std::move(outs), bytes);
}

Task run_scatter(Group& group, int root, Inputs ins, void* out, std::size_t bytes) {
  if (!one_host(group)) return scatter_across(group, root, std::move(ins), out, bytes);
  const std::size_t ranks = group.peers.size();
  Bytes given(ranks, group.rank == root ? bytes : 0), taken(ranks, 0);
  taken[root] = bytes;
  if (ins.empty()) ins.assign(ranks, nullptr);
  return shared_exchange(*group.shared, std::move(ins), std::move(given), Outputs(ranks, out), std::move(taken), bytes);
}

Task run_all_to_all(Group& group, Inputs ins, Bytes in_bytes, Outputs outs, Bytes out_bytes, bool equal,
                    Unequal& unequal) {
  if (!one_host(group)) {
    return all_to_all_across(group, std::move(ins), std::move(in_bytes), std::move(outs), std::move(out_bytes), equal,
                             unequal);
  }
  if (!equal) {
    return shared_exchange_v(*group.shared, std::move(ins), std::move(in_bytes), std::move(outs), std::move(out_bytes),
                             &unequal);
  }
  const std::size_t block = in_bytes[0];
  return shared_exchange(*group.shared, std::move(ins), std::move(in_bytes), std::move(outs), std::move(out_bytes),
                         block);
}

}  // namespace aiocomms
