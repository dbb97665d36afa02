// The control connections: one stream socket to each peer, beside UCX. The socket ends when the peer ends.
//
// It carries doorbells ("look at the shared memory"), frames and the farewell. The kernel closes the socket when a
// process dies in any way, so this rank notices every death.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "net/socket.hpp"

namespace aiocomms {

class Control {
 public:
  struct Heard {
    std::function<void(int peer, std::string frame)> frame;
    std::function<void(int peer, bool parted)> lost;  // parted: the peer has said farewell.
  };

  // worker_fd: see Worker::event_fd().
  Control(int worker_fd, Heard heard);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // --------------------------------------------------------------------------------------------------- from any thread
  // Every peer has a number below `peers`.
  void make_room(std::size_t peers);
  // Takes over the socket to the peer. The socket is -1 for this rank itself.
  void connect(int peer, Socket socket);
  // Ends the connection to a peer. The peer sees the end of a rank, in order or not. This rank's listening thread
  // reports the peer as parted.
  void part(int peer, bool in_order);
  void ring(int peer);                            // makes a peer's thread look
  bool send(int peer, const std::string& frame);  // false: the peer is lost
  // Returns when this rank last heard from each peer, in ns of now_ns(), or the maximum if the peer is lost. It also
  // asks the peers for a new sign of life. The thread of each peer's engine answers, even if that peer's event loop or
  // interpreter is busy.
  std::vector<std::uint64_t> signs(const std::vector<int>& peers);
  void farewell(int peer);  // Tells the peer that this rank's end is in order.
  void shut() noexcept;     // Closes all connections. No thread may still wait here. Each peer is then lost.
  void wake();              // makes this rank's own thread look

  // -------------------------------------------------------------------------------------------- on the engine's thread
  // Waits for events of the connections, and for UCX if `worker` is true. Then it delivers the received frames and
  // losses.
  void wait(int timeout_ms, bool worker);

 private:
  struct Link {
    int fd = -1;
    bool parted = false;      // the peer has said farewell
    bool blocked = false;     // the rest of `out` waits for room in the socket
    std::uint64_t heard = 0;  // time of the last received bytes
    std::string in;           // the beginning of a frame
    std::string out;          // bytes that the socket has not accepted
  };

  void post(int peer, std::uint32_t kind, const std::string& payload);
  void flush(Link& link);
  void listen(int peer, bool more);
  void hear(int peer);
  void lose(int peer);
  Link& link_to(int peer) {
    std::lock_guard lock(mutex_);
    return links_.at(static_cast<std::size_t>(peer));
  }

  std::mutex mutex_;
  std::deque<Link> links_;  // A link never moves, but a lookup needs the mutex.
  Heard heard_;
  int near_ = -1;  // epoll of the doorbell and the sockets
  int all_ = -1;   // epoll of near_ and UCX
  int bell_ = -1;  // eventfd
};

}  // namespace aiocomms
