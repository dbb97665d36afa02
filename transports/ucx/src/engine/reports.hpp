// Reports to the loop: the outcomes of ops, and notices about other ranks.
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

// The number that Python's transport gives an op. No other unfinished op has it.
using Ticket = std::uint64_t;

// The result of an op. Python's transport turns failures into errors.
enum class Status : int { kDone, kTruncated, kDtype, kClosed, kUnequal, kBroken, kDropped };

// The loop's report about a ticket.
struct Outcome {
  Ticket ticket;
  Status status;
  std::uint64_t details[2];
};

// A report that the loop did not ask for.
struct Notice {
  enum Kind : int { kFrame, kLost, kLeft, kDisagrees, kMisled, kFailed, kLaneDisagrees, kLaneLeft } kind;
  int peer;  // an engine's number, or a rank if `group` is set
  std::uint32_t group;
  std::uint64_t detail;  // the collectives that the peer had done, the collective in which ranks disagree, or a lane
  std::string frame;     // the frame, or the reason for the failure
};

class Groups;
struct Group;

// All methods run under the engine's lock, except those marked "any thread".
class Reports {
 public:
  explicit Reports(Pacer& pacer);
  ~Reports();
  Reports(const Reports&) = delete;
  Reports& operator=(const Reports&) = delete;

  // Any thread. Readable when there are reports that arrived while the loop was away.
  int fileno() const { return fd_; }
  bool ready() const { return ready_.load(std::memory_order_relaxed); }

  // Tickets without an outcome.
  std::size_t pending() const { return pending_; }
  // Reserves room for the outcome of a ticket, before its op is posted.
  void make_room() {
    if (outcomes_.capacity() - outcomes_.size() <= pending_) outcomes_.reserve(2 * (outcomes_.size() + pending_) + 8);
  }
  void expect_outcome() noexcept { ++pending_; }
  void withdraw() noexcept { --pending_; }
  // Adds the outcome of an expected ticket, whose post began at `began`, in ns.
  void add(Outcome outcome, std::uint64_t began) noexcept;
  void notify(Notice notice);
  // Called in a handler of an exception. One communicator or all of them cannot continue. See failure.hpp.
  void fail(Group& group) noexcept;
  void fail() noexcept;
  void fail(const char* why) noexcept;
  bool failed() const { return static_cast<bool>(failure_); }
  // Called before the loop collects. Failures become notices. (std::bad_alloc: the next call does it.)
  void tell_failures(Groups& groups) {
    if (untold_) tell_untold(groups);
  }

  // The part of a too long message that would have fit into a device's buffer. Each is returned once.
  void keep_beginning(Ticket ticket, std::string beginning) { beginnings_[ticket] = std::move(beginning); }
  std::string take_beginning(Ticket ticket);

  void wake_loop() noexcept;
  // std::bad_alloc: all reports stay for the next call.
  void collect(std::vector<Outcome>& outcomes, std::vector<Notice>& notices);
  void close();  // Idempotent.

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
  bool untold_ = false;              // there is a failure that the loop does not know
  bool loop_is_woken_ = false;
};

}  // namespace aiocomms
