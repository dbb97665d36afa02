// Outgoing messages of users and schedules.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"
#include "engine/group.hpp"
#include "engine/inbox.hpp"
#include "engine/offers.hpp"
#include "engine/peer.hpp"
#include "engine/request.hpp"
#include "engine/schedules.hpp"
#include "net/worker.hpp"

namespace aiocomms {

class Sender {
 public:
  Sender(const std::vector<Peer>& peers, Worker& worker, Offers& offers)
      : peers_(peers), worker_(worker), offers_(offers) {}

  // header: made by Group::header_to. Returns like a call of UCX. std::bad_alloc: nothing is sent.
  ucs_status_t send(Group& group, int rank, Header header, const void* data, Pending* pending);

 private:
  class Outgoing;

  ucs_status_t send_abroad(Group& group, int rank, Header header, const void* data, bool device, Pending* pending);

  const std::vector<Peer>& peers_;
  Worker& worker_;
  Offers& offers_;
};

// The messages of a schedule between some ranks of a group, see Messages. lane: the lane of the collectives. Null: they
// are the communicator's own.
class Wire final : public Messages {
 public:
  Wire(Sender& sender, Inbox& inbox, Schedules& schedules, Group& group, std::vector<int> ranks,
       LaneCalls* lane = nullptr);
  int rank() const override { return me_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  void send(int dst, const void* data, std::size_t bytes, Event& event) noexcept override;
  void recv(int src, void* data, std::size_t bytes, Event& event) noexcept override;

 private:
  void start_send(int dst, const void* data, std::size_t bytes, Event& event);
  void start_recv(int src, void* data, std::size_t bytes, Event& event);

  Sender& sender_;
  Inbox& inbox_;
  Schedules& schedules_;
  Group& group_;
  LaneCalls* lane_;
  std::vector<int> ranks_;
  int me_;
};

}  // namespace aiocomms
