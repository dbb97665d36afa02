// Messages that arrive: put in order, matched, fetched; and what becomes of those that come too early, too long, or
// from a rank that has lost the communicator.

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/engine.hpp"

namespace aiocomms {
namespace {

// UCX lets small messages overtake large ones, but not that many.
constexpr std::uint32_t kMostEarly = 1u << 20;

Message* keep(const Header& header, const void* payload, void* descriptor) {
  auto message = new Message{nullptr, header, nullptr, descriptor};
  const std::size_t bytes = header.dtype & kOffered ? sizeof(Offer) : header.bytes;
  if (payload && bytes) {
    message->payload = std::make_unique<std::byte[]>(bytes);
    std::memcpy(message->payload.get(), payload, bytes);
  }
  return message;
}

}  // namespace

void Engine::arrived(int peer, const Header& header, const void* payload, void* descriptor) {
  // UCX may deliver a small message before a large one that was sent earlier; nobody may notice.
  if (header.order != received_[peer]) {
    const bool sane = header.order - received_[peer] < kMostEarly && !early_[peer].contains(header.order);
    if (sane) {
      early_[peer].emplace(header.order, keep(header, payload, descriptor));
      return;
    }
    if (descriptor) worker_->drop(descriptor);
    return worker_->refuse(peer);
  }
  ++received_[peer];
  auto deliver_to = [this, peer](const Header& it, const void* data, void* large) {
    auto found = groups_.find(it.group);
    if (found == groups_.end() || found->second->lost) {
      if (large) worker_->drop(large);
    } else if (sensible(*found->second, peer, it, large)) {
      deliver(*found->second, it, data, large);
    } else {
      if (large) worker_->drop(large);
      worker_->refuse(peer);
    }
  };
  deliver_to(header, payload, descriptor);
  auto& early = early_[peer];
  while (!early.empty() && early.begin()->first == received_[peer]) {
    std::unique_ptr<Message> message(early.begin()->second);
    early.erase(early.begin());
    ++received_[peer];
    deliver_to(message->header, message->payload.get(), message->descriptor);
  }
  if (!farewells_[peer].empty()) obey(peer);
}

// What has overtaken others is of no use any more.
void Engine::forget_early(int peer) {
  for (auto& [order, message] : std::exchange(early_[peer], {})) {
    if (message->descriptor) worker_->drop(message->descriptor);
    delete message;
  }
}

// Whether a peer is who it says it is in a group, and may send such a message.
bool Engine::sensible(const Group& to, int peer, const Header& header, void* descriptor) const {
  if (header.source >= to.peers.size() || to.peers[header.source] != peer || header.channel > kVouch) return false;
  if (header.channel > kSchedule) return descriptor == nullptr && !(header.dtype & kOffered);
  if (header.dtype & kVouched && peers_[peer].pid != 0) return false;  // only those of other hosts vouch
  if (on_device(header)) return (descriptor || header.bytes == 0) && !(header.dtype & kOffered);
  return !(header.dtype & kOffered) || peers_[peer].readable != 0;  // else there would be nobody to copy it from
}

void Engine::deliver(Group& to, const Header& header, const void* payload, void* descriptor) {
  if (header.channel == kSignal) return signalled(to, header);
  if (header.channel == kAtomic) return asked(to, header, payload);
  if (header.channel == kAnswer) return answered(header);
  if (header.channel == kVouch) return vouched(to, header);
  if (header.channel == kPour) return called(to, header);
  if (header.channel == kSchedule) {
    check_mark(to, header.source, static_cast<std::uint64_t>(header.tag), header.mark);
    if (to.disagrees >= 0) {
      if (descriptor) worker_->drop(descriptor);
      return;
    }
  }
  if (header.dtype & kVouched) to.vouches[{header.source, header.order}] = {};
  if (Request* request = to.mail.receive_for(header)) return take(request, header, payload, descriptor);
  to.mail.keep(keep(header, payload, descriptor));
}

// Whether the sender has lost the communicator before its message was read: then that may be anything by now. The
// receive waits on, until the communicator is lost here, too, of which the sender has told.
bool Engine::stale(Request* request, const Header& header) {
  if (!request->group.has_let_go(header.source)) return false;
  request->group.mail.keep(Key(header.source, header.channel, header.tag), request);
  return true;
}

// A message that UCX fetches.
struct Incoming final : Pending {
  Incoming(Engine& the_engine, Request* the_request, const Header& the_header)
      : engine(the_engine), request(the_request), header(the_header) {}
  void finished(ucs_status_t status) override {
    engine.moving_ -= std::exchange(request->moving, false);
    if (status == UCS_OK) {
      engine.came(request, header);
    } else {
      request->group.vouches.erase({header.source, header.order});
      request->finished(status);
    }
    delete this;
  }

  Engine& engine;
  Request* request;
  const Header header;
};

// A receive takes the message that it matches.
void Engine::take(Request* request, const Header& header, const void* payload, void* descriptor) {
  if (stale(request, header)) {
    if (descriptor) worker_->drop(descriptor);
    return;
  }
  const std::uint8_t dtype = header.dtype & ~(kOffered | kVouched);
  if (dtype != request->dtype || header.bytes != request->bytes) {
    request->status = dtype != request->dtype ? Status::kDtype : Status::kTruncated;
    request->details[0] = header.bytes;
    request->details[1] = dtype;
  }
  if (header.dtype & kOffered) return pull(request, header, payload);
  if (request->status == Status::kDtype) {
    if (descriptor) worker_->drop(descriptor);
    return came(request, header);
  }
  const std::size_t bytes = std::min<std::size_t>(header.bytes, request->bytes);
  if (!descriptor) {
    if (bytes) std::memcpy(request->data, payload, bytes);
    return came(request, header);
  }
  auto incoming = new Incoming(*this, request, header);
  if (header.bytes <= request->bytes) {
    const Memory memory = header.channel < kUserChannels ? Memory::kUsers : Memory::kOwn;
    return follow(request, worker_->fetch(descriptor, request->data, bytes, memory, incoming), incoming);
  }
  request->beginning = {request->data, request->bytes, header.bytes};
  if (on_device(header)) {
    request->head = std::make_unique<std::byte[]>(bytes);
    request->beginning.data = request->head.get();
  }
  follow(request, worker_->fetch_beginning(descriptor, &request->beginning, incoming), incoming);
}

// The payload is all here. Does it count? It may have been written over while it was read, if its sender had lost the
// communicator by then.
void Engine::came(Request* request, const Header& header) {
  Group& from = request->group;
  if (from.lost) return request->finished(UCS_ERR_CANCELED);
  if (!(header.dtype & kVouched)) {
    if (!stale(request, header)) request->finished(UCS_OK);
    return;
  }
  auto vouch = from.vouches.find({header.source, header.order});
  if (!vouch->second.come && (!from.left[header.source] || request->event)) {
    vouch->second.waits = request;
    return;
  }
  const bool counts = vouch->second.come;
  from.vouches.erase(vouch);
  if (counts) return request->finished(UCS_OK);
  complete(request, Status::kClosed, header.source);
}

void Engine::vouched(Group& from, const Header& header) {
  auto vouch = from.vouches.find({header.source, static_cast<std::uint32_t>(header.tag)});
  if (vouch == from.vouches.end()) return;
  Request* request = vouch->second.waits;
  if (request == nullptr) {
    vouch->second.come = true;
    return;
  }
  from.vouches.erase(vouch);
  request->finished(UCS_OK);
}

// A call of UCX that has returned `status` tells who waits for it, now or later: the request, or who asks for it.
void Engine::follow(Request* request, ucs_status_t status, Pending* pending) {
  if (status != UCS_INPROGRESS) return (pending ? pending : request)->finished(status);
  if (!worker_->device()) return;
  request->moving = true;
  ++moving_;
}

std::string Engine::head(Ticket ticket) {
  std::lock_guard lock(lock_);
  return reports_.take_beginning(ticket);
}

// A receive copies an offered message from where it lies, in pieces.
void Engine::pull(Request* request, const Header& header, const void* payload) {
  Offer offer;
  std::memcpy(&offer, payload, sizeof offer);
  const int rank = header.source;
  const std::size_t bytes = request->status == Status::kDtype ? 0 : std::min<std::size_t>(header.bytes, request->bytes);
  Job job{static_cast<std::byte*>(request->data),
          reinterpret_cast<const std::byte*>(offer.address),
          bytes,
          request,
          [=, this](Request* it) {
            if (stale(it, header)) return;
            tell(it->group, rank, kAnswer, offer.number, 0);
            it->finished(UCS_OK);
          },
          peers_[request->group.peers[rank]].readable};
  if (bytes == header.bytes && may_help(request->group, rank, bytes)) {
    job.helper = rank;
    job.number = offer.number;
  }
  pulls_.push_back(std::move(job));
}

}  // namespace aiocomms
