// What the loop is told: how ops have ended, and what the other ranks have done unasked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/failure.hpp"
#include "engine/pacer.hpp"

namespace aiocomms {

// A number that Python's transport gives an op, different from those of all others under way.
using Ticket = std::uint64_t;

// How an op ended. Python's transport turns these into errors.
enum class Status : int { kDone, kTruncated, kDtype, kClosed, kUnequal, kBroken, kDropped };

// What the loop is told of a ticket.
struct Outcome {
  Ticket ticket;
  Status status;
  std::uint64_t details[2];
};

// What the loop is told unasked.
struct Notice {
  enum Kind : int { kFrame, kLost, kLeft, kDisagrees, kMisled, kFailed, kLaneDisagrees, kLaneLeft } kind;
  int peer;  // an engine's number, or, with a group, a rank
  std::uint32_t group;
  std::uint64_t detail;  // how many collectives it had done; or which one it disagrees on; or a lane
  std::string frame;     // or why this rank cannot go on
};

class Groups;
struct Group;

// All is called under the engine's lock, but what is marked "any".
class Reports {
 public:
  explicit Reports(Pacer& pacer);
  ~Reports();
  Reports(const Reports&) = delete;
  Reports& operator=(const Reports&) = delete;

  // Any. Readable when there is something to collect that came while the loop was away.
  int fileno() const { return fd_; }
  bool ready() const { return ready_.load(std::memory_order_relaxed); }

  // Tickets without an outcome.
  std::size_t pending() const { return pending_; }
  // Before a ticket's op is posted: room for its outcome, whatever happens meanwhile.
  void make_room() {
    if (outcomes_.capacity() - outcomes_.size() <= pending_) outcomes_.reserve(2 * (outcomes_.size() + pending_) + 8);
  }
  void expect_outcome() noexcept { ++pending_; }
  void withdraw() noexcept { --pending_; }
  // The outcome of a ticket that is expected, whose post began at `began`, ns.
  void add(Outcome outcome, std::uint64_t began) noexcept;
  void notify(Notice notice);
  // In a handler of an exception: a communicator, or all of them, cannot go on. See failure.hpp.
  void fail(Group& group) noexcept;
  void fail() noexcept;
  void fail(const char* why) noexcept;
  bool failed() const { return static_cast<bool>(failure_); }
  // The loop is about to collect: what has failed becomes notices. (std::bad_alloc: at the next time.)
  void tell_failures(Groups& groups) {
    if (untold_) tell_untold(groups);
  }

  // As much of a message that was too long for a device's buffer as would have fit; each is handed out once.
  void keep_beginning(Ticket ticket, std::string beginning) { beginnings_[ticket] = std::move(beginning); }
  std::string take_beginning(Ticket ticket);

  void wake_loop() noexcept;
  // std::bad_alloc: all stays for the next time.
  void collect(std::vector<Outcome>& outcomes, std::vector<Notice>& notices);
  void close();  // idempotent

 private:
  void tell_untold(Groups& groups);
  void rouse() noexcept;

  Pacer& pacer_;
  std::size_t pending_ = 0;
  std::vector<Outcome> outcomes_;
  std::vector<Notice> notices_;
  std::unordered_map<Ticket, std::string> beginnings_;
  std::atomic<bool> ready_ = false;  // there are outcomes or notices
  int fd_ = -1;                      // eventfd
  Failure failure_;                  // of all communicators
  bool untold_ = false;              // something has failed of which the loop does not know
  bool loop_is_woken_ = false;
};

}  // namespace aiocomms
