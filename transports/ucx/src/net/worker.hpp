// Wraps UCX: one context, one worker, and one endpoint for each peer that this rank sends to.
//
// All methods run under the engine's lock.
//
// Messages are UCX active messages with the engine's own header, and the engine matches them (matching.hpp). UCX's tag
// matching cannot give a message's dtype before the payload is touched, nor confirm at once that a receive is
// withdrawn.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "net/network.hpp"

namespace aiocomms {

// A failed call of UCX without a pending request, such as opening or mapping.
struct UcxError : std::runtime_error {
  UcxError(const char* call, ucs_status_t status);
};

class Worker final : public Network {
 public:
  // Gets each message that arrives, with its header. A small payload is valid in this call only. A large message has a
  // descriptor instead, for fetch() or release(). UCX calls this function, so no exception may leave it.
  using Arrived = std::function<void(int peer, const Header&, const void* payload, void* descriptor)>;

  // Gets a peer that has sent an invalid message. This rank takes nothing more from that peer. No exception may leave
  // this function either.
  using Misled = std::function<void(int peer)>;

  // options: UCX settings, such as {"NET_DEVICES", "eth0"}. The environment's UCX_ variables win. device: UCX's type of
  // the users' memory, if only UCX may touch it. UcxError: this UCX does not support that type.
  Worker(const std::vector<std::pair<std::string, std::string>>& options, std::optional<ucs_memory_type_t> device,
         Arrived arrived, Misled misled);
  ~Worker() override;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::string address() const;
  // Whether users' memory is a device's. The engine then follows no pointer to it, and fetches each message for it.
  bool device() const { return device_.has_value(); }
  int event_fd() const;
  bool progress() { return ucp_worker_progress(worker_) != 0; }
  // True: the descriptor becomes readable at the next event. False: there is an event now.
  bool arm() { return ucp_worker_arm(worker_) == UCS_OK; }

  // Every peer has a number below `peers`. Nothing is sent to a peer or taken from it before introduce().
  void make_room(std::size_t peers);
  // watched: the peer is on another host, and UCX watches the connection. Within a host, watching would disable shared
  // memory. name: the peer's number of this worker.
  void introduce(int peer, std::string address, bool watched, Cookies cookies, std::uint32_t name);
  // Makes the peer's endpoint now, instead of at the first message.
  void connect(int peer) { endpoint(peer); }
  void refuse(int peer) override;
  // The peer is lost. UCX never finishes its calls, so they do not count as unfinished any more.
  void write_off(int peer);
  // Ends all traffic with a peer.
  //
  // flush: the endpoint closes after the peer has taken all that was sent. If the peer does not take it, the close
  // lasts until the worker's end. Otherwise UCX drops the endpoint at once, except for a peer of this host. That
  // endpoint stays until the worker's end.
  void forget(int peer, bool flush);
  bool closing(int peer) const { return peers_[peer].closing; }
  // Whether UCX holds nothing of the peer any more.
  bool closed(int peer) const { return peers_[peer].endpoint == nullptr && !closing(peer); }

  // The number of unfinished calls whose progress does not wake a sleeping thread: unsent messages, and all calls on a
  // device's memory.
  int unfinished() const { return unfinished_; }
  // The number of messages that were sent to a peer.
  std::uint32_t sent(int peer) const { return peers_[peer].sent; }

  ucs_status_t send(int peer, Header header, const void* data, Memory memory, Pending* pending);
  ucs_status_t tell(int peer, Header header, const void* what, std::size_t bytes, Pending* pending) override;
  ucs_status_t fetch(void* descriptor, void* data, std::size_t bytes, Memory memory, Pending* pending) override;
  ucs_status_t fetch_beginning(void* descriptor, Beginning* beginning, Pending* pending) override;
  void release(void* descriptor) override;
  ucs_status_t put(int peer, ucp_rkey_h rkey, std::uint64_t address, const void* data, std::size_t bytes,
                   Pending* pending) override;
  ucs_status_t get(int peer, ucp_rkey_h rkey, std::uint64_t address, void* data, std::size_t bytes,
                   Pending* pending) override;
  ucs_status_t flush(int peer, Pending* pending) override;

  ucp_mem_h map(void* data, std::size_t bytes) override;
  void unmap(ucp_mem_h memory) override { ucp_mem_unmap(context_, memory); }
  std::string pack(ucp_mem_h memory) override;
  ucp_rkey_h unpack(int peer, const std::string& rkey) override;
  void destroy(ucp_rkey_h rkey) override { ucp_rkey_destroy(rkey); }

  // Calls forget() for all remaining peers, and makes progress until they are closed or `patience` is over.
  void disconnect(const std::function<bool()>& patience);

 private:
  struct Peer final : Pending {
    void finished(ucs_status_t) noexcept override { closing = false; }

    std::string address;
    bool watched = false;
    ucp_ep_h endpoint = nullptr;
    // The endpoint is closing. If it does not close in time, it calls back when the worker is destroyed.
    bool closing = false;
    std::uint32_t sent = 0;
    std::uint32_t name = 0;
    Cookies cookies;
    bool heard = false;                           // messages from it are taken
    bool failed = true;                           // nothing is sent to it
    ucs_status_t why = UCS_ERR_CONNECTION_RESET;  // the reason for `failed`
    int unfinished = 0;
    bool written_off = false;
    bool forgotten = false;
  };

  // The engine's data in UCX's request of a counted call.
  struct Counted {
    Pending* pending;
    Peer* peer;  // null: the call is about a message that has arrived
  };

  static ucs_status_t on_message(void* arg, const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                                 const ucp_am_recv_param_t* param);
  // large: `data` is a descriptor.
  ucs_status_t receive(const void* header, std::size_t header_bytes, void* data, std::size_t bytes, bool large);
  ucp_ep_h endpoint(Peer& peer);
  ucp_ep_h endpoint(int peer) { return endpoint(peers_[peer]); }

  static void sign(Header& header, const Peer& to);
  ucs_status_t send(Peer& to, const void* header, std::size_t header_bytes, const void* data, std::size_t bytes,
                    Memory memory, Pending* pending);
  ucp_request_param_t param(Memory memory, Pending* pending) const;
  ucs_status_t fetch(void* descriptor, void* data, std::size_t count, ucp_request_param_t param, Pending* pending);
  ucp_request_param_t counted(ucp_request_param_t param);
  ucs_status_t count(ucs_status_ptr_t request, Pending* pending, Peer* peer);
  static void on_counted(void* request, ucs_status_t status, void* worker);
  static void on_counted_fetch(void* request, ucs_status_t status, std::size_t, void* worker);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_datatype_t beginnings_ = 0;
  std::optional<ucs_memory_type_t> device_;
  int unfinished_ = 0;
  std::deque<Peer> peers_;  // A deque, because UCX keeps pointers to the peers.
  Arrived arrived_;
  Misled misled_;
  void* arriving_ = nullptr;  // the descriptor that `arrived_` was called with, until it is released
};

}  // namespace aiocomms
