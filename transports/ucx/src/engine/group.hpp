// One communicator, as the engine knows it: who its ranks are, what waits to be matched, and which collectives run.
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

// A collective that is running or waits for its turn: one communicator's run one after the other, in the order of the
// calls.
struct Schedule {
  Task task;
  std::uint64_t fingerprint;
  Operation* op;
};

// The collectives of lanes: lanes_of() in lanes.hpp.
class LaneSchedules {
 public:
  virtual ~LaneSchedules() = default;
  virtual void drop_schedules() noexcept = 0;
  virtual void depart(int place) noexcept = 0;
  virtual bool holds_slots() noexcept = 0;
};

// A tensor that the others may read and write, and theirs.
struct Window {
  struct Part {
    std::byte* mapped = nullptr;  // memory shared with this process, if it is
    ucp_rkey_h rkey = nullptr;    // else; a device's memory is reached by this alone
    std::uint64_t address = 0;
    std::size_t bytes = 0;
    std::uint64_t signals = 0;  // that this rank has not waited for
    Queue<Request> waits;
  };
  std::vector<Part> parts;
  ucp_mem_h memory = nullptr;
};

struct Group {
  Group(std::uint32_t the_id, int the_rank, std::vector<int> the_peers);

  std::uint32_t id;
  int rank;
  std::vector<int> peers;                // the engine's number of each rank
  std::vector<std::uint64_t> left;       // 1 + the collectives that a rank had done when it closed; 0: it has not
  std::vector<std::uint32_t> their_ids;  // what each rank calls this group; empty until it is opened
  std::unique_ptr<Shared> shared;        // with the ranks of this host, if there are others
  std::unique_ptr<Messages> wire;        // between all ranks
  std::unique_ptr<Messages> leaders;     // between one rank of each host; on the others null
  std::vector<int> leader_of;            // by rank: the number of its host
  Hosts hosts;                           // where the ranks are
  bool crowded = false;                  // there are more of them on this host than that has cores

  Mailbox<Request> mail;
  std::deque<Schedule> schedules;
  bool running = false;           // the first of them has begun
  std::uint64_t collectives = 0;  // done so far
  // Of collectives to come: who has begun one, and its fingerprint.
  std::map<std::uint64_t, std::pair<int, std::uint64_t>> fingerprints;
  int disagrees = -1;                    // the rank that does something else than this one
  std::unique_ptr<LaneSchedules> keyed;  // of its lanes; null until it is opened
  std::size_t lane_calls = 0;            // collectives of lanes that have not ended
  bool lost = false;                     // nothing moves any more
  Failure failure;                       // why it cannot go on, if it cannot
  bool failure_told = false;
  std::size_t users = 0;  // requests and sends that are not done
  std::unordered_map<std::uint64_t, Window> windows;
  std::map<int, Lane*> lanes;  // by rank
  // Of messages that have to be vouched for, by sender and order: whether that has come, and the receive that has got
  // all but that.
  struct Vouch {
    bool come = false;
    Request* waits = nullptr;
  };
  std::map<std::pair<int, std::uint32_t>, Vouch> vouches;

  // The header of a message to one of its ranks. What else a message says the caller sets by name.
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
  // Tell a rank something that one number identifies.
  void tell(Network& network, int to, Channel channel, std::uint64_t number, std::uint64_t value = 0) const {
    Header header = header_to(to, channel, static_cast<std::int64_t>(number));
    header.value = value;
    tell(network, to, header);
  }
  // A message is on its way to a rank, whose post may block until one comes.
  void rouse(int to) const {
    if (const int at = place(to); at >= 0) shared->segment.rouse(at);
  }
  // Its collectives end, the running one and those behind it. UCX holds nothing of theirs any more.
  void drop_schedules() noexcept;

  // Of one that is lost: UCX has something of it in its hands.
  bool held() const { return users > schedules.size() + lane_calls; }
  // Of one that is closed: others may still read what this rank has put in slots of the family's.
  bool holds_slots() const noexcept {
    return (shared && shared->segment.holds_slots()) || (keyed && keyed->holds_slots());
  }
  // A rank reads none of these slots any more: this one, or one that is gone.
  void depart(int of) const noexcept {
    if (place(of) < 0) return;
    shared->segment.depart(place(of));
    keyed->depart(place(of));
  }
  // This host's ranks, in the order of `shared`; once it is open.
  const std::vector<int>& local() const { return hosts.ranks[static_cast<std::size_t>(hosts.here)]; }
  // Where a rank is among those of this host with whom this one shares memory, or -1.
  int place(int of) const {
    if (!shared) return -1;
    const auto found = std::find(local().begin(), local().end(), of);
    return found != local().end() ? static_cast<int>(found - local().begin()) : -1;
  }
  // Whether a rank of this host has lost the communicator, and with it what it had not sent or shown yet.
  bool has_let_go(int of) const { return place(of) >= 0 && shared->segment.has_let_go(place(of)); }
};

}  // namespace aiocomms
