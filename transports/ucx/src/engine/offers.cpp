#include "engine/offers.hpp"

#include <algorithm>
#include <utility>

namespace aiocomms {
namespace {

// The receiver reads the bytes of one slot before it looks for the sender's slots. A smaller message would leave
// nothing for the sender.
constexpr std::size_t kAssistedFrom = 2 * Pool::kSlot;

}  // namespace

ucs_status_t Offers::offer(Group& group, int rank, Header header, const void* data, Pending* pending) {
  const Offer offer{reinterpret_cast<std::uint64_t>(data), ++last_offer_};
  header.dtype |= kOffered;
  offered_.emplace(offer.number, Offered{&group, pending, rank, static_cast<const std::byte*>(data), header.bytes});
  const ucs_status_t status = group.tell(network_, rank, header, &offer, sizeof offer);
  if (status == UCS_OK || status == UCS_INPROGRESS) return UCS_INPROGRESS;
  offered_.erase(offer.number);
  return status;
}

void Offers::end_offer(Group& group, const Header& answer) noexcept {
  const auto number = static_cast<std::uint64_t>(answer.tag);
  auto found = offered_.find(number);
  if (found == offered_.end() || found->second.group != &group || found->second.rank != answer.source) return;
  Pending* pending = found->second.pending;
  offered_.erase(found);
  std::erase(assisted_, number);
  pending->finished(UCS_OK);
}

void Offers::begin_assistance(Group& group, const Header& call) {
  const auto number = static_cast<std::uint64_t>(call.tag);
  auto found = offered_.find(number);
  if (found == offered_.end() || found->second.group != &group || found->second.rank != call.source) return;
  if (place(group, call.source) < 0 || std::ranges::find(assisted_, number) != assisted_.end()) return;
  assisted_.push_back(number);
}

void Offers::pull(Request* receive, const Header& header, const Offer& offer, pid_t pid) {
  const Group& group = receive->group;
  const std::size_t bytes = receive->status == Status::kDtype ? 0 : std::min<std::size_t>(header.bytes, receive->bytes);
  const bool whole = bytes == header.bytes;
  pulls_.push_back(
      {.copy = {static_cast<std::byte*>(receive->data), reinterpret_cast<const std::byte*>(offer.address), bytes, pid},
       .receive = receive,
       .header = header,
       .number = offer.number,
       .assisted = whole && assistance_ && bytes >= kAssistedFrom && header.source != group.rank &&
                   place(group, header.source) >= 0});
}

bool Offers::advance_pull() noexcept {
  Pull& pull = pulls_.front();
  const bool readable = pull.assisted ? copy_piece(pull) : pull.copy.advance(kCopyAtOnce);
  if (readable && pull.copy.bytes > 0) return true;
  const Pull done = pull;
  pulls_.pop_front();
  if (!readable) {
    done.receive->end(Status::kBroken, -UCS_ERR_CONNECTION_RESET);
  } else if (!put_back_if_stale(done.receive, done.header)) {
    done.receive->group.tell(network_, done.header.source, kAnswer, done.number);
    done.receive->finished(UCS_OK);
  }
  return true;
}

// Copies the receiver's next piece. False: the message is not readable any more.
bool Offers::copy_piece(Pull& pull) noexcept {
  const Group& group = pull.receive->group;
  Pool& pool = *pool_;
  Copy& copy = pull.copy;
  if (!std::exchange(pull.called, true)) {
    pool.begin_message();
    group.tell(network_, pull.header.source, kAssist, pull.number);
  }
  const int sender = place(group, pull.header.source);
  if (copy.bytes >= Pool::kSlot && pool.filled(sender, pull.number) > pull.emptied) {
    copy.bytes -= Pool::kSlot;
    pool.copy_out(sender, pull.emptied, copy.to + copy.bytes);
    pool.empty(++pull.emptied);
    return true;
  }
  pull.read += std::min(copy.bytes, Pool::kSlot);
  pool.read(pull.read);
  return copy.advance(Pool::kSlot);
}

// Copies the sender's next piece of the first assisted message, until its receiver has answered.
bool Offers::assist() noexcept {
  const std::uint64_t number = assisted_.front();
  Offered& message = offered_.at(number);
  Pool& pool = *pool_;
  const int receiver = place(*message.group, message.rank);
  const std::size_t read = std::min(message.bytes, pool.bytes_read(receiver));
  if (message.bytes - read < Pool::kSlot || message.filled >= pool.emptied(receiver) + Pool::kForMessage) return false;
  message.bytes -= Pool::kSlot;
  pool.copy_in(receiver, message.filled, message.data + message.bytes);
  pool.fill(number, ++message.filled);
  return true;
}

void Offers::release(Group& group) noexcept {
  std::erase_if(pulls_, [&](const Pull& pull) {
    const bool its = &pull.receive->group == &group;
    if (its) pull.receive->drop();
    return its;
  });
  for (auto entry = offered_.begin(); entry != offered_.end();) {
    const auto [number, message] = *entry;
    if (message.group != &group) {
      ++entry;
      continue;
    }
    // The next message reuses its slots, which the receiver may still read.
    if (std::erase(assisted_, number) > 0) group.shared->segment.let_go();
    entry = offered_.erase(entry);
    message.pending->finished(UCS_ERR_CANCELED);
  }
}

}  // namespace aiocomms
