// Collectives of ranks that share memory: rounds of a Segment, each rank reading what the others published.
//
// The first round of each collective carries its fingerprint, and everybody waits for everybody in it: ranks that
// disagree on what they are doing find out before any data has moved.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/reduce.hpp"
#include "collectives/schedule.hpp"
#include "collectives/shared.hpp"

namespace aiocomms {

using Bytes = std::vector<std::size_t>;

Task shared_barrier(Shared& shared);
// data becomes the reduction on every rank, or on `root` alone if that is not -1, where it goes to `out`.
Task shared_reduce(Shared& shared, Reduction reduction, int root, void* data, void* out, std::size_t count);
Task shared_reduce_scatter(Shared& shared, Reduction reduction, std::vector<const void*> ins, Bytes counts, void* out);
// Each rank r gives bytes[r] of `in` to all that take; `outs` is empty on a rank that takes nothing.
Task shared_spread(Shared& shared, const void* in, std::vector<void*> outs, Bytes bytes);
// Each rank gives each other a part of its own; `bytes`: the largest part anywhere.
Task shared_exchange(Shared& shared, std::vector<const void*> ins, Bytes in_bytes, std::vector<void*> outs,
                     Bytes out_bytes, std::size_t largest);
// As shared_exchange, where each rank knows its own parts' sizes only. wrong: who gives this rank a part of another
// size than it takes, and how many bytes.
struct Unequal {
  int rank = -1;
  std::size_t given = 0;
};
Task shared_exchange_v(Shared& shared, std::vector<const void*> ins, Bytes in_bytes, std::vector<void*> outs,
                       Bytes out_bytes, Unequal* wrong);

}  // namespace aiocomms
