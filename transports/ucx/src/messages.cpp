// Messages: posted, matched, and what becomes of those that come too early, too long, or from a rank that has closed.

#include <algorithm>
#include <cstring>

#include "engine.hpp"

namespace aiocomms {
namespace {

// Messages within a host are offered from this size on. Below, copying twice is faster than a system call and an
// answer.
constexpr std::size_t kOfferedFrom = 32 * 1024;
// Messages to other hosts are copied up to this size, the longest segment of a collective's: that takes less time than
// vouching for them.
constexpr std::size_t kCopiedTo = 64 * 1024;
// UCX lets small messages overtake large ones, but not that many.
constexpr std::uint32_t kMostEarly = 1u << 20;

}  // namespace

Request::Request(Engine& the_engine, Group& the_group, Ticket the_ticket)
    : engine(the_engine), group(the_group), ticket(the_ticket) {
  ++group.users;
}

Request::~Request() {
  --group.users;
  engine.moving_ -= moving;
}

void Request::finished(ucs_status_t result) {
  if (event) {
    if (!group.lost && result == UCS_OK && status == Status::kDone) engine.events_.emplace_back(&group, event);
    delete this;
    return;
  }
  if (result == UCS_OK) {
    if (head && !group.lost) {
      engine.heads_[ticket] = {reinterpret_cast<const char*>(head.get()), beginning.room};
    }
    engine.complete(this, status, details[0], details[1]);
  } else if (group.lost) {
    engine.complete(this, Status::kDropped);
  } else {
    engine.complete(this, Status::kBroken, static_cast<std::uint64_t>(-result));
  }
}

Group& Engine::group(std::uint32_t id) { return *groups_.at(id); }

bool Engine::send(Ticket ticket, std::uint32_t id, const void* data, std::size_t bytes, int dst, int channel,
                  std::int64_t tag, int dtype) {
  Turn turn(*this);
  Group& to = group(id);
  auto request = new Request(*this, to, ticket);
  if (to.left[dst]) {
    complete(request, Status::kClosed, static_cast<std::uint64_t>(dst));
    return settle(request);
  }
  Header header{to.their_ids[dst],
                0,
                static_cast<std::uint16_t>(to.rank),
                static_cast<std::uint8_t>(channel),
                static_cast<std::uint8_t>(dtype),
                static_cast<std::uint32_t>(rank_),
                tag,
                bytes,
                0};
  ucs_status_t status = dispatch(to, dst, header, data, request);
  if (status != UCS_INPROGRESS) request->finished(status);
  return settle(request);
}

// A message on its way to another host. UCX may read it long after the call, whatever its size: while the connection is
// being made, or the socket is full. By then the communicator may be lost, and the program may have written over it.
struct Outgoing final : Pending {
  Outgoing(Engine& the_engine, Group& the_group, int the_rank, Pending* the_pending)
      : engine(the_engine),
        group(the_group),
        rank(the_rank),
        order(the_engine.worker_->sent(the_group.peers[the_rank])),
        pending(the_pending) {}
  void finished(ucs_status_t status) override {
    if (status == UCS_OK) vouch();
    pending->finished(status);
    delete this;
  }
  // UCX has read all of it. So what has been sent is what was meant, if the communicator is not lost yet.
  void vouch() {
    if (!copy && !group.lost) engine.tell(group, rank, kVouch, order, 0);
  }

  Engine& engine;
  Group& group;
  const int rank;
  const std::uint32_t order;
  Pending* pending;
  std::unique_ptr<std::byte[]> copy;  // of a small one
};

// Send a message off: large ones within a host as an offer, for UCX would copy them at one go, on the loop.
ucs_status_t Engine::dispatch(Group& group, int rank, Header header, const void* data, Pending* pending) {
  const int peer = group.peers[rank];
  const bool device = on_device(header);
  if (device || header.bytes < kOfferedFrom || peers_[peer].readable == 0) {
    const Memory memory = header.channel < kUserChannels ? Memory::kUsers : Memory::kOwn;
    if (peers_[peer].pid != 0 || header.bytes == 0) return worker_->send(peer, header, data, memory, pending);
    auto outgoing = new Outgoing(*this, group, rank, pending);
    if (device || header.bytes > kCopiedTo) {
      header.dtype |= kVouched;
    } else {
      outgoing->copy = std::make_unique_for_overwrite<std::byte[]>(header.bytes);
      std::memcpy(outgoing->copy.get(), data, header.bytes);
      data = outgoing->copy.get();
    }
    ucs_status_t status = worker_->send(peer, header, data, memory, outgoing);
    if (status == UCS_INPROGRESS) return status;
    if (status == UCS_OK) outgoing->vouch();
    delete outgoing;
    return status;
  }
  const Offer offer{reinterpret_cast<std::uint64_t>(data), ++next_question_};
  header.dtype |= kOffered;
  ucs_status_t status = worker_->tell(peer, header, &offer, sizeof offer, nullptr);
  if (status != UCS_OK && status != UCS_INPROGRESS) return status;
  asked_.emplace(offer.number,
                 Asked{&group, pending, nullptr, rank, static_cast<const std::byte*>(data), header.bytes});
  return UCS_INPROGRESS;
}

// Say something to a rank that one number identifies.
void Engine::tell(Group& group, int rank, Channel channel, std::uint64_t number, std::uint64_t value) {
  const Header header{group.their_ids[rank],
                      0,
                      static_cast<std::uint16_t>(group.rank),
                      channel,
                      0,
                      static_cast<std::uint32_t>(rank_),
                      static_cast<std::int64_t>(number),
                      0,
                      value};
  worker_->tell(group.peers[rank], header, nullptr, 0, nullptr);
}

void Engine::answered(const Header& header) {
  auto found = asked_.find(static_cast<std::uint64_t>(header.tag));
  if (found == asked_.end()) return;
  const Asked asked = found->second;
  asked_.erase(found);
  std::erase(pours_, static_cast<std::uint64_t>(header.tag));
  if (asked.value) *asked.value = header.mark;
  asked.pending->finished(UCS_OK);
}

bool Engine::recv(Ticket ticket, std::uint32_t id, void* data, std::size_t bytes, int src, int channel,
                  std::int64_t tag, int dtype) {
  Turn turn(*this);
  Group& from = group(id);
  auto request = new Request(*this, from, ticket);
  request->data = data;
  request->bytes = bytes;
  request->dtype = static_cast<std::uint8_t>(dtype);
  Key key(static_cast<std::uint16_t>(src), static_cast<std::uint8_t>(channel), tag);
  Message* message = from.mail.message_for(key);
  if (message) {
    take(request, message->header, message->payload.get(), message->descriptor);
    delete message;
  } else if (from.left[src]) {
    complete(request, Status::kClosed, static_cast<std::uint64_t>(src));
  } else {
    from.mail.keep(key, request);
  }
  return settle(request);
}

bool Engine::cancel(std::uint32_t id, int src, int channel, std::int64_t tag, Ticket ticket) {
  Turn turn(*this);
  Key key(static_cast<std::uint16_t>(src), static_cast<std::uint8_t>(channel), tag);
  Request* request = group(id).mail.withdraw(key, [&](const Request& it) { return it.ticket == ticket; });
  if (request == nullptr) return false;
  --pending_;
  delete request;
  return true;
}

// ------------------------------------------------------------------------------------------------------------ arrival

namespace {

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
  Turn turn(*this);
  auto found = heads_.extract(ticket);
  return found ? std::move(found.mapped()) : std::string();
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

// ------------------------------------------------------------------------------------------------- schedules' messages

namespace {

// A schedule's send: its event must happen outside of UCX's own calls.
struct Sent final : Pending {
  using Events = std::vector<std::pair<Group*, Event*>>;
  Sent(Group& the_group, Events& the_events, Event& the_event)
      : group(the_group), events(the_events), event(the_event) {
    ++group.users;
  }
  ~Sent() override { --group.users; }
  void finished(ucs_status_t status) override {
    if (!group.lost && status == UCS_OK) events.emplace_back(&group, &event);
    delete this;
  }
  Group& group;
  Events& events;
  Event& event;
};

}  // namespace

Wire::Wire(Engine& engine, Group& group, std::vector<int> ranks)
    : engine_(engine),
      group_(group),
      ranks_(std::move(ranks)),
      me_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), group.rank) - ranks_.begin())) {}

void Wire::send(int dst, const void* data, std::size_t bytes, Event& event) {
  int rank = ranks_[dst];
  Header header{group_.their_ids[rank],
                0,
                static_cast<std::uint16_t>(group_.rank),
                kSchedule,
                0,
                static_cast<std::uint32_t>(engine_.rank_),
                static_cast<std::int64_t>(group_.collectives),
                bytes,
                group_.schedules.front().mark};
  auto sent = new Sent(group_, engine_.events_, event);
  ucs_status_t status = engine_.dispatch(group_, rank, header, data, sent);
  if (status == UCS_INPROGRESS) return;
  delete sent;
  if (status == UCS_OK) event.complete();
  // Otherwise the peer is gone, which its control connection says with its name; this schedule stands still.
}

void Wire::recv(int src, void* data, std::size_t bytes, Event& event) {
  auto request = new Request(engine_, group_);
  request->data = data;
  request->bytes = bytes;
  request->event = &event;
  int rank = ranks_[src];
  Key key(static_cast<std::uint16_t>(rank), kSchedule, static_cast<std::int64_t>(group_.collectives));
  if (Message* message = group_.mail.message_for(key)) {
    engine_.take(request, message->header, message->payload.get(), message->descriptor);
    delete message;
  } else {
    group_.mail.keep(key, request);
  }
}

// --------------------------------------------------------------------------------------------------------- farewells

std::string Farewell::pack() const {
  std::string frame(1, kind);
  frame.append(reinterpret_cast<const char*>(&order), sizeof order);
  frame.append(reinterpret_cast<const char*>(&group), sizeof group);
  frame.append(reinterpret_cast<const char*>(&rank), sizeof rank);
  return frame.append(reinterpret_cast<const char*>(&collectives), sizeof collectives);
}

bool Farewell::unpack(const std::string& frame, Farewell& farewell) {
  if (frame.size() != 1 + 3 * sizeof order + sizeof collectives) return false;
  const char* at = frame.data();
  farewell.kind = *at++;
  auto read = [&](auto& field) {
    std::memcpy(&field, at, sizeof field);
    at += sizeof field;
  };
  read(farewell.order);
  read(farewell.group);
  read(farewell.rank);
  read(farewell.collectives);
  return true;
}

void Engine::heard(int peer, std::string frame) {
  Turn turn(*this);
  const char kind = frame.empty() ? '\0' : frame[0];
  Farewell farewell;
  if (kind == 'A') {
    awaited_[peer] = false;
  } else if ((kind == 'B' || kind == 'E') && Farewell::unpack(frame, farewell)) {
    farewells_[peer].push_back(farewell);
    while (advance()) {
    }
    obey(peer);
  } else {
    notify({Notice::kFrame, peer, 0, 0, std::move(frame)});
  }
}

void Engine::obey(int peer) {
  std::vector<Farewell> waiting;
  waiting.swap(farewells_[peer]);
  for (const Farewell& farewell : waiting) {
    if (static_cast<std::int32_t>(received_[peer] - farewell.order) < 0) {
      farewells_[peer].push_back(farewell);
    } else if (farewell.kind == 'E') {
      control_->send(peer, "A");
    } else {
      auto found = groups_.find(farewell.group);
      if (found != groups_.end() && farewell.rank < found->second->peers.size()) {
        left(*found->second, static_cast<int>(farewell.rank), farewell.collectives);
      }
    }
  }
}

void Engine::left(Group& from, int rank, std::uint64_t collectives) {
  from.left[rank] = 1 + collectives;
  from.mail.drain_receives(
      [&](const Key& key) { return key.source() == rank && key.channel() < kUserChannels; },
      [&](Request* request) { complete(request, Status::kClosed, static_cast<std::uint64_t>(rank)); });
  // What it has offered and nobody has taken is not there any more.
  from.mail.drain_messages([&](const Key& key) { return key.source() == rank; },
                           [&](Message* message) {
                             if (message->header.dtype & kOffered) {
                               delete message;
                             } else {
                               from.mail.keep(message);
                             }
                           });
  // Nor does it vouch for anything any more.
  std::erase_if(from.vouches, [&](const auto& entry) {
    const auto& [message, vouch] = entry;
    const bool vain = message.first == rank && vouch.waits && !vouch.waits->event;
    if (vain) complete(vouch.waits, Status::kClosed, static_cast<std::uint64_t>(rank));
    return vain;
  });
  for (auto& [number, window] : from.windows) {
    Queue<Request>& waits = window.parts[rank].waits;
    while (!waits.empty()) complete(waits.pop(), Status::kClosed, static_cast<std::uint64_t>(rank));
  }
  notify({Notice::kLeft, rank, from.id, collectives, {}});
}

}  // namespace aiocomms
