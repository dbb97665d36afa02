// What a rank says when it closes a communicator, or its engine. It counts once all that the rank has sent has come.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace aiocomms {

struct Farewell {
  enum Kind : char { kCommunicator = 'B', kEngine = 'E' } kind;
  std::uint32_t order;        // messages sent before
  std::uint32_t group, rank;  // of the communicator, as the receiver knows them
  std::uint64_t collectives;  // that the rank has done

  std::string pack() const;
  // False: the frame is none.
  static bool unpack(const std::string& frame, Farewell& farewell);
};

// The frame that acknowledges a farewell to an engine.
inline constexpr char kAcknowledgement = 'A';

// The farewells that wait for messages, and those of this engine that its peers have not acknowledged yet.
class Farewells {
 public:
  explicit Farewells(int peers) : waiting_(peers), unacknowledged_(peers) {}

  void add(int peer, const Farewell& farewell) { waiting_[peer].push_back(farewell); }
  bool waiting(int peer) const { return !waiting_[peer].empty(); }
  // Those for which all messages have come by now; they do not wait any more.
  std::vector<Farewell> take_due(int peer, std::uint32_t received);

  void expect_acknowledgement(int peer, bool expected) { unacknowledged_[peer] = expected; }
  bool all_acknowledged() const {
    return std::find(unacknowledged_.begin(), unacknowledged_.end(), true) == unacknowledged_.end();
  }

 private:
  std::vector<std::vector<Farewell>> waiting_;  // by peer
  std::vector<bool> unacknowledged_;            // by peer
};

}  // namespace aiocomms
