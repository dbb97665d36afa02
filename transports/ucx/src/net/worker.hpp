// UCX behind one class: a context, a worker, and an endpoint for each peer that is spoken to.
//
// All methods are called under the engine's lock. Messages are UCX active messages with a header of ours, and matched
// by us (matching.hpp), for what UCX's tag matching cannot say: the dtype of a message before its payload is touched,
// and that a receive has been withdrawn, at once.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
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
  Worker(int peers, const std::vector<std::pair<std::string, std::string>>& options,
         std::optional<ucs_memory_type_t> device, Arrived arrived, Misled misled);
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

  // watched: a peer on another host, whose connection UCX watches; within a host that would turn shared memory off.
  void introduce(int peer, std::string address, bool watched, Cookies cookies);
  // Make its endpoint, which is otherwise made at the first word to it.
  void connect(int peer) { endpoint(peer); }
  void refuse(int peer) override;

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

  // Flush and close every endpoint, as far as that succeeds while `patience` says so; a broken engine skips this.
  void disconnect(const std::function<bool()>& patience);

 private:
  struct Peer {
    std::string address;
    bool watched = false;
    ucp_ep_h endpoint = nullptr;
    std::uint32_t sent = 0;
    Cookies cookies;
    bool failed = false;
    bool refused = false;
    ucs_status_t why = UCS_ERR_CONNECTION_RESET;  // if it has failed
  };

  static ucs_status_t on_message(void* arg, const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                                 const ucp_am_recv_param_t* param);
  ucp_ep_h endpoint(int peer);

  ucs_status_t send(int peer, const void* header, std::size_t header_bytes, const void* data, std::size_t bytes,
                    Memory memory, Pending* pending);
  ucp_request_param_t param(Memory memory, Pending* pending) const;
  ucs_status_t fetch(void* descriptor, void* data, std::size_t count, ucp_request_param_t param, Pending* pending);
  ucp_request_param_t counted(ucp_request_param_t param);
  ucs_status_t count(ucs_status_ptr_t request, Pending* pending);
  static void on_counted(void* request, ucs_status_t status, void* worker);
  static void on_counted_fetch(void* request, ucs_status_t status, std::size_t, void* worker);

  struct Closing : Pending {
    int open = 0;
    void finished(ucs_status_t) noexcept override { --open; }
  };

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_datatype_t beginnings_ = 0;
  std::optional<ucs_memory_type_t> device_;
  int unfinished_ = 0;
  std::vector<Peer> peers_;
  Arrived arrived_;
  Misled misled_;
  void* arriving_ = nullptr;  // the descriptor that `arrived_` is called with, unless it has been released
  Closing closing_;           // an endpoint that does not close in time calls back when the worker is destroyed
};

}  // namespace aiocomms
