// Hosts in one thread. Their ranks share memory like processes, each at its own address.
#pragma once

#include <unistd.h>

#include <memory>
#include <vector>

#include "collectives/hierarchical.hpp"

namespace aiocomms {

class FakeHosts {
 public:
  // sizes: the number of ranks of each host. mixed: ranks are numbered across the hosts in turn, otherwise host by
  // host.
  FakeHosts(const std::vector<int>& sizes, bool mixed) {
    std::vector<std::vector<int>> ranks(sizes.size());
    int next = 0;
    for (bool more = true; more;) {
      more = false;
      for (std::size_t host = 0; host < sizes.size(); ++host) {
        while (ranks[host].size() < static_cast<std::size_t>(sizes[host])) {
          ranks[host].push_back(next++);
          more = true;
          if (mixed) break;
        }
      }
    }
    places_.resize(static_cast<std::size_t>(next));
    for (std::size_t host = 0; host < ranks.size(); ++host) {
      const int size = static_cast<int>(ranks[host].size());
      const int fd = size > 1 ? Segment::create(size, true) : -1;
      std::vector<int> all(places_.size(), -1),
          here;  // the places of all ranks of the family, and of the ranks of this host
      for (int place = 0; place < size; ++place) {
        all[static_cast<std::size_t>(ranks[host][static_cast<std::size_t>(place)])] = place;
        here.push_back(place);
      }
      for (int place = 0; place < size; ++place) {
        Place& it = places_[static_cast<std::size_t>(ranks[host][static_cast<std::size_t>(place)])];
        it.hosts = {ranks, static_cast<int>(host), place};
        if (size == 1) continue;
        const int rank = ranks[host][static_cast<std::size_t>(place)];
        it.pool = std::make_unique<Pool>(fd, Segment::place_of_pool(size), rank, all, [] {});
        it.shared = std::make_unique<Shared>(SharedMemory{fd, place, size, it.pool.get(), here});
        it.shared->slice_ends = &slice_ends;
      }
      if (fd >= 0) ::close(fd);
    }
  }

  int size() const { return static_cast<int>(places_.size()); }
  const Hosts& hosts(int rank) const { return places_[static_cast<std::size_t>(rank)].hosts; }
  int host_of(int rank) const { return hosts(rank).here; }
  Shared* shared(int rank) { return places_[static_cast<std::size_t>(rank)].shared.get(); }
  Reach reach(int rank, Messages& wire) { return {hosts(rank), wire, shared(rank)}; }

  std::uint64_t slice_ends = 0;  // 0: schedules give others their turn wherever they can. ~0: never.

 private:
  struct Place {
    Hosts hosts;
    std::unique_ptr<Pool> pool;      // null: this rank is alone
    std::unique_ptr<Shared> shared;  // the same
  };
  std::vector<Place> places_;
};

}  // namespace aiocomms
