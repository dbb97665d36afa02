// Large messages within a host, copied by both sides.
//
// The receiver reads a message where it lies, and so depends on nobody. But the kernel takes long over each page, and
// one core does it all, while the sender's often has nothing to do. So the receiver calls the sender, which copies the
// message into slots in shared memory, from its end, as far as its engine comes to it; and the receiver, whenever a
// slot is full, empties it, else reads on from the beginning. Neither ever waits for the other: where what is read
// meets what is poured depends on how much time each side has. A piece may be copied twice there.

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/engine.hpp"
#include "net/copy.hpp"

namespace aiocomms {
namespace {

// Below, a message is half read before its sender has heard of the call.
constexpr std::size_t kPouredFrom = 512 * 1024;

}  // namespace

// Pouring is two copies in place of one: where ranks outnumber cores, no core is left for that.
bool Engine::may_help(const Group& group, int rank, std::size_t bytes) const {
  return bytes >= kPouredFrom && !pacer_.crowded() && rank != group.rank && group.place(rank) >= 0;
}

// The receiver's next piece. False: the message cannot be read any more.
bool Engine::share(Job& job) {
  Group& group = job.request->group;
  Segment& segment = group.shared->segment;
  if (!std::exchange(job.called, true)) {
    segment.begin_message();
    tell(group, job.helper, kPour, job.number, 0);
  }
  const int sender = group.place(job.helper);
  if (job.bytes >= Segment::kSlot && segment.filled(sender, job.number) > job.emptied) {
    job.bytes -= Segment::kSlot;
    copy_pages(job.to + job.bytes, segment.pool(sender, job.emptied), Segment::kSlot);
    segment.empty(++job.emptied);
    return true;
  }
  job.read += std::min(job.bytes, Segment::kSlot);
  segment.read(job.read);
  return copy_next(job, Segment::kSlot);
}

void Engine::called(Group& from, const Header& header) {
  const auto number = static_cast<std::uint64_t>(header.tag);
  auto found = asked_.find(number);
  if (found == asked_.end() || found->second.group != &from || found->second.rank != header.source) return;
  if (from.place(header.source) < 0 || std::ranges::find(pours_, number) != pours_.end()) return;
  pours_.push_back(number);
}

// The sender's next piece, of the message that is first until its receiver has answered.
bool Engine::pour() {
  if (pours_.empty()) return false;
  Asked& message = asked_.at(pours_.front());
  Segment& segment = message.group->shared->segment;
  const int receiver = message.group->place(message.rank);
  const std::size_t read = std::min(message.bytes, segment.bytes_read(receiver));
  if (message.bytes - read < Segment::kSlot || message.filled >= segment.emptied(receiver) + Segment::kPool)
    return false;
  message.bytes -= Segment::kSlot;
  std::memcpy(segment.pool(segment.rank(), message.filled), message.data + message.bytes, Segment::kSlot);
  segment.fill(pours_.front(), ++message.filled);
  return true;
}

}  // namespace aiocomms
