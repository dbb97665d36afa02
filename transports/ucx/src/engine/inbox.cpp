#include "engine/inbox.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace aiocomms {
namespace {

// The most messages that may overtake one. UCX lets small messages overtake large ones, but never this many.
constexpr std::uint32_t kMostEarly = 1u << 20;

std::unique_ptr<Message> copy_of(const Header& header, const void* payload) {
  std::unique_ptr<Message> message(new Message{nullptr, header, nullptr, nullptr});
  const std::size_t bytes = header.dtype & kOffered ? sizeof(Offer) : header.bytes;
  if (payload && bytes) {
    message->payload = std::make_unique<std::byte[]>(bytes);
    std::memcpy(message->payload.get(), payload, bytes);
  }
  return message;
}

// The dtype without the engine's flags.
std::uint8_t dtype_of(const Header& header) { return static_cast<std::uint8_t>(header.dtype & ~(kOffered | kVouched)); }

}  // namespace

// A descriptor of UCX, in place of a payload. It is released unless take() passes it on.
class Inbox::Descriptor {
 public:
  Descriptor(Network& network, void* held) : network_(network), held_(held) {}
  ~Descriptor() {
    if (held_) network_.release(held_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  explicit operator bool() const { return held_ != nullptr; }
  void* take() { return std::exchange(held_, nullptr); }

 private:
  Network& network_;
  void* held_;
};

Inbox::Inbox(const std::vector<Peer>& peers, bool device, Groups& groups, Network& network, Owner& owner,
             std::uint32_t first)
    : peers_(peers), device_(device), groups_(groups), network_(network), owner_(owner), first_(first) {
  make_room(peers.size());
}

void Inbox::make_room(std::size_t peers) {
  if (peers <= early_.size()) return;
  received_.resize(peers, first_);
  early_.resize(peers);
}

void Inbox::arrive(int peer, const Header& header, const void* payload, void* handed) {
  Descriptor descriptor(network_, handed);
  // UCX may deliver a small message before an earlier large one. The receives must see the order of the sends.
  auto& early = early_[peer];
  if (header.order != received_[peer]) {
    if (header.order - received_[peer] >= kMostEarly || early.contains(header.order)) return network_.refuse(peer);
    early.emplace(header.order, copy_of(header, payload)).first->second->descriptor = descriptor.take();
    return;
  }
  ++received_[peer];
  deliver(peer, header, payload, descriptor);
  // The numbers restart at 0 after 2^32 messages, so the next number need not be the lowest.
  while (!early.empty()) {
    auto next = early.extract(received_[peer]);
    if (!next) break;
    const std::unique_ptr<Message> message = std::move(next.mapped());
    ++received_[peer];
    Descriptor its(network_, message->descriptor);
    deliver(peer, message->header, message->payload.get(), its);
  }
}

void Inbox::forget_early(int peer) noexcept {
  for (auto& [order, message] : std::exchange(early_[peer], {})) {
    if (message->descriptor) network_.release(message->descriptor);
  }
}

// Delivers a peer's next message, in the order of the sends.
void Inbox::deliver(int peer, const Header& header, const void* payload, Descriptor& descriptor) noexcept {
  Group* group = groups_.find_open(header.group);
  if (group == nullptr) return;
  if (!is_sensible(*group, peer, header, descriptor)) return network_.refuse(peer);
  try {
    match(*group, header, payload, descriptor);
  } catch (...) {
    owner_.failed(*group);
  }
}

// Whether a peer has the rank that it claims in the group, and may send such a message.
bool Inbox::is_sensible(const Group& group, int peer, const Header& header, const Descriptor& descriptor) const {
  if (header.source >= group.peers.size() || group.peers[header.source] != peer || header.channel >= kChannels) {
    return false;
  }
  if (header.channel > kLane) return !descriptor && !(header.dtype & kOffered);
  if (header.dtype & kVouched && peers_[peer].pid != 0) return false;  // Only ranks of other hosts vouch.
  if (is_on_device(header)) return (descriptor || header.bytes == 0) && !(header.dtype & kOffered);
  return !(header.dtype & kOffered) || peers_[peer].readable != 0;  // An offer needs a sender whose memory is readable.
}

void Inbox::match(Group& group, const Header& header, const void* payload, Descriptor& descriptor) {
  if (header.channel >= kSchedule) {
    if (header.channel == kVouch) return accept_vouch(group, header);
    if (header.channel > kLane) return owner_.handle(group, header, payload);
    if (header.channel == kSchedule && !owner_.agrees(group, header)) return;
  }
  if (header.dtype & kVouched && !group.vouches.try_emplace({header.source, header.order}).second) {
    // A message of the same number, 2^32 messages ago, still waits. A vouch could not tell the two apart.
    return network_.refuse(group.peers[header.source]);
  }
  if (Request* receive = group.mail.receive_for(header)) return accept_message(receive, header, payload, descriptor);
  std::unique_ptr<Message> message = copy_of(header, payload);
  group.mail.keep(message.get());
  message.release()->descriptor = descriptor.take();
  while (Request* probe = group.mail.probe_for(header)) probe->end(Status::kDone, header.bytes, dtype_of(header));
}

void Inbox::post(Request* receive, const Key& key) {
  Group& group = receive->group;
  if (Message* found = group.mail.message_for(key)) {
    const std::unique_ptr<Message> message(found);
    Descriptor descriptor(network_, message->descriptor);
    accept_message(receive, message->header, message->payload.get(), descriptor);
  } else if (group.left[key.source()] && receive->ends_when_peer_closes()) {
    receive->end(Status::kClosed, static_cast<std::uint64_t>(key.source()));
  } else {
    group.mail.keep(key, receive);
  }
}

void Inbox::probe(Request* probe, const Key& key) {
  Group& group = probe->group;
  if (const Message* found = group.mail.look(key)) {
    probe->end(Status::kDone, found->header.bytes, dtype_of(found->header));
  } else if (group.left[key.source()]) {
    probe->end(Status::kClosed, static_cast<std::uint64_t>(key.source()));
  } else {
    group.mail.keep_probe(key, probe);
  }
}

Request* Inbox::withdraw(Group& group, const Key& key, Ticket ticket) {
  return group.mail.withdraw(key, [&](const Request& receive) { return receive.ticket == ticket; });
}

void Inbox::drop_receives(Group& group, const Key& key) noexcept {
  while (Request* receive = group.mail.withdraw(key, [](const Request&) { return true; })) receive->drop();
}

void Inbox::drop_messages(Group& group, const Key& key) {
  while (Message* found = group.mail.message_for(key)) {
    const std::unique_ptr<Message> message(found);
    const Descriptor descriptor(network_, message->descriptor);
    group.vouches.erase({message->header.source, message->header.order});
    if (!(message->header.dtype & kOffered)) continue;
    Offer offer;
    std::memcpy(&offer, message->payload.get(), sizeof offer);
    group.tell(network_, message->header.source, kAnswer, offer.number);
  }
}

// A receive has matched a message.
void Inbox::accept_message(Request* receive, const Header& header, const void* payload,
                           Descriptor& descriptor) noexcept {
  try {
    take(receive, header, payload, descriptor);
  } catch (...) {  // Such an exception comes before the receive is passed on.
    owner_.failed(receive->group);
    receive->drop();
  }
}

void Inbox::take(Request* receive, const Header& header, const void* payload, Descriptor& descriptor) {
  if (put_back_if_stale(receive, header)) return;
  if (header.channel == kLane && header.value != receive->fingerprint) return receive->end(Status::kDtype);
  const std::uint8_t dtype = dtype_of(header);
  if (dtype != receive->dtype || header.bytes != receive->bytes) {
    receive->status = dtype != receive->dtype ? Status::kDtype : Status::kTruncated;
    receive->details[0] = header.bytes;
    receive->details[1] = dtype;
  }
  if (header.dtype & kOffered) {
    Offer offer;
    std::memcpy(&offer, payload, sizeof offer);
    return owner_.pull(receive, header, offer);
  }
  if (receive->status == Status::kDtype) return end_receive(receive, header);
  if (descriptor) return fetch(receive, header, descriptor);
  const std::size_t bytes = std::min<std::size_t>(header.bytes, receive->bytes);
  if (bytes) std::memcpy(receive->data, payload, bytes);
  end_receive(receive, header);
}

// A message that UCX fetches.
class Inbox::Fetch final : public Pending {
 public:
  Fetch(Inbox& inbox, Request* receive, const Header& header) : inbox_(inbox), receive_(receive), header_(header) {}
  void finished(ucs_status_t status) noexcept override {
    if (status == UCS_OK) {
      inbox_.end_receive(receive_, header_);
    } else {
      receive_->group.vouches.erase({header_.source, header_.order});
      receive_->finished(status);
    }
    delete this;
  }

 private:
  Inbox& inbox_;
  Request* receive_;
  const Header header_;
};

void Inbox::fetch(Request* receive, const Header& header, Descriptor& descriptor) {
  auto made = std::make_unique<Fetch>(*this, receive, header);
  if (header.bytes <= receive->bytes) {
    const Memory memory = header.channel < kUserChannels ? Memory::kUsers : Memory::kOwn;
    Fetch* fetching = made.release();
    return follow(fetching, network_.fetch(descriptor.take(), receive->data, header.bytes, memory, fetching));
  }
  receive->beginning = {receive->data, receive->bytes, header.bytes};
  if (is_on_device(header)) {
    receive->staging = std::make_unique<std::byte[]>(receive->bytes);
    receive->beginning.data = receive->staging.get();
  }
  Fetch* fetching = made.release();
  follow(fetching, network_.fetch_beginning(descriptor.take(), &receive->beginning, fetching));
}

// The payload is complete. It may be invalid, because a sender that has lost the communicator may overwrite it during
// the read.
void Inbox::end_receive(Request* receive, const Header& header) noexcept {
  Group& group = receive->group;
  if (group.lost) return receive->finished(UCS_ERR_CANCELED);
  if (!(header.dtype & kVouched)) {
    if (!put_back_if_stale(receive, header)) receive->finished(UCS_OK);
    return;
  }
  auto vouch = group.vouches.find({header.source, header.order});
  const bool vouched = vouch->second.come;
  if (!vouched && !(group.left[header.source] && receive->ends_when_peer_closes())) {
    vouch->second.waits = receive;
    return;
  }
  group.vouches.erase(vouch);
  if (vouched) return receive->finished(UCS_OK);
  receive->end(Status::kClosed, header.source);
}

void Inbox::accept_vouch(Group& group, const Header& header) noexcept {
  auto vouch = group.vouches.find({header.source, static_cast<std::uint32_t>(header.tag)});
  if (vouch == group.vouches.end()) return;
  Request* receive = vouch->second.waits;
  if (receive == nullptr) {
    vouch->second.come = true;
    return;
  }
  group.vouches.erase(vouch);
  receive->finished(UCS_OK);
}

void Inbox::end_receives(Group& group, int rank) noexcept {
  const auto source = static_cast<std::uint64_t>(rank);
  group.mail.drain_receives(
      [&](const Key& key) { return key.source() == rank && (key.channel() < kUserChannels || key.channel() == kLane); },
      [&](Request* receive) { receive->end(Status::kClosed, source); });
  // The offered memory of that rank is not valid any more.
  group.mail.drain_messages([&](const Key& key) { return key.source() == rank; },
                            [](const Message& message) { return (message.header.dtype & kOffered) != 0; },
                            [](Message* message) { delete message; });
  // Receives that wait for a vouch of that rank end too.
  std::erase_if(group.vouches, [&](const auto& entry) {
    const auto& [message, vouch] = entry;
    const bool vain = message.first == rank && vouch.waits && vouch.waits->ends_when_peer_closes();
    if (vain) vouch.waits->end(Status::kClosed, source);
    return vain;
  });
}

void Inbox::release(Group& group) noexcept {
  group.mail.drain_receives([](const Key&) { return true; }, [](Request* receive) { receive->drop(); });
  for (auto& [message, vouch] : std::exchange(group.vouches, {})) {
    if (vouch.waits) vouch.waits->drop();
  }
  group.mail.drain_messages([](const Key&) { return true; }, [](const Message&) { return true; },
                            [&](Message* message) {
                              if (message->descriptor) network_.release(message->descriptor);
                              delete message;
                            });
}

}  // namespace aiocomms
