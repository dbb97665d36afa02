// What the Python sides of other ranks have said that must not wait for this rank's loop, which may be busy. A thread
// of Python's sleeps until there is something; the engine's own thread, which hears it, never asks for Python's lock.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace aiocomms {

// The first byte of a frame that is a note.
inline constexpr char kNote = 'N';

// Everything but fileno is called under the engine's lock.
class Notes {
 public:
  using Note = std::pair<int, std::string>;  // the peer, and its frame

  Notes() : fd_(eventfd(0, EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~Notes() { close(); }
  Notes(const Notes&) = delete;
  Notes& operator=(const Notes&) = delete;

  // An eventfd; to read it waits until there are notes to take.
  int fileno() const { return fd_; }
  // Nobody depends on a note: one that is too long is thrown away, and so are those that nobody takes, from some number
  // on.
  void add(int peer, std::string frame) {
    constexpr std::size_t kMost = 4096;
    constexpr std::size_t kLongest = 4096;  // bytes
    if (fd_ < 0 || notes_.size() == kMost || frame.size() > kLongest) return;
    notes_.emplace_back(peer, std::move(frame));
    std::uint64_t one = 1;
    [[maybe_unused]] ssize_t written = write(fd_, &one, sizeof one);
  }
  std::vector<Note> take() { return std::exchange(notes_, {}); }
  void close() {  // idempotent
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
  std::vector<Note> notes_;
};

}  // namespace aiocomms
