// The pipeline of collectives of several hosts: the units of the data, and the stages that each unit passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collectives/hierarchical.hpp"
#include "collectives/schedule_parts.hpp"
#include "collectives/span.hpp"

namespace aiocomms {

// The unfinished messages of some units. Their memory is allocated at once, because nothing may fail between messages.
class Flights {
 public:
  Flights(std::size_t units, std::size_t messages) : units_(units), most_(messages), slots_(units * messages) {
    counts_.resize(units);
  }

  Event& next(std::size_t unit) { return slots_[unit % units_ * most_ + counts_[unit % units_]++].renew(); }
  std::span<Slot> of(std::size_t unit) { return {slots_.data() + unit % units_ * most_, counts_[unit % units_]}; }
  void end(std::size_t unit) { counts_[unit % units_] = 0; }

 private:
  std::size_t units_, most_;
  std::vector<Slot> slots_;
  std::vector<std::size_t> counts_;
};

// The work of a collective on a unit, by stage. Nothing here waits.
//
// 1. The ranks of a host contribute, in rounds of shared memory. Each rank reduces all contributions to its own shares.
// 2. The rank sends to other hosts and receives from them.
// 3. It processes the received data, and sends and receives once more.
// 4. The ranks of a host spread results, in rounds of shared memory.
//
// A stage may be empty. `round` counts within the unit. `number` is the round of the shared memory.
class Stages {
 public:
  // Units in each stage of messages at once, beside the unit that the rank waits for.
  static constexpr std::size_t kAhead = 2;
  static constexpr std::size_t kUnits = kAhead + 1;  // the most units with messages of one stage

  // The arguments are the most messages of a unit in each of the two stages with messages.
  Stages(const Reach& the_reach, std::size_t first_messages, std::size_t second_messages)
      : reach(the_reach), first(kUnits, first_messages), second(kUnits, second_messages) {}
  virtual ~Stages() = default;

  virtual std::size_t units() const = 0;
  virtual std::size_t contributions(std::size_t /*unit*/) const { return 0; }
  virtual void contribute(std::size_t /*unit*/, std::size_t /*round*/, std::uint64_t /*number*/) {}
  virtual void reduce(std::size_t /*unit*/, std::size_t /*round*/, std::uint64_t /*number*/) {}
  virtual void exchange(std::size_t unit) = 0;
  virtual void return_results(std::size_t /*unit*/) {}
  virtual std::size_t results(std::size_t /*unit*/) const { return 0; }
  virtual void give(std::size_t /*unit*/, std::size_t /*round*/, std::uint64_t /*number*/) {}
  // Whether this rank takes data from that place.
  virtual bool takes(std::size_t /*unit*/, std::size_t /*round*/, std::size_t /*place*/) const { return false; }
  virtual void take(std::size_t /*unit*/, std::size_t /*round*/, std::size_t /*place*/, std::uint64_t /*number*/) {}

  const Reach reach;
  Flights first, second;

 protected:
  // The most ranks of another host that are counterparts of one rank of this host.
  static std::size_t most_likes(const Reach& reach) {
    return divided_up(reach.hosts.largest(), reach.hosts.size(static_cast<std::size_t>(reach.hosts.here)));
  }
  int me() const { return reach.wire.rank(); }
  std::size_t here() const { return static_cast<std::size_t>(reach.hosts.here); }
  std::size_t place() const { return static_cast<std::size_t>(reach.hosts.place); }
  int rank_at(std::size_t host, std::size_t at) const { return reach.hosts.ranks[host][at]; }
  std::size_t local_ranks() const { return reach.hosts.size(here()); }
  bool alone() const { return local_ranks() == 1; }
  void copy_in(std::uint64_t number, std::size_t offset, const void* from, std::size_t bytes) const {
    reach.shared->segment.copy_in(number, offset, from, bytes);
  }
  void copy_out(std::size_t at, std::uint64_t number, std::size_t offset, void* to, std::size_t bytes) const {
    reach.shared->segment.copy_out(static_cast<int>(at), number, offset, to, bytes);
  }
  std::byte* slot(std::size_t at, std::uint64_t number) const {
    return reach.shared->segment.slot(static_cast<int>(at), number);
  }
  // Visits each other host, the next one first. So the hosts do not all begin with the same one.
  template <typename Each>
  void for_each_other(const Each& each) const {
    for (std::size_t step = 1; step < reach.hosts.count(); ++step) each((here() + step) % reach.hosts.count());
  }
  void send(Flights& flights, std::size_t unit, int rank, const void* data, std::size_t bytes) {
    if (bytes != 0) reach.wire.send(rank, data, bytes, flights.next(unit));
  }
  void recv(Flights& flights, std::size_t unit, int rank, void* data, std::size_t bytes) {
    if (bytes != 0) reach.wire.recv(rank, data, bytes, flights.next(unit));
  }
};

// Each unit has a turn, and the last unit needs more turns to pass the stages. A turn has some beats. In each beat a
// rank contributes, reduces the contributions of the last beat, spreads a result, and takes the results of the last
// beat. So the other ranks have the time of a beat to do the same. The rounds have the order of a rank's reads, and at
// most four are unfinished.
//
// There is no deadlock. The other ranks act in an earlier turn, in an earlier beat of the same turn, or in an earlier
// step of the same beat. They also send before they wait.
Task run_pipeline(std::unique_ptr<Stages> stages);

// The size of a unit, for a block of `bytes` bytes that travels in `messages` messages. At least eight units fill the
// pipeline. A message is no longer than a segment. It is not so short that its fixed cost exceeds the cost of its
// bytes.
std::size_t unit_for(std::size_t bytes, std::size_t messages);

}  // namespace aiocomms
