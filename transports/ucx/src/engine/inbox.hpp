// Messages that come: put in the order in which they were sent, matched with receives, fetched; and what becomes of
// those that come too early, are too long, or are from a rank that has lost the communicator.
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
  // Whoever takes what is not for a user's receive.
  class Owner {
   public:
    // A message on a channel of the engine's own, other than kSchedule, kLane and kVouch.
    virtual void handle(Group& group, const Header& header, const void* payload) = 0;
    // A message of a collective. False: the ranks disagree, and the message is of no use.
    virtual bool agrees(Group& group, const Header& header) = 0;
    // A receive has matched a message that has to be copied from where it lies.
    virtual void pull(Request* receive, const Header& header, const Offer& offer) = 0;
    // In a handler of an exception: what a message, or a receive of a communicator needs cannot be done.
    virtual void failed(Group& group) noexcept = 0;

   protected:
    ~Owner() = default;
  };

  // peers: the engine's. device: users' memory is a device's, and never looked at here. first: the number of each
  // peer's first message.
  Inbox(const std::vector<Peer>& peers, bool device, Groups& groups, Network& network, Owner& owner,
        std::uint32_t first = 0);

  // There are more peers.
  void make_room(std::size_t peers);
  // UCX has delivered a message: its payload, valid in this call only, or a descriptor. std::bad_alloc: the messages
  // behind it are not delivered any more.
  void arrive(int peer, const Header& header, const void* payload, void* descriptor);
  // How many messages of a peer have come, all before them included.
  std::uint32_t received(int peer) const { return received_[peer]; }
  // What has overtaken other messages of a peer is of no use any more.
  void forget_early(int peer) noexcept;

  // A receive takes the message that it matches, or waits for it. std::bad_alloc: it does neither.
  void post(Request* receive, const Key& key);
  // A probe ends with the size and dtype of the message that a receive would take, which stays; or waits for it.
  // std::bad_alloc: it does neither.
  void probe(Request* probe, const Key& key);
  // Take back a receive or a probe that nothing has matched; null if something has.
  Request* withdraw(Group& group, const Key& key, Ticket ticket);

  // A lane is given up: its receives that nothing has matched are dropped; and, once nothing of it comes from a rank
  // any more, what has come. Its sender is told, where it waits for that.
  void drop_receives(Group& group, const Key& key) noexcept;
  void drop_messages(Group& group, const Key& key);

  // A rank has closed the communicator: receives from it end.
  void end_receives(Group& group, int rank) noexcept;
  // The communicator is lost: what waits is dropped.
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
  std::vector<std::uint32_t> received_;                                   // messages, by peer
  std::vector<std::map<std::uint32_t, std::unique_ptr<Message>>> early_;  // that overtook others, by peer
};

}  // namespace aiocomms
