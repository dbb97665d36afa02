// What the loop is told: how ops have ended, and what the other ranks have done unasked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

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
  enum Kind : int { kFrame, kLost, kLeft, kDisagrees, kMisled } kind;
  int peer;  // an engine's number, or, with a group, a rank
  std::uint32_t group;
  std::uint64_t detail;  // how many collectives it had done; or which one it disagrees on
  std::string frame;
};

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
  void expect_outcome() { ++pending_; }
  void withdraw() { --pending_; }
  // The outcome of a ticket that is expected.
  void add(Outcome outcome);
  void notify(Notice notice);

  // As much of a message that was too long for a device's buffer as would have fit; each is handed out once.
  void keep_beginning(Ticket ticket, std::string beginning) { beginnings_[ticket] = std::move(beginning); }
  std::string take_beginning(Ticket ticket);

  void wake_loop();
  void collect(std::vector<Outcome>& outcomes, std::vector<Notice>& notices);
  void close();  // idempotent

 private:
  Pacer& pacer_;
  std::size_t pending_ = 0;
  std::vector<Outcome> outcomes_;
  std::vector<Notice> notices_;
  std::unordered_map<Ticket, std::string> beginnings_;
  std::atomic<bool> ready_ = false;  // there are outcomes or notices
  int fd_ = -1;                      // eventfd
  bool loop_is_woken_ = false;
};

}  // namespace aiocomms
