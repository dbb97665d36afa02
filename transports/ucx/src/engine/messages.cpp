// Messages: posted, sent off and withdrawn, of users and of schedules.

#include <algorithm>
#include <cstring>

#include "engine/engine.hpp"

namespace aiocomms {
namespace {

// Messages within a host are offered from this size on. Below, copying twice is faster than a system call and an
// answer.
constexpr std::size_t kOfferedFrom = 32 * 1024;
// Messages to other hosts are copied up to this size, the longest segment of a collective's: that takes less time than
// vouching for them.
constexpr std::size_t kCopiedTo = 64 * 1024;

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
      engine.reports_.keep_beginning(ticket, {reinterpret_cast<const char*>(head.get()), beginning.room});
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
  std::lock_guard lock(lock_);
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
  std::lock_guard lock(lock_);
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
  std::lock_guard lock(lock_);
  Key key(static_cast<std::uint16_t>(src), static_cast<std::uint8_t>(channel), tag);
  Request* request = group(id).mail.withdraw(key, [&](const Request& it) { return it.ticket == ticket; });
  if (request == nullptr) return false;
  reports_.withdraw();
  delete request;
  return true;
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

}  // namespace aiocomms
