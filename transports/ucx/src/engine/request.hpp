// What is under way in a communicator and waits for UCX or for a peer: an op of the user, or a receive of a collective
// between hosts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "collectives/schedule.hpp"
#include "collectives/shared_collectives.hpp"
#include "engine/group.hpp"
#include "engine/reports.hpp"
#include "net/network.hpp"

namespace aiocomms {

// Both kinds may receive a message; only the user's have a ticket.
class Request : public Pending {
 public:
  explicit Request(Group& the_group, Ticket the_ticket = 0) : group(the_group), ticket(the_ticket) { ++group.users; }
  ~Request() override { --group.users; }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  // finished() is for a call of UCX. Otherwise a request ends by one of these:
  virtual void end(Status how, std::uint64_t a = 0, std::uint64_t b = 0) noexcept = 0;
  virtual void drop() noexcept = 0;  // the communicator is lost
  // Whether it ends once the rank that it waits for has closed the communicator.
  virtual bool ends_when_peer_closes() const = 0;

  Group& group;
  const Ticket ticket;      // 0: it has none
  Request* next = nullptr;  // in the queue where it waits
  Status status = Status::kDone;
  std::uint64_t details[2] = {};  // a message's size and dtype; who gives how much too much; what was there before

  // Of a receive:
  void* data = nullptr;
  std::size_t bytes = 0;
  std::uint8_t dtype = 0;
  std::uint64_t fingerprint = 0;         // of a lane's collective
  Beginning beginning{};                 // of a message that is too long
  std::unique_ptr<std::byte[]> staging;  // where the beginning goes if the buffer is a device's
};

// An op of the user, under a ticket. It is the engine's until it is done and its outcome has been reported.
class Operation final : public Request {
 public:
  Operation(Reports& reports, Group& the_group, Ticket the_ticket)
      : Request(the_group, the_ticket), reports_(reports) {}

  void finished(ucs_status_t result) noexcept override;
  void end(Status how, std::uint64_t a = 0, std::uint64_t b = 0) noexcept override;
  void drop() noexcept override { end(Status::kDropped); }
  bool ends_when_peer_closes() const override { return true; }

  // Whether it is done while its post still looks on.
  bool done() const { return done_; }
  // Whether it went well, and the caller needs to know no more than that.
  bool is_plain_success() const { return done_ && status == Status::kDone && !answers; }
  // Its post, which began at `began` (ns), returns: from now on the outcome goes to the reports, and this is deleted
  // then.
  void leave_post(std::uint64_t began) noexcept;
  // Of a post by another thread, in steps between which others post: there is room for its outcome from now on.
  void expect_outcome() noexcept;
  // It is done, and nothing is to be told.
  void forget() noexcept;
  // It was taken back from where it waited, and nothing is to be told. A post that still looks on deletes it.
  void withdraw() noexcept;

  bool answers = false;      // its outcome is of interest even if it went well
  bool any_will_do = false;  // its post looks on until the loop has an outcome to hear of, be that another op's
  Unequal unequal;           // an all-to-all's

 private:
  void report() noexcept;

  Reports& reports_;
  std::uint64_t began_ = 0;  // its post
  bool expected_ = false;    // its outcome
  bool posted_ = false;      // its post has returned
  bool done_ = false;
  bool withdrawn_ = false;
};

// A message that a schedule waits for. Once UCX has finished it, it is among the Events until its schedule goes on,
// which it does outside UCX's calls.
struct Awaited {
  Awaited(Group& the_group, Event& the_event, LaneCalls* the_lane = nullptr)
      : whose(the_group), event(the_event), lane(the_lane) {}
  virtual ~Awaited() = default;

  Group& whose;
  Event& event;
  LaneCalls* lane;  // null: it is of the communicator's own collectives
  Awaited* next = nullptr;
};
using Events = Queue<Awaited>;

// A receive of a schedule. If it does not end well the schedule stands still: the communicator is lost, or will be.
class ScheduleReceive final : public Request, public Awaited {
 public:
  ScheduleReceive(Group& the_group, Events& events, Event& event)
      : Request(the_group), Awaited(the_group, event), events_(events) {}

  void finished(ucs_status_t result) noexcept override {
    if (!group.lost && result == UCS_OK && status == Status::kDone) return events_.push(this);
    delete this;
  }
  void end(Status, std::uint64_t, std::uint64_t) noexcept override { delete this; }
  void drop() noexcept override { delete this; }
  bool ends_when_peer_closes() const override { return false; }

 private:
  Events& events_;
};

// Whether the sender has lost the communicator before its message was read: what was read may be anything then. The
// receive waits on until the communicator is lost here, too, of which the sender has told.
inline bool put_back_if_stale(Request* receive, const Header& header) noexcept {
  if (!receive->group.has_let_go(header.source)) return false;
  try {
    receive->group.mail.keep(Key(header), receive);
  } catch (const std::bad_alloc&) {
    receive->end(Status::kBroken, -UCS_ERR_NO_MEMORY);
  }
  return true;
}

}  // namespace aiocomms
