#include "engine/messages.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "engine/lanes.hpp"

namespace aiocomms {
namespace {

// Messages within a host are offered from this size on. Below it, two copies are faster than a system call and an
// answer.
constexpr std::size_t kOfferedFrom = 32 * 1024;
// Messages to other hosts are copied up to this size, the longest segment of a collective. The copy takes less time
// than a vouch.
constexpr std::size_t kCopiedTo = 64 * 1024;

}  // namespace

// A message on its way to another host. UCX may read it long after the call, at any size, while the connection is being
// made or the socket is full. By then the communicator may be lost, and the program may have overwritten the data.
class Sender::Outgoing final : public Pending {
 public:
  Outgoing(Worker& worker, Group& group, int rank, Pending* pending)
      : worker_(worker), group_(group), rank_(rank), order_(worker.sent(group.peers[rank])), pending_(pending) {}
  const void* copy(const void* data, std::size_t bytes) {
    copy_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::memcpy(copy_.get(), data, bytes);
    return copy_.get();
  }
  void finished(ucs_status_t status) noexcept override {
    if (status == UCS_OK) vouch();
    pending_->finished(status);
    delete this;
  }
  // UCX has read the whole message. If the communicator is not lost yet, the sent data are valid.
  void vouch() {
    if (!copy_ && !group_.lost) group_.tell(worker_, rank_, kVouch, order_);
  }

 private:
  Worker& worker_;
  Group& group_;
  const int rank_;
  const std::uint32_t order_;
  Pending* pending_;
  std::unique_ptr<std::byte[]> copy_;  // for a small message
};

// Large messages within a host are offered, because UCX would copy them at once, on the loop. A user's message on a
// device is never read, copied or offered here. Only UCX moves it, through its descriptor.
ucs_status_t Sender::send(Group& group, int rank, Header header, const void* data, Pending* pending) {
  const int peer = group.peers[rank];
  const Memory memory = header.channel < kUserChannels ? Memory::kUsers : Memory::kOwn;
  const bool device = worker_.device() && memory == Memory::kUsers;
  if (!device && header.bytes >= kOfferedFrom && peers_[peer].readable != 0) {
    return offers_.offer(group, rank, header, data, pending);
  }
  if (peers_[peer].pid != 0 || header.bytes == 0) {
    const ucs_status_t status = worker_.send(peer, header, data, memory, pending);
    group.rouse(rank);
    return status;
  }
  return send_abroad(group, rank, header, data, device, pending);
}

ucs_status_t Sender::send_abroad(Group& group, int rank, Header header, const void* data, bool device,
                                 Pending* pending) {
  const Memory memory = header.channel < kUserChannels ? Memory::kUsers : Memory::kOwn;
  auto outgoing = std::make_unique<Outgoing>(worker_, group, rank, pending);
  if (device || header.bytes > kCopiedTo) {
    header.dtype |= kVouched;
  } else {
    data = outgoing->copy(data, header.bytes);
  }
  const ucs_status_t status = worker_.send(group.peers[rank], header, data, memory, outgoing.get());
  if (status == UCS_OK) outgoing->vouch();
  if (status == UCS_INPROGRESS) static_cast<void>(outgoing.release());  // UCX reports the end to it.
  return status;
}

// ----------------------------------------------------------------------------------------------- messages of schedules

namespace {

// A send of a schedule.
class ScheduleSend final : public Pending, public Awaited {
 public:
  ScheduleSend(Group& group, Events& events, Event& event, LaneCalls* of_lane)
      : Awaited(group, event, of_lane), events_(events) {
    ++whose.users;
    if (lane) ++lane->under_way;
  }
  ~ScheduleSend() override {
    --whose.users;
    if (lane) --lane->under_way;
  }
  void finished(ucs_status_t status) noexcept override {
    if (!whose.lost && (status == UCS_OK || (lane && lane->given_up))) return events_.push(this);
    delete this;
  }

 private:
  Events& events_;
};

// A receive of a lane's schedule. Its message may be of another collective, or never arrive.
class LaneReceive final : public Request, public Awaited {
 public:
  LaneReceive(Schedules& schedules, int source, LaneCalls& of_lane, Event& event)
      : Request(of_lane.group), Awaited(of_lane.group, event, &of_lane), schedules_(schedules), source_(source) {
    lane->awaited.push_back(source);
    ++lane->under_way;
  }
  ~LaneReceive() override {
    lane->awaited.erase(std::ranges::find(lane->awaited, source_));
    --lane->under_way;
  }
  void finished(ucs_status_t result) noexcept override {
    const bool well = result == UCS_OK && status == Status::kDone;
    if (!group.lost && (well || lane->given_up)) return schedules_.events().push(this);
    delete this;
  }
  void end(Status how, std::uint64_t, std::uint64_t) noexcept override {
    if (lane->given_up) return schedules_.events().push(this);  // The lane ignores its outcome.
    schedules_.attempt(group, [&] {
      if (how == Status::kDtype) lanes_of(group).report_mismatch(*lane, source_);
      if (how == Status::kClosed) lanes_of(group).report_left(*lane, source_);
    });
    delete this;
  }
  void drop() noexcept override { delete this; }
  bool ends_when_peer_closes() const override { return true; }

 private:
  Schedules& schedules_;
  const int source_;
};

}  // namespace

Wire::Wire(Sender& sender, Inbox& inbox, Schedules& schedules, Group& group, std::vector<int> ranks, LaneCalls* lane)
    : sender_(sender),
      inbox_(inbox),
      schedules_(schedules),
      group_(group),
      lane_(lane),
      ranks_(std::move(ranks)),
      me_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), group.rank) - ranks_.begin())) {}

void Wire::send(int dst, const void* data, std::size_t bytes, Event& event) noexcept {
  schedules_.attempt(group_, [&] { start_send(dst, data, bytes, event); });
}

void Wire::start_send(int dst, const void* data, std::size_t bytes, Event& event) {
  const int rank = ranks_[dst];
  if (lane_ && group_.left[rank]) return lanes_of(group_).report_left(*lane_, rank);
  Header header = lane_ ? group_.header_to(rank, kLane, static_cast<std::int64_t>(lane_->number))
                        : group_.header_to(rank, kSchedule, static_cast<std::int64_t>(group_.collectives));
  header.bytes = bytes;
  header.value = (lane_ ? lane_->calls : group_.schedules).front().fingerprint;
  auto pending = std::make_unique<ScheduleSend>(group_, schedules_.events(), event, lane_);
  const ucs_status_t status = sender_.send(group_, rank, header, data, pending.get());
  if (status == UCS_INPROGRESS) {
    static_cast<void>(pending.release());  // UCX reports the end to it.
    return;
  }
  pending.reset();
  if (status == UCS_OK) event.complete();
  // Otherwise the peer is lost, and this schedule does not continue. The control connection reports the loss with the
  // peer's name.
}

void Wire::recv(int src, void* data, std::size_t bytes, Event& event) noexcept {
  schedules_.attempt(group_, [&] { start_recv(src, data, bytes, event); });
}

void Wire::start_recv(int src, void* data, std::size_t bytes, Event& event) {
  const auto source = static_cast<std::uint16_t>(ranks_[src]);
  std::unique_ptr<Request> receive;
  Key key(source, kSchedule, static_cast<std::int64_t>(group_.collectives));
  if (lane_) {
    receive = std::make_unique<LaneReceive>(schedules_, source, *lane_, event);
    receive->fingerprint = lane_->calls.front().fingerprint;
    key = Key(source, kLane, static_cast<std::int64_t>(lane_->number));
  } else {
    receive = std::make_unique<ScheduleReceive>(group_, schedules_.events(), event);
  }
  receive->data = data;
  receive->bytes = bytes;
  inbox_.post(receive.get(), key);
  static_cast<void>(receive.release());  // The receive waits, or has ended and deleted itself.
}

}  // namespace aiocomms
