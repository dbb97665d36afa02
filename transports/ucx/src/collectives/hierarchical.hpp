// Collectives of several hosts, some with several ranks. They use shared memory within each host and messages between
// hosts, both at the same time.
//
// Each rank handles a share of its host's data. It communicates with the ranks of other hosts that handle the same
// share. So all ranks of a host copy, reduce, send and receive at once. They use as many connections as ranks, and so
// all rails of the host. Each byte crosses the network as rarely as with one rank per host. (The "split rail"
// all_reduce of UCC's cl/hier: a reduce_scatter within each node, an all_reduce between nodes, an all_gather within;
// Cho, Finkler, Serrano, Kung, Hunter: "BlueConnect: Decomposing all-reduce for deep learning on heterogeneous network
// hierarchy", 2019; the leaders of Bayatpour, Chakraborty, Subramoni, Lu, Panda: "Scalable reduction collectives with
// data partitioning-based multi-leader design", SC 2017.)
//
// The data are cut into units, which pass through the stages one behind the other. While one unit is spread within the
// host, the next ones are between the hosts. The one after them is being reduced (as in the pipeline of Open MPI's HAN:
// Luo, Wu, Bosilca, Pei, Cao, Patinyasakdikul, Zhong, Dongarra: "HAN: a hierarchical autotuned collective communication
// framework", CLUSTER 2020).
//
// The rules of message_collectives.hpp for memory, order and empty blocks apply here too.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/hosts.hpp"
#include "collectives/reduce.hpp"
#include "collectives/schedule.hpp"
#include "collectives/shared_collectives.hpp"

namespace aiocomms {

// A rank's connections to the other ranks.
struct Reach {
  const Hosts& hosts;
  Messages& wire;  // between all ranks
  Shared* shared;  // with the ranks of this host, or null if there are none
};

// `data` becomes the reduction of all ranks' `data`. With a root, only the root's does.
Task hierarchical_reduce(Reach reach, Reduction reduction, int root, void* data, std::size_t count);
Task hierarchical_reduce_scatter(Reach reach, Reduction reduction, std::vector<const void*> ins, Bytes counts,
                                 void* out);
Task hierarchical_all_gather(Reach reach, const void* in, std::vector<void*> outs, Bytes bytes);

// For small blocks. All blocks from one host to another travel together, with one more copy at either end. Between
// hosts with n and m ranks, n or m messages replace n * m. To or from a root, one message is enough.
Task hierarchical_gather(Reach reach, int root, const void* in, std::vector<void*> outs, std::size_t bytes);
Task hierarchical_scatter(Reach reach, int root, std::vector<const void*> ins, void* out, std::size_t bytes);
Task hierarchical_all_to_all(Reach reach, std::vector<const void*> ins, std::vector<void*> outs, std::size_t bytes);

}  // namespace aiocomms
