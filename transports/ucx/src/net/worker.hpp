// UCX behind one class: a context, a worker, and an endpoint for each peer that is spoken to.
//
// All methods are called under the engine's lock. Messages are UCX active messages with a header of ours, and matched
// by us (matching.hpp), for what UCX's tag matching cannot say: the dtype of a message before its payload is touched,
// and that a receive has been withdrawn, at once.
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

// A call of UCX that failed where nothing is pending: opening, mapping.
struct UcxError : std::runtime_error {
  UcxError(const char* call, ucs_status_t status);
};

class Worker final : public Network {
 public:
  // Given each message that arrives: its header, and its payload, valid in this call only; or, for a large one, no
  // payload but a descriptor, for fetch() or release(). UCX calls it: no exception may leave it.
  using Arrived = std::function<void(int peer, const Header&, const void* payload, void* descriptor)>;

  // Told of a peer whose message makes no sense; nothing is taken from it any more. Likewise.
  using Misled = std::function<void(int peer)>;

  // options: UCX settings, such as {"NET_DEVICES", "eth0"}; the environment's UCX_ variables win.
  // device: UCX's type of the users' memory, if only UCX may touch it; UcxError: this UCX cannot.
  Worker(const std::vector<std::pair<std::string, std::string>>& options, std::optional<ucs_memory_type_t> device,
         Arrived arrived, Misled misled);
  ~Worker() override;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::string address() const;
  // Whether users' memory is a device's: no pointer to it may be followed, and messages from it have to be fetched.
  bool device() const { return device_.has_value(); }
  int event_fd() const;
  bool progress() { return ucp_worker_progress(worker_) != 0; }
  // True: the descriptor will tell of the next event. False: there is one now.
  bool arm() { return ucp_worker_arm(worker_) == UCS_OK; }

  // Peers have the numbers below. Nothing is sent to one, or taken from it, before it is introduced.
  void make_room(std::size_t peers);
  // watched: a peer on another host, whose connection UCX watches; within a host that would turn shared memory off.
  // name: the number that the peer has given this worker.
  void introduce(int peer, std::string address, bool watched, Cookies cookies, std::uint32_t name);
  // Make its endpoint, which is otherwise made at the first word to it.
  void connect(int peer) { endpoint(peer); }
  void refuse(int peer) override;
  // It is gone: what UCX has not finished for it never will be, and need not be waited for.
  void write_off(int peer);
  // Nothing more is sent to it or taken from it. flush: its endpoint is closed once all that was sent is there; if the
  // peer does not take it, that goes on until the worker's end. Else UCX drops it; but a peer of this host that it has
  // mapped stays until the worker's end.
  void forget(int peer, bool flush);
  bool closing(int peer) const { return peers_[peer].closing; }
  // Whether UCX has nothing of it any more.
  bool closed(int peer) const { return peers_[peer].endpoint == nullptr && !closing(peer); }

  // How many calls UCX has not finished of whose progress it does not tell a sleeping thread: messages that are not
  // sent off yet, and all calls on a device's memory.
  int unfinished() const { return unfinished_; }
  // How many messages were sent to a peer.
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

  // forget() all peers that are not forgotten, and make progress until they are closed, or `patience` is over.
  void disconnect(const std::function<bool()>& patience);

 private:
  struct Peer final : Pending {
    void finished(ucs_status_t) noexcept override { closing = false; }

    std::string address;
    bool watched = false;
    ucp_ep_h endpoint = nullptr;
    bool closing = false;  // the endpoint; one that does not close in time calls back when the worker is destroyed
    std::uint32_t sent = 0;
    std::uint32_t name = 0;
    Cookies cookies;
    bool heard = false;                           // what comes from it is taken
    bool failed = true;                           // nothing is sent to it
    ucs_status_t why = UCS_ERR_CONNECTION_RESET;  // if it has failed
    int unfinished = 0;
    bool written_off = false;
    bool forgotten = false;
  };

  // What stands in UCX's request of a call that is counted.
  struct Counted {
    Pending* pending;
    Peer* peer;  // null: it is about something that has come
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
  std::deque<Peer> peers_;  // where UCX finds them
  Arrived arrived_;
  Misled misled_;
  void* arriving_ = nullptr;  // the descriptor that `arrived_` is called with, unless it has been released
};

}  // namespace aiocomms
