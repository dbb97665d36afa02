// Collectives of ranks on several hosts, some of which share a host: in shared memory within each host, and by messages
// between hosts, both at the same time.
//
// Every rank speaks for a share of what its host has: it meets the ranks of other hosts that have the same share. So
// all ranks of a host copy, reduce, send and receive at the same time, over as many connections as there are ranks,
// which use all rails of a host; and each byte crosses the network as seldom as where one rank speaks for its host.
// (The "split rail" all_reduce of UCC's cl/hier: a reduce_scatter within each node, an all_reduce between nodes, an
// all_gather within; Cho, Finkler, Serrano, Kung, Hunter: "BlueConnect: Decomposing all-reduce for deep learning on
// heterogeneous network hierarchy", 2019; the leaders of Bayatpour, Chakraborty, Subramoni, Lu, Panda: "Scalable
// reduction collectives with data partitioning-based multi-leader design", SC 2017.) Data are cut into units, which go
// through the stages behind each other: while one is being handed out within the host, the next are between the hosts,
// and the one after them is being reduced (as in the pipeline of Open MPI's HAN: Luo, Wu, Bosilca, Pei, Cao,
// Patinyasakdikul, Zhong, Dongarra: "HAN: a hierarchical autotuned collective communication framework", CLUSTER 2020).
//
// What is said in message_collectives.hpp of memory, order and empty blocks holds here, too.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/hosts.hpp"
#include "collectives/reduce.hpp"
#include "collectives/schedule.hpp"
#include "collectives/shared_collectives.hpp"

namespace aiocomms {

// How a rank reaches the others.
struct Reach {
  const Hosts& hosts;
  Messages& wire;  // between all ranks
  Shared* shared;  // with the ranks of this host; null: there are no others
};

// `data` becomes the reduction of all ranks' `data`, or with a root, the root's alone.
Task hierarchical_reduce(Reach reach, Reduction reduction, int root, void* data, std::size_t count);
Task hierarchical_reduce_scatter(Reach reach, Reduction reduction, std::vector<const void*> ins, Bytes counts,
                                 void* out);
Task hierarchical_all_gather(Reach reach, const void* in, std::vector<void*> outs, Bytes bytes);

// For small blocks. Those from one host for another travel together, copied once more at either end: of hosts with n
// and m ranks n or m messages do in place of n * m, and to or from a root one does.
Task hierarchical_gather(Reach reach, int root, const void* in, std::vector<void*> outs, std::size_t bytes);
Task hierarchical_scatter(Reach reach, int root, std::vector<const void*> ins, void* out, std::size_t bytes);
Task hierarchical_all_to_all(Reach reach, std::vector<const void*> ins, std::vector<void*> outs, std::size_t bytes);

}  // namespace aiocomms
