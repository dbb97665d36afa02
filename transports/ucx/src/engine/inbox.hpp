// Handles incoming messages: restores the order of the sends, matches them with receives, and fetches payloads. It also
// handles messages that are early, too long, or from a rank that has lost the communicator.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/group.hpp"
#include "engine/groups.hpp"
#include "engine/peer.hpp"
#include "engine/request.hpp"
#include "net/network.hpp"

namespace aiocomms {

class Inbox {
 public:
  // The recipient of all messages that are not for a user's receive.
  class Owner {
   public:
    // Handles a message on an engine's channel other than kSchedule, kLane and kVouch.
    virtual void handle(Group& group, const Header& header, const void* payload) = 0;
    // Handles a message of a collective. False: the ranks disagree, and the message is useless.
    virtual bool agrees(Group& group, const Header& header) = 0;
    // A receive has matched an offer, whose message must be copied from its place.
    virtual void pull(Request* receive, const Header& header, const Offer& offer) = 0;
    // Called in a handler of an exception. A message or a receive of the communicator could not be handled.
    virtual void failed(Group& group) noexcept = 0;

   protected:
    ~Owner() = default;
  };

  // peers: the engine's peers. device: users' memory is a device's, and is never read here. first: the number of each
  // peer's first message.
  Inbox(const std::vector<Peer>& peers, bool device, Groups& groups, Network& network, Owner& owner,
        std::uint32_t first = 0);

  // Adds peers.
  void make_room(std::size_t peers);
  // Accepts a message from UCX. The payload is valid in this call only. Otherwise there is a descriptor.
  // std::bad_alloc: the peer's later messages are not delivered any more.
  void arrive(int peer, const Header& header, const void* payload, void* descriptor);
  // The number of a peer's messages that have arrived without a gap.
  std::uint32_t received(int peer) const { return received_[peer]; }
  // Drops a peer's messages that have overtaken others.
  void forget_early(int peer) noexcept;

  // A receive takes its matching message, or waits. std::bad_alloc: it does neither.
  void post(Request* receive, const Key& key);
  // A probe ends with the size and dtype of the message that a receive would take, or waits. The message stays.
  // std::bad_alloc: it does neither.
  void probe(Request* probe, const Key& key);
  // Withdraws an unmatched receive or probe. Null: it is already matched.
  Request* withdraw(Group& group, const Key& key, Ticket ticket);

  // A lane is given up. The first function drops its unmatched receives. The second drops a rank's arrived messages,
  // after that rank sends no more. A sender that waits for an answer gets it.
  void drop_receives(Group& group, const Key& key) noexcept;
  void drop_messages(Group& group, const Key& key);

  // A rank has closed the communicator. Receives from it end.
  void end_receives(Group& group, int rank) noexcept;
  // The communicator is lost. All that waits is dropped.
  void release(Group& group) noexcept;

 private:
  class Fetch;
  class Descriptor;

  void deliver(int peer, const Header& header, const void* payload, Descriptor& descriptor) noexcept;
  void match(Group& group, const Header& header, const void* payload, Descriptor& descriptor);
  bool is_sensible(const Group& group, int peer, const Header& header, const Descriptor& descriptor) const;
  void accept_message(Request* receive, const Header& header, const void* payload, Descriptor& descriptor) noexcept;
  void take(Request* receive, const Header& header, const void* payload, Descriptor& descriptor);
  void fetch(Request* receive, const Header& header, Descriptor& descriptor);
  void end_receive(Request* receive, const Header& header) noexcept;
  void accept_vouch(Group& group, const Header& header) noexcept;
  bool is_on_device(const Header& header) const { return device_ && header.channel < kUserChannels; }

  const std::vector<Peer>& peers_;
  const bool device_;
  Groups& groups_;
  Network& network_;
  Owner& owner_;
  const std::uint32_t first_;
  std::vector<std::uint32_t> received_;                                   // number of messages, by peer
  std::vector<std::map<std::uint32_t, std::unique_ptr<Message>>> early_;  // messages that overtook others, by peer
};

}  // namespace aiocomms
