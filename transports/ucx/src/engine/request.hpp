// Unfinished work of a communicator that waits for UCX or a peer: a user's op, or a receive of a collective between
// hosts.
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

// Both kinds may receive a message. Only a user's op has a ticket.
class Request : public Pending {
 public:
  explicit Request(Group& the_group, Ticket the_ticket = 0) : group(the_group), ticket(the_ticket) { ++group.users; }
  ~Request() override { --group.users; }
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  // UCX ends a request with finished(). Otherwise one of these methods ends it:
  virtual void end(Status how, std::uint64_t a = 0, std::uint64_t b = 0) noexcept = 0;
  virtual void drop() noexcept = 0;  // the communicator is lost
  // Whether it ends when the awaited rank closes the communicator.
  virtual bool ends_when_peer_closes() const = 0;

  Group& group;
  const Ticket ticket;      // 0: it has none
  Request* next = nullptr;  // in the queue of waiting requests
  Status status = Status::kDone;
  // A message's size and dtype, a rank and the size of its unequal block, or an element's old value.
  std::uint64_t details[2] = {};

  // These fields are for receives:
  void* data = nullptr;
  std::size_t bytes = 0;
  std::uint8_t dtype = 0;
  std::uint64_t fingerprint = 0;         // of a lane's collective
  Beginning beginning{};                 // of a too long message
  std::unique_ptr<std::byte[]> staging;  // the destination of the beginning if the buffer is a device's
};

// A user's op with a ticket. The engine owns it until it is done and its outcome is reported.
class Operation final : public Request {
 public:
  Operation(Reports& reports, Group& the_group, Ticket the_ticket)
      : Request(the_group, the_ticket), reports_(reports) {}

  void finished(ucs_status_t result) noexcept override;
  void end(Status how, std::uint64_t a = 0, std::uint64_t b = 0) noexcept override;
  void drop() noexcept override { end(Status::kDropped); }
  bool ends_when_peer_closes() const override { return true; }

  // Whether it is done while its post still runs.
  bool done() const { return done_; }
  // Whether it succeeded without further results for the caller.
  bool is_plain_success() const { return done_ && status == Status::kDone && !answers; }
  // The post, which began at `began` (ns), returns. From now on the outcome goes to the reports, and this object is
  // deleted with it.
  void leave_post(std::uint64_t began) noexcept;
  // For a post by another thread, whose steps alternate with other posts. Room for the outcome is reserved from now on.
  void expect_outcome() noexcept;
  // The op is done, and no outcome follows.
  void forget() noexcept;
  // The op is withdrawn, and no outcome follows. If its post still runs, the post deletes it.
  void withdraw() noexcept;

  bool answers = false;      // the caller needs its outcome even on success
  bool any_will_do = false;  // its post runs until the loop has any outcome, even of another op
  Unequal unequal;           // of an all-to-all

 private:
  void report() noexcept;

  Reports& reports_;
  std::uint64_t began_ = 0;  // the start of the post
  bool expected_ = false;    // an outcome is expected
  bool posted_ = false;      // the post has returned
  bool done_ = false;
  bool withdrawn_ = false;
};

// A message that a schedule waits for. After UCX has finished it, it stays in Events until its schedule resumes,
// outside UCX's calls.
struct Awaited {
  Awaited(Group& the_group, Event& the_event, LaneCalls* the_lane = nullptr)
      : whose(the_group), event(the_event), lane(the_lane) {}
  virtual ~Awaited() = default;

  Group& whose;
  Event& event;
  LaneCalls* lane;  // null: it belongs to the communicator's own collectives
  Awaited* next = nullptr;
};
using Events = Queue<Awaited>;

// A receive of a schedule. If it fails, the schedule does not continue. The communicator is lost, or soon will be.
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

// Whether the sender lost the communicator before its message was read. The read data are then invalid. The receive
// waits until this rank loses the communicator too, because the sender has announced the loss.
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
