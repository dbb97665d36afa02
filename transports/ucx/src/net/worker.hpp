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

namespace aiocomms {

// A call of UCX that failed where nothing is pending: opening, mapping.
struct UcxError : std::runtime_error {
  UcxError(const char* call, ucs_status_t status);
};

// What travels in front of each payload.
struct Header {
  std::uint32_t group;   // the receiver's number of the communicator
  std::uint32_t order;   // counts the messages from this peer to that, from 0; Worker sets it
  std::uint16_t source;  // rank in the communicator
  std::uint8_t channel;  // whose message: a channel of aiocomms.ops, or one of the engine's own, below
  std::uint8_t dtype;
  std::uint32_t peer;   // the sender's number in the engine's family
  std::int64_t tag;     // the user's, or the number of a collective, or of a window
  std::uint64_t bytes;  // of the payload
  std::uint64_t mark;   // a collective's fingerprint
  // What only this pair of ranks knows; Worker sets it, and takes no message without it. UCX lets anybody send who has
  // the worker's address.
  std::uint64_t cookie = 0;
};

enum Channel : std::uint8_t { kUserChannels = 16, kSchedule = 16, kSignal, kAtomic, kAnswer, kPour, kVouch };

// In Header::dtype: the payload is an Offer in place of the data.
constexpr std::uint8_t kOffered = 0x80;
// There, too: the payload counts once its sender has vouched for it, by a message on kVouch with its order as the tag.
constexpr std::uint8_t kVouched = 0x40;

// Where a large message lies, for a receiver on the same host, which copies it from there and answers.
struct Offer {
  std::uint64_t address;
  std::uint64_t number;  // the sender's, for the answer
};

// What the owner of a window is asked to do with an element of it; the answer is what was there before.
struct Atomic {
  std::uint64_t offset, a, b;
  std::uint32_t bytes, swap;
  std::uint64_t number;
};

// What stands in each message to a peer, and what has to stand in each message from it.
struct Cookies {
  std::uint64_t ours = 0, theirs = 0;
};

// A call that UCX has not finished, and whoever waits for it. The memory it names must stay until `finished`.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void finished(ucs_status_t status) = 0;
};

// Whose memory a call is about: the engine's own, or a user's tensor, which may lie on a device (Worker::device()).
enum class Memory { kOwn, kUsers };

class Worker {
 public:
  // Given each message that arrives: its header, and its payload, valid in this call only; or, for a large one, no
  // payload but a descriptor, for fetch() or drop().
  using Arrived = std::function<void(int peer, const Header&, const void* payload, void* descriptor)>;

  // Told of a peer whose message makes no sense; nothing is taken from it any more.
  using Misled = std::function<void(int peer)>;

  // options: UCX settings, such as {"NET_DEVICES", "eth0"}; the environment's UCX_ variables win.
  // device: UCX's type of the users' memory, if only UCX may touch it; UcxError: this UCX cannot.
  Worker(int peers, const std::vector<std::pair<std::string, std::string>>& options,
         std::optional<ucs_memory_type_t> device, Arrived arrived, Misled misled);
  ~Worker();
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
  // A peer has sent what makes no sense.
  void refuse(int peer);

  // How many messages UCX has not sent off yet.
  int sending() const { return sending_; }
  // How many messages were sent to a peer.
  std::uint32_t sent(int peer) const { return peers_[peer].sent; }

  // Each returns UCS_OK: done; UCS_INPROGRESS: `pending` will hear of it; or an error.
  ucs_status_t send(int peer, Header header, const void* data, Memory memory, Pending* pending);
  // Send an offer or the like, of which UCX takes a copy.
  ucs_status_t tell(int peer, Header header, const void* what, std::size_t bytes, Pending* pending);
  ucs_status_t fetch(void* descriptor, void* data, std::size_t bytes, Memory memory, Pending* pending);
  // The beginning of a message that is longer than the buffer, which must stay as long as `pending`; no device's.
  struct Beginning {
    void* data;
    std::size_t room;   // of the buffer
    std::size_t bytes;  // of the message
  };
  ucs_status_t fetch_beginning(void* descriptor, Beginning* beginning, Pending* pending);
  void drop(void* descriptor) { ucp_am_data_release(worker_, descriptor); }
  // These are about users' memory.
  ucs_status_t put(int peer, ucp_rkey_h rkey, std::uint64_t address, const void* data, std::size_t bytes, Pending*);
  ucs_status_t get(int peer, ucp_rkey_h rkey, std::uint64_t address, void* data, std::size_t bytes, Pending*);
  ucs_status_t flush(int peer, Pending* pending);

  ucp_mem_h map(void* data, std::size_t bytes);
  void unmap(ucp_mem_h memory) { ucp_mem_unmap(context_, memory); }
  std::string pack(ucp_mem_h memory);
  ucp_rkey_h unpack(int peer, const std::string& rkey);

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
  };

  static ucs_status_t on_message(void* arg, const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                                 const ucp_am_recv_param_t* param);
  ucp_ep_h endpoint(int peer);

  ucs_status_t send(int peer, const void* header, std::size_t header_bytes, const void* data, std::size_t bytes,
                    Memory memory, Pending* pending);
  ucp_request_param_t param(Memory memory, Pending* pending) const;
  static void on_sent(void* request, ucs_status_t status, void* worker);

  struct Closing : Pending {
    int open = 0;
    void finished(ucs_status_t) override { --open; }
  };

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_datatype_t beginnings_ = 0;
  std::optional<ucs_memory_type_t> device_;
  int sending_ = 0;
  std::vector<Peer> peers_;
  Arrived arrived_;
  Misled misled_;
  Closing closing_;  // an endpoint that does not close in time calls back when the worker is destroyed
};

}  // namespace aiocomms
