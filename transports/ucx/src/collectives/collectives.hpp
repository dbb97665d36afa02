// Chooses the algorithm of a collective: shared memory if all ranks are on one host, and messages between hosts.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/reduce.hpp"
#include "collectives/schedule.hpp"
#include "engine/group.hpp"
#include "engine/lanes.hpp"

namespace aiocomms {

using Inputs = std::vector<const void*>;
using Outputs = std::vector<void*>;

Task run_barrier(Group& group);
Task run_broadcast(Group& group, int root, void* data, std::size_t bytes);
Task run_all_reduce(Group& group, Reduction reduction, void* data, std::size_t count);
// The root's `data` becomes the reduction. The others' stays.
Task run_reduce(Group& group, Reduction reduction, int root, void* data, std::size_t count);
Task run_reduce_scatter(Group& group, Reduction reduction, Inputs ins, Bytes counts, void* out);
Task run_all_gather(Group& group, const void* in, Outputs outs, Bytes bytes);
Task run_gather(Group& group, int root, const void* in, Outputs outs, std::size_t bytes);
Task run_scatter(Group& group, int root, Inputs ins, void* out, std::size_t bytes);
// unequal: reports ranks that disagree on the size of a block. equal: all blocks of all ranks have one size.
Task run_all_to_all(Group& group, Inputs ins, Bytes in_bytes, Outputs outs, Bytes out_bytes, bool equal,
                    Unequal& unequal);

// The same for a lane.
Task run_barrier(LaneCalls& lane);
Task run_broadcast(LaneCalls& lane, int root, void* data, std::size_t bytes);
Task run_all_reduce(LaneCalls& lane, Reduction reduction, void* data, std::size_t count);
Task run_reduce(LaneCalls& lane, Reduction reduction, int root, void* data, std::size_t count);
Task run_reduce_scatter(LaneCalls& lane, Reduction reduction, Inputs ins, Bytes counts, void* out);
Task run_all_gather(LaneCalls& lane, const void* in, Outputs outs, Bytes bytes);
Task run_gather(LaneCalls& lane, int root, const void* in, Outputs outs, std::size_t bytes);
Task run_scatter(LaneCalls& lane, int root, Inputs ins, void* out, std::size_t bytes);
Task run_all_to_all(LaneCalls& lane, Inputs ins, Bytes in_bytes, Outputs outs, Bytes out_bytes, bool equal,
                    Unequal& unequal);

}  // namespace aiocomms
