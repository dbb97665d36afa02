// What ranks tell each other beside UCX: a stream socket to each peer, whose end is the peer's end.
//
// It carries doorbells (look at the shared memory), frames, and the farewell. The kernel closes it when a process dies,
// however that happens, so no death goes unnoticed.
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
    std::function<void(int peer, bool parted)> lost;  // parted: after its farewell
  };

  // worker_fd: see Worker::event_fd().
  Control(int worker_fd, Heard heard);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // ---------------------------------------------------------------------------------------------- from any thread
  // Peers have the numbers below.
  void make_room(std::size_t peers);
  // socket: the connection to the peer, taken over; -1: it is this rank itself.
  void connect(int peer, Socket socket);
  // Part from a peer, which sees it as a rank's end, in order or not. Whoever listens hears that it has parted.
  void part(int peer, bool in_order);
  void ring(int peer);                            // let a peer's thread look
  bool send(int peer, const std::string& frame);  // false: the peer is gone
  // When each of some peers was last heard of, ns of now_ns(), or the end of time where it is known to be gone; they
  // are asked for another sign of life, which their engines' own threads give, whatever their loops and interpreters
  // do.
  std::vector<std::uint64_t> signs(const std::vector<int>& peers);
  void farewell(int peer);  // what ends now ends in order
  void shut() noexcept;     // all connections; the peers are gone then. No thread waits any more.
  void wake();              // let this rank's own thread look

  // ------------------------------------------------------------------------------------- on the engine's thread
  // Wait for any of it, and, if `worker` says so, for UCX too; hand on what was heard.
  void wait(int timeout_ms, bool worker);

 private:
  struct Link {
    int fd = -1;
    bool parted = false;      // it has said farewell
    bool blocked = false;     // the rest of `out` waits for room
    std::uint64_t heard = 0;  // when anything came last
    std::string in;           // the beginning of a frame
    std::string out;          // what the socket did not take
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
  std::deque<Link> links_;  // whose place stays; to find one needs the mutex
  Heard heard_;
  int near_ = -1;  // epoll: doorbell and sockets
  int all_ = -1;   // epoll: those, and UCX
  int bell_ = -1;  // eventfd
};

}  // namespace aiocomms
