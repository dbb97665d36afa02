// Large messages within a host. The sender offers them; the receiver reads them where they lie, and answers.
//
// The receiver depends on nobody for that. But the kernel takes long over each page, and one core does it all, while
// the sender's often has nothing to do. So the receiver of a very large message calls the sender for assistance. The
// sender copies the message into slots in shared memory, from its end, as far as its engine comes to it; and the
// receiver, whenever a slot is full, empties it, else reads on from the beginning. Neither ever waits for the other:
// where what is read meets what the sender has copied depends on how much time each side has. A piece may be copied
// twice there.
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
  // Assistance is two copies in place of one: where ranks outnumber cores, no core is left for that.
  void allow_assistance(bool allowed) { assistance_ = allowed; }
  // The slots of all ranks of this host. Nobody assists where there are none.
  void share(Pool* pool) { pool_ = pool; }

  // ------------------------------------------------------------------------------------------------------ as the
  // sender The message stays where it is until `pending` hears of it.
  ucs_status_t offer(Group& group, int rank, Header header, const void* data, Pending* pending);
  // The receiver has the message.
  void end_offer(Group& group, const Header& answer) noexcept;
  // The receiver calls for assistance.
  void begin_assistance(Group& group, const Header& call);

  // ---------------------------------------------------------------------------------------------------- as the
  // receiver pid: the sender's process, 0 for this one. A receive that has ended (Status::kDtype) takes no byte of it.
  void pull(Request* receive, const Header& header, const Offer& offer, pid_t pid);

  // One piece of the first message that comes in, and one of the first that goes out. Returns whether there was one.
  bool advance() noexcept {
    const bool pulled = !pulls_.empty() && advance_pull();
    const bool assisted = !assisted_.empty() && assist();
    return pulled || assisted;
  }
  bool pulls() const { return !pulls_.empty(); }
  // Whether messages wait for assistance: nobody tells of a slot that a receiver has emptied.
  bool assists() const { return !assisted_.empty(); }
  // The communicator is lost.
  void release(Group& group) noexcept;

 private:
  // A message that goes out.
  struct Offered {
    Group* group;
    Pending* pending;
    int rank;               // the receiver
    const std::byte* data;  // the message
    std::size_t bytes;      // of it, that have not been in slots
    std::uint64_t filled = 0;
  };
  // A message that comes in.
  struct Pull {
    Copy copy;  // what has been neither read nor emptied out of slots
    Request* receive;
    Header header;
    std::uint64_t number;       // of the offer
    bool assisted = false;      // its sender can help
    bool called = false;        // the sender has been told to
    std::size_t read = 0;       // bytes, from the beginning
    std::uint64_t emptied = 0;  // slots
  };

  // Where a rank is among those that share the pool, or -1.
  int place(const Group& group, int rank) const { return pool_ ? pool_->place_of(group.peers[rank]) : -1; }
  bool advance_pull() noexcept;
  bool copy_piece(Pull& pull) noexcept;
  bool assist() noexcept;

  Network& network_;
  bool assistance_ = false;
  Pool* pool_ = nullptr;
  std::uint64_t last_offer_ = 0;
  std::unordered_map<std::uint64_t, Offered> offered_;
  std::deque<std::uint64_t> assisted_;  // offers whose receivers have called
  std::deque<Pull> pulls_;
};

}  // namespace aiocomms
