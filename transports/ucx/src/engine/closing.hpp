// What a rank says when it closes a communicator, or its engine; or when it is asked whether what it sends comes. It
// counts once all that the rank has sent before has come.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace aiocomms {

struct Farewell {
  enum Kind : char { kCommunicator = 'B', kEngine = 'E', kEcho = 'P' } kind;
  std::uint32_t order;        // messages sent before
  std::uint32_t group, rank;  // of the communicator, as the receiver knows them
  std::uint64_t collectives;  // that the rank has done

  std::string pack() const;
  // False: the frame is none.
  static bool unpack(const std::string& frame, Farewell& farewell);
};

// The frame that acknowledges a farewell to an engine.
inline constexpr char kAcknowledgement = 'A';
// The frame that asks for an echo: an empty message, and what says that it has been sent.
inline constexpr char kQuestion = 'Q';

// By peer: the farewells that wait for messages, and those of this engine that its peers have not acknowledged yet.
class Farewells {
 public:
  void make_room(std::size_t peers) {
    if (peers <= unacknowledged_.size()) return;
    waiting_.resize(peers);
    unacknowledged_.resize(peers);
  }
  void add(int peer, const Farewell& farewell) { waiting_[peer].push_back(farewell); }
  bool waiting(int peer) const { return !waiting_[peer].empty(); }
  // Those for which all messages have come by now; they do not wait any more.
  std::vector<Farewell> take_due(int peer, std::uint32_t received);

  void expect_acknowledgement(int peer, bool expected) { unacknowledged_[peer] = expected; }
  bool acknowledged(int peer) const { return !unacknowledged_[peer]; }

 private:
  std::vector<std::vector<Farewell>> waiting_;
  std::vector<bool> unacknowledged_;
};

}  // namespace aiocomms
