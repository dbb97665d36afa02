// Hosts, and the ranks that each has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace aiocomms {

// Where the ranks of a communicator are.
struct Hosts {
  std::vector<std::vector<int>> ranks;  // of each host
  int here = 0;                         // this rank's host
  int place = 0;                        // and its place among that host's ranks

  std::size_t count() const { return ranks.size(); }
  struct Place {
    std::size_t host, place;
  };
  Place of(int rank) const {
    for (std::size_t host = 0; host < ranks.size(); ++host) {
      const auto found = std::find(ranks[host].begin(), ranks[host].end(), rank);
      if (found != ranks[host].end()) return {host, static_cast<std::size_t>(found - ranks[host].begin())};
    }
    return {ranks.size(), 0};  // there is no such rank
  }
  std::size_t size(std::size_t host) const { return ranks[host].size(); }
  std::size_t largest() const {
    std::size_t most = 0;
    for (const std::vector<int>& of_host : ranks) most = std::max(most, of_host.size());
    return most;
  }
  // Where the `place`-th rank of one host has its like on another. Each rank of the smaller host has as many as another
  // of it, give or take one.
  std::size_t like(std::size_t place, std::size_t host, std::size_t other) const {
    return place * size(other) / size(host);
  }
};

}  // namespace aiocomms
