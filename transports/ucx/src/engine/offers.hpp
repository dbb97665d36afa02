// Large messages within a host. The sender offers a message. The receiver reads it in place, and answers.
//
// The receiver needs no help for that. But the kernel is slow for each page, and one core does all the work while the
// sender's core is often idle. So the receiver of a very large message asks the sender to assist. The sender copies the
// message from its end into slots in shared memory, when its engine makes progress. The receiver empties each full
// slot, and otherwise reads on from the beginning. Neither waits for the other. The speeds of both sides decide where
// the two copies meet. One piece may be copied twice there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>

#include "engine/group.hpp"
#include "engine/request.hpp"
#include "net/copy.hpp"
#include "net/network.hpp"

namespace aiocomms {

class Offers {
 public:
  explicit Offers(Network& network) : network_(network) {}
  // Assistance is two copies in place of one. If ranks outnumber cores, no core is free for the second copy.
  void allow_assistance(bool allowed) { assistance_ = allowed; }
  // Sets the slots of all ranks of this host. Without slots no sender assists.
  void share(Pool* pool) { pool_ = pool; }

  // ----------------------------------------------------------------------------------------------------- as the sender
  // The message must not change until `pending` is called.
  ucs_status_t offer(Group& group, int rank, Header header, const void* data, Pending* pending);
  // The receiver has the message.
  void end_offer(Group& group, const Header& answer) noexcept;
  // The receiver asks for assistance.
  void begin_assistance(Group& group, const Header& call);

  // --------------------------------------------------------------------------------------------------- as the receiver
  // pid: the sender's process, or 0 for this one. A receive that has failed (Status::kDtype) takes no bytes.
  void pull(Request* receive, const Header& header, const Offer& offer, pid_t pid);

  // Copies one piece of the first incoming message and one of the first outgoing one. Returns whether there was one.
  bool advance() noexcept {
    const bool pulled = !pulls_.empty() && advance_pull();
    const bool assisted = !assisted_.empty() && assist();
    return pulled || assisted;
  }
  bool pulls() const { return !pulls_.empty(); }
  // Whether messages wait for assistance. No event announces that a receiver has emptied a slot.
  bool assists() const { return !assisted_.empty(); }
  // The communicator is lost.
  void release(Group& group) noexcept;

 private:
  // An outgoing message.
  struct Offered {
    Group* group;
    Pending* pending;
    int rank;               // the receiver
    const std::byte* data;  // the message
    std::size_t bytes;      // its bytes that have not been copied into slots
    std::uint64_t filled = 0;
  };
  // An incoming message.
  struct Pull {
    Copy copy;  // the bytes that are neither read nor taken from slots
    Request* receive;
    Header header;
    std::uint64_t number;       // of the offer
    bool assisted = false;      // the sender can assist
    bool called = false;        // the sender has been asked to assist
    std::size_t read = 0;       // bytes, from the beginning
    std::uint64_t emptied = 0;  // slots
  };

  // A rank's place among the ranks that share the pool, or -1.
  int place(const Group& group, int rank) const { return pool_ ? pool_->place_of(group.peers[rank]) : -1; }
  bool advance_pull() noexcept;
  bool copy_piece(Pull& pull) noexcept;
  bool assist() noexcept;

  Network& network_;
  bool assistance_ = false;
  Pool* pool_ = nullptr;
  std::uint64_t last_offer_ = 0;
  std::unordered_map<std::uint64_t, Offered> offered_;
  std::deque<std::uint64_t> assisted_;  // offers whose receivers have asked for assistance
  std::deque<Pull> pulls_;
};

}  // namespace aiocomms
