// Hosts and their ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace aiocomms {

// The places of a communicator's ranks.
struct Hosts {
  std::vector<std::vector<int>> ranks;  // of each host
  int here = 0;                         // this rank's host
  int place = 0;                        // this rank's place among the ranks of its host

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
  // The counterpart of a host's `place`-th rank on another host. The ranks of the smaller host have equally many
  // counterparts, plus or minus one.
  std::size_t like(std::size_t place, std::size_t host, std::size_t other) const {
    return place * size(other) / size(host);
  }
};

}  // namespace aiocomms
