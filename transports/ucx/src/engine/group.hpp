// The engine's record of one communicator: its ranks, its unmatched messages and receives, and its running collectives.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "collectives/hosts.hpp"
#include "collectives/schedule.hpp"
#include "collectives/shared_collectives.hpp"
#include "engine/failure.hpp"
#include "engine/matching.hpp"
#include "net/network.hpp"

namespace aiocomms {

class LaneCalls;
class Operation;
class Request;
struct Lane;

// A collective that runs or waits for its turn. A communicator's collectives run one after the other, in the order of
// the calls.
struct Schedule {
  Task task;
  std::uint64_t fingerprint;
  Operation* op;
};

// The interface to the collectives of lanes. lanes_of() in lanes.hpp returns the implementation.
class LaneSchedules {
 public:
  virtual ~LaneSchedules() = default;
  virtual void drop_schedules() noexcept = 0;
  virtual void depart(int place) noexcept = 0;
  virtual bool holds_slots() noexcept = 0;
};

// A window: this rank's tensor that the other ranks may access, and the tensors of the other ranks.
struct Window {
  struct Part {
    std::byte* mapped = nullptr;  // the mapping of the part in this process, or null
    ucp_rkey_h rkey = nullptr;    // the key for other parts. A device's memory is always accessed by its key.
    std::uint64_t address = 0;
    std::size_t bytes = 0;
    std::uint64_t signals = 0;  // signals that this rank has not waited for
    Queue<Request> waits;
  };
  std::vector<Part> parts;
  ucp_mem_h memory = nullptr;
};

struct Group {
  Group(std::uint32_t the_id, int the_rank, std::vector<int> the_peers);

  std::uint32_t id;
  int rank;
  std::vector<int> peers;  // the engine's number of each rank
  // by rank: 1 + the collectives it had done when it closed. 0: it has not closed.
  std::vector<std::uint64_t> left;
  std::vector<std::uint32_t> their_ids;  // Each rank's number of this group. Empty until the group is opened.
  std::unique_ptr<Shared> shared;        // with the other ranks of this host, or null
  std::unique_ptr<Messages> wire;        // between all ranks
  std::unique_ptr<Messages> leaders;     // between the first ranks of the hosts, null on all others
  std::vector<int> leader_of;            // by rank: the number of its host
  Hosts hosts;                           // where the ranks are
  bool crowded = false;                  // this host has fewer cores than ranks of this communicator

  Mailbox<Request> mail;
  std::deque<Schedule> schedules;
  bool running = false;           // the first schedule has begun
  std::uint64_t collectives = 0;  // done so far
  // For each later collective: a rank that has begun it, and its fingerprint.
  std::map<std::uint64_t, std::pair<int, std::uint64_t>> fingerprints;
  int disagrees = -1;                    // the rank that runs another collective than this rank
  std::unique_ptr<LaneSchedules> keyed;  // the lanes, or null until the group is opened
  std::size_t lane_calls = 0;            // unfinished collectives of lanes
  bool lost = false;                     // all activity has stopped
  Failure failure;                       // why the communicator cannot continue
  bool failure_told = false;
  std::size_t users = 0;  // unfinished requests and sends
  std::unordered_map<std::uint64_t, Window> windows;
  std::map<int, Lane*> lanes;  // by rank
  // The state of each message that needs a vouch, by sender and order. `come`: the vouch has arrived. `waits`: the
  // receive that only lacks the vouch.
  struct Vouch {
    bool come = false;
    Request* waits = nullptr;
  };
  std::map<std::pair<int, std::uint32_t>, Vouch> vouches;

  // The header of a message to a rank. The caller sets the other fields by name.
  Header header_to(int to, std::uint8_t channel, std::int64_t tag) const {
    return {.group = their_ids[to], .source = static_cast<std::uint16_t>(rank), .channel = channel, .tag = tag};
  }
  // See Network::tell.
  ucs_status_t tell(Network& network, int to, const Header& header, const void* payload = nullptr,
                    std::size_t bytes = 0, Pending* pending = nullptr) const {
    const ucs_status_t status = network.tell(peers[to], header, payload, bytes, pending);
    rouse(to);
    return status;
  }
  // Sends a rank a control message with one number.
  void tell(Network& network, int to, Channel channel, std::uint64_t number, std::uint64_t value = 0) const {
    Header header = header_to(to, channel, static_cast<std::int64_t>(number));
    header.value = value;
    tell(network, to, header);
  }
  // A message is on its way to a rank whose post may block until a message arrives.
  void rouse(int to) const {
    if (const int at = place(to); at >= 0) shared->segment.rouse(at);
  }
  // Ends the running and all waiting collectives. UCX must not hold any of their memory.
  void drop_schedules() noexcept;

  // For a lost communicator: whether UCX still holds some of its memory.
  bool held() const { return users > schedules.size() + lane_calls; }
  // For a closed communicator: whether other ranks may still read this rank's data in slots of the family.
  bool holds_slots() const noexcept {
    return (shared && shared->segment.holds_slots()) || (keyed && keyed->holds_slots());
  }
  // A rank reads none of these slots any more: this rank, or a rank that is lost.
  void depart(int of) const noexcept {
    if (place(of) < 0) return;
    shared->segment.depart(place(of));
    keyed->depart(place(of));
  }
  // The ranks of this host, in the order of `shared`. Valid after the group is opened.
  const std::vector<int>& local() const { return hosts.ranks[static_cast<std::size_t>(hosts.here)]; }
  // A rank's place among the ranks that share memory with this one, or -1.
  int place(int of) const {
    if (!shared) return -1;
    const auto found = std::find(local().begin(), local().end(), of);
    return found != local().end() ? static_cast<int>(found - local().begin()) : -1;
  }
  // Whether a rank of this host has lost the communicator. Its unsent and unpublished data are then lost too.
  bool has_let_go(int of) const { return place(of) >= 0 && shared->segment.has_let_go(place(of)); }
};

}  // namespace aiocomms
