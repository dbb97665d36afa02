#include "net/control.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "net/clock.hpp"

namespace aiocomms {
namespace {

enum Kind : std::uint32_t { kDoorbell, kFrame, kFarewell, kAsk, kAlive };

struct Prefix {
  std::uint32_t bytes;  // of the payload
  std::uint32_t kind;
};

constexpr std::uint32_t kLongest = 1 << 20;  // A frame is a sentence or a key, never a tensor.
constexpr std::uint32_t kBell = ~std::uint32_t{0};

int checked(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

void watch(int epoll, int fd, std::uint32_t what, int how = EPOLL_CTL_ADD, std::uint32_t events = EPOLLIN) {
  epoll_event event{};
  event.events = events;
  event.data.u32 = what;
  checked(epoll_ctl(epoll, how, fd, &event), "epoll_ctl");
}

}  // namespace

Control::Control(int worker_fd, Heard heard) : heard_(std::move(heard)) {
  try {
    near_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    all_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    bell_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
    watch(near_, bell_, kBell);
    watch(all_, near_, 0);
    watch(all_, worker_fd, 0);
  } catch (...) {
    shut();
    throw;
  }
}

Control::~Control() { shut(); }

void Control::shut() noexcept {
  std::lock_guard lock(mutex_);
  for (Link& link : links_) {
    if (link.fd >= 0) close(std::exchange(link.fd, -1));
  }
  for (int* fd : {&near_, &all_, &bell_}) {
    if (*fd >= 0) close(std::exchange(*fd, -1));
  }
}

void Control::make_room(std::size_t peers) {
  std::lock_guard lock(mutex_);
  while (links_.size() < peers) links_.emplace_back();
}

void Control::connect(int peer, Socket socket) {
  std::lock_guard lock(mutex_);
  Link& link = links_.at(static_cast<std::size_t>(peer));
  if (socket.get() >= 0) watch(near_, socket.get(), static_cast<std::uint32_t>(peer));
  link.fd = socket.release();
  link.heard = now_ns();
}

// The thread that listens to the socket closes it when it reads the end.
void Control::part(int peer, bool in_order) {
  std::lock_guard lock(mutex_);
  Link& link = links_.at(static_cast<std::size_t>(peer));
  if (link.fd < 0) return;
  if (in_order) post(peer, kFarewell, {});
  link.parted = true;
  shutdown(link.fd, SHUT_RDWR);
}

void Control::wake() {
  std::uint64_t one = 1;
  [[maybe_unused]] ssize_t written = write(bell_, &one, sizeof one);
}

void Control::ring(int peer) {
  std::lock_guard lock(mutex_);
  // One unread doorbell is enough.
  if (links_[peer].out.empty()) post(peer, kDoorbell, {});
}

bool Control::send(int peer, const std::string& frame) {
  std::lock_guard lock(mutex_);
  if (links_.at(static_cast<std::size_t>(peer)).fd < 0) return false;
  post(peer, kFrame, frame);
  return true;
}

std::vector<std::uint64_t> Control::signs(const std::vector<int>& peers) {
  std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> heard;
  heard.reserve(peers.size());
  for (int peer : peers) {
    const Link& link = links_.at(static_cast<std::size_t>(peer));
    heard.push_back(link.fd < 0 ? ~std::uint64_t{0} : link.heard);
    // One unsent question is enough.
    if (link.out.empty()) post(peer, kAsk, {});
  }
  return heard;
}

void Control::farewell(int peer) {
  std::lock_guard lock(mutex_);
  post(peer, kFarewell, {});
}

void Control::post(int peer, std::uint32_t kind, const std::string& payload) {
  Link& link = links_[peer];
  if (link.fd < 0) return;
  Prefix prefix{static_cast<std::uint32_t>(payload.size()), kind};
  // The memory is reserved first, so that a failure leaves no part of a frame in the queue.
  link.out.reserve(link.out.size() + sizeof prefix + payload.size());
  link.out.append(reinterpret_cast<const char*>(&prefix), sizeof prefix).append(payload);
  flush(link);
  if (link.blocked) listen(peer, true);
}

void Control::flush(Link& link) {
  link.blocked = false;
  while (!link.out.empty()) {
    ssize_t sent = ::send(link.fd, link.out.data(), link.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) {
      link.blocked = errno == EAGAIN;
      if (!link.blocked) link.out.clear();  // The connection is lost. The next read reports it.
      return;
    }
    link.out.erase(0, static_cast<std::size_t>(sent));
  }
}

void Control::listen(int peer, bool more) {
  watch(near_, links_[peer].fd, static_cast<std::uint32_t>(peer), EPOLL_CTL_MOD, more ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Control::wait(int timeout_ms, bool worker) {
  epoll_event first{};
  if (worker && epoll_wait(all_, &first, 1, timeout_ms) <= 0) return;
  std::array<epoll_event, 16> events;
  int count = epoll_wait(near_, events.data(), static_cast<int>(events.size()), worker ? 0 : timeout_ms);
  for (int i = 0; i < count; ++i) {
    std::uint32_t what = events[i].data.u32;
    if (what == kBell) {
      std::uint64_t rings;
      [[maybe_unused]] ssize_t got = read(bell_, &rings, sizeof rings);
      continue;
    }
    int peer = static_cast<int>(what);
    if (events[i].events & EPOLLOUT) {
      std::lock_guard lock(mutex_);
      flush(links_[peer]);
      if (!links_[peer].blocked) listen(peer, false);
    }
    if (events[i].events & ~EPOLLOUT) hear(peer);
  }
}

void Control::hear(int peer) {
  Link& link = link_to(peer);  // From here on only this thread changes the link's descriptor.
  std::array<char, 16384> buffer;
  ssize_t got = recv(link.fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return lose(peer);
  {
    std::lock_guard lock(mutex_);
    link.heard = now_ns();
  }
  link.in.append(buffer.data(), static_cast<std::size_t>(got));
  std::size_t at = 0;
  while (link.in.size() - at >= sizeof(Prefix)) {
    Prefix prefix;
    std::memcpy(&prefix, link.in.data() + at, sizeof prefix);
    if (prefix.bytes > kLongest || prefix.kind > kAlive) return lose(peer);  // The peer does not follow the protocol.
    if (link.in.size() - at - sizeof prefix < prefix.bytes) break;
    std::string payload = link.in.substr(at + sizeof prefix, prefix.bytes);
    at += sizeof prefix + prefix.bytes;
    if (prefix.kind == kFarewell) {
      std::lock_guard lock(mutex_);
      link.parted = true;
    }
    if (prefix.kind == kFrame) heard_.frame(peer, std::move(payload));
    if (prefix.kind == kAsk) {
      std::lock_guard lock(mutex_);
      if (link.out.empty()) post(peer, kAlive, {});  // Otherwise the bytes that wait in `out` are a sign of life too.
    }
  }
  link.in.erase(0, at);
}

void Control::lose(int peer) {
  bool parted;
  {
    std::lock_guard lock(mutex_);
    Link& link = links_[peer];
    parted = link.parted;
    epoll_ctl(near_, EPOLL_CTL_DEL, link.fd, nullptr);
    close(link.fd);
    link.fd = -1;
    link.in = link.out = {};
  }
  heard_.lost(peer, parted);
}

}  // namespace aiocomms
