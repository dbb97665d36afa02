// The farewell of a rank that closes a communicator or its engine, or that answers a question with an echo. It counts
// after all earlier messages of the rank have arrived.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace aiocomms {

struct Farewell {
  enum Kind : char { kCommunicator = 'B', kEngine = 'E', kEcho = 'P' } kind;
  std::uint32_t order;        // number of messages sent before
  std::uint32_t group, rank;  // the receiver's numbers of the communicator and the rank
  std::uint64_t collectives;  // the collectives that the rank has done

  std::string pack() const;
  // False: the frame is not a farewell.
  static bool unpack(const std::string& frame, Farewell& farewell);
};

// The frame that acknowledges an engine's farewell.
inline constexpr char kAcknowledgement = 'A';
// The frame that asks for an echo: an empty message, and a farewell that counts it.
inline constexpr char kQuestion = 'Q';

// Holds, by peer, the farewells that wait for messages, and whether the peer has acknowledged this engine's farewell.
class Farewells {
 public:
  void make_room(std::size_t peers) {
    if (peers <= unacknowledged_.size()) return;
    waiting_.resize(peers);
    unacknowledged_.resize(peers);
  }
  void add(int peer, const Farewell& farewell) { waiting_[peer].push_back(farewell); }
  bool waiting(int peer) const { return !waiting_[peer].empty(); }
  // Removes and returns the farewells whose messages have all arrived.
  std::vector<Farewell> take_due(int peer, std::uint32_t received);

  void expect_acknowledgement(int peer, bool expected) { unacknowledged_[peer] = expected; }
  bool acknowledged(int peer) const { return !unacknowledged_[peer]; }

 private:
  std::vector<std::vector<Farewell>> waiting_;
  std::vector<bool> unacknowledged_;
};

}  // namespace aiocomms
