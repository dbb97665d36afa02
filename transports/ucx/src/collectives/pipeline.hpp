// The pipeline that collectives of several hosts run in: units of the data, and the stages that each goes through.
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

// The messages of some units that are under way. Their memory is taken at once, for nothing may fail amid messages.
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

// What a collective does with a unit in each stage. Nothing here waits.
//
// 1. The ranks of a host contribute, in some rounds of shared memory, and each reduces what all have contributed to its
//    own shares.
// 2. It sends something to other hosts, and receives.
// 3. It does something with that, and sends and receives once more.
// 4. The ranks of a host hand out results, in some rounds.
//
// A collective may have nothing to do in a stage. `round`: of the unit's; `number`: of the round in shared memory.
class Stages {
 public:
  // Units whose messages of one kind are under way at once, beside the one that is waited for.
  static constexpr std::size_t kAhead = 2;
  static constexpr std::size_t kUnits = kAhead + 1;  // that have messages of one kind at most

  // The messages of a unit in each of the two stages that have any, at most.
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
  // Whether this rank takes anything of what that place has.
  virtual bool takes(std::size_t /*unit*/, std::size_t /*round*/, std::size_t /*place*/) const { return false; }
  virtual void take(std::size_t /*unit*/, std::size_t /*round*/, std::size_t /*place*/, std::uint64_t /*number*/) {}

  const Reach reach;
  Flights first, second;

 protected:
  // How many ranks of another host one of this host is the like of, at most.
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
  // Each other host, the next one first: so not all hosts begin with the same.
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

// A turn for each unit, and as many more as the last one takes to go through the stages. In a turn there are some
// beats, in each of which a rank contributes something, reduces what was contributed in the beat before, hands out a
// result and takes those of the beat before: so the others have a beat's time to do the same. The order of the rounds
// is the order of a rank's reads, and four of them are under way at most.
//
// No rank waits for ever: whatever it waits for, the others do in an earlier turn, in an earlier beat of the same, or
// in an earlier step of the same beat, and they send before they wait.
Task run_pipeline(std::unique_ptr<Stages> stages);

// The size of a unit of a block of that many bytes, which goes in so many messages: eight units or more fill the
// pipeline; and messages are no longer than a segment, and not so short that a message costs more than its bytes.
std::size_t unit_for(std::size_t bytes, std::size_t messages);

}  // namespace aiocomms
