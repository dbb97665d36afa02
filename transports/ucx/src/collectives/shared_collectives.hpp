// Collectives of ranks that share memory, as rounds of a Segment. Each rank reads the data that the others publish.
//
// The first round of each collective carries its fingerprint, and each rank waits there for all others. So ranks that
// run different collectives notice it before any data moves.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/reduce.hpp"
#include "collectives/schedule.hpp"
#include "collectives/shared.hpp"

namespace aiocomms {

using Bytes = std::vector<std::size_t>;

Task shared_barrier(Shared& shared);
// `data` becomes the reduction on every rank. If `root` is not -1, only the root gets it, in `out`.
Task shared_reduce(Shared& shared, Reduction reduction, int root, void* data, void* out, std::size_t count);
Task shared_reduce_scatter(Shared& shared, Reduction reduction, std::vector<const void*> ins, Bytes counts, void* out);
// Each rank r gives bytes[r] bytes of `in` to all that take. `outs` is empty on a rank that takes nothing.
Task shared_spread(Shared& shared, const void* in, std::vector<void*> outs, Bytes bytes);
// Each rank gives each other rank a different part. `largest`: the largest part of any rank.
Task shared_exchange(Shared& shared, std::vector<const void*> ins, Bytes in_bytes, std::vector<void*> outs,
                     Bytes out_bytes, std::size_t largest);
// The same, but each rank only knows the sizes of its own parts. wrong: a rank that gives this one a part of unexpected
// size, and its size in bytes.
struct Unequal {
  int rank = -1;
  std::size_t given = 0;
};
Task shared_exchange_v(Shared& shared, std::vector<const void*> ins, Bytes in_bytes, std::vector<void*> outs,
                       Bytes out_bytes, Unequal* wrong);

}  // namespace aiocomms
