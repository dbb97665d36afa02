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

#include "collectives/schedule.hpp"
#include "collectives/shared_collectives.hpp"
#include "engine/matching.hpp"
#include "engine/reports.hpp"

namespace aiocomms {

class Engine;
struct Group;
struct Lane;

// An op under way. It is the engine's until it is done and its ticket has been handed out.
struct Request final : Pending {
  Request(Engine& the_engine, Group& the_group, std::uint64_t the_ticket = 0);
  ~Request() override;
  void finished(ucs_status_t status) override;

  Engine& engine;
  Group& group;
  Request* next = nullptr;
  void* data = nullptr;  // a receive's
  std::size_t bytes = 0;
  std::uint64_t ticket;
  std::uint64_t details[2] = {};      // a message's size and dtype; who gives how much too much; what was there before
  Worker::Beginning beginning{};      // of a message that is too long
  std::unique_ptr<std::byte[]> head;  // where that goes if the buffer is a device's
  bool moving = false;                // UCX is at a device's memory
  bool answers = false;               // its outcome is of interest even if it went well
  Event* event = nullptr;             // a schedule's receive, which has no ticket
  Unequal unequal;                    // an all-to-all's
  Status status = Status::kDone;
  std::uint8_t dtype = 0;
  bool posted = false;  // its post has returned
  bool done = false;
};

// The messages of a schedule between some ranks of a group; see Messages.
class Wire final : public Messages {
 public:
  Wire(Engine& engine, Group& group, std::vector<int> ranks);
  int rank() const override { return me_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  void send(int dst, const void* data, std::size_t bytes, Event& event) override;
  void recv(int src, void* data, std::size_t bytes, Event& event) override;

 private:
  Engine& engine_;
  Group& group_;
  std::vector<int> ranks_;
  int me_;
};

// A collective that is running or waits for its turn: one communicator's run one after the other, in the order of the
// calls.
struct Schedule {
  Task task;
  std::uint64_t mark;
  Request* request;
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
  Group(std::uint32_t the_id, int the_rank, std::vector<int> the_peers)
      : id(the_id), rank(the_rank), peers(std::move(the_peers)), left(peers.size(), 0) {}

  std::uint32_t id;
  int rank;
  std::vector<int> peers;                // the engine's number of each rank
  std::vector<std::uint64_t> left;       // 1 + the collectives that a rank had done when it closed; 0: it has not
  std::vector<std::uint32_t> their_ids;  // what each rank calls this group; empty until it is opened
  std::unique_ptr<Shared> shared;        // with the ranks of this host, if there are others
  std::unique_ptr<Wire> wire;            // between all ranks
  std::unique_ptr<Wire> leaders;         // between one rank of each host; on the others null
  std::vector<int> local;                // this host's ranks, in the order of `shared`
  std::vector<int> leader_of;            // by rank: the number of its host
  int hosts = 1;

  Mailbox<Request> mail;
  std::deque<Schedule> schedules;
  bool running = false;                                          // the first of them has begun
  std::uint64_t collectives = 0;                                 // done so far
  std::map<std::uint64_t, std::pair<int, std::uint64_t>> marks;  // of collectives to come: who has begun it, as what
  int disagrees = -1;                                            // the rank that does something else than this one
  bool lost = false;                                             // nothing moves any more
  std::size_t users = 0;                                         // requests and sends that are not done
  std::unordered_map<std::uint64_t, Window> windows;
  std::uint64_t next_window = 0;
  std::map<int, Lane*> lanes;  // by rank
  // Of messages that have to be vouched for, by sender and order: whether that has come, and the receive that has got
  // all but that.
  struct Vouch {
    bool come = false;
    Request* waits = nullptr;
  };
  std::map<std::pair<int, std::uint32_t>, Vouch> vouches;

  // Of one that is lost: UCX has something of it in its hands.
  bool held() const { return users > schedules.size(); }
  // Where a rank is among those of this host with whom this one shares memory, or -1.
  int place(int of) const {
    const auto found = std::find(local.begin(), local.end(), of);
    return shared && found != local.end() ? static_cast<int>(found - local.begin()) : -1;
  }
  // Whether a rank of this host has lost the communicator, and with it what it had not sent or shown yet.
  bool has_let_go(int of) const { return place(of) >= 0 && shared->segment.has_let_go(place(of)); }
};

}  // namespace aiocomms
