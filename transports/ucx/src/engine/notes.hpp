// Messages between the Python sides of ranks that must not wait for this rank's loop, which may be busy. A Python
// thread sleeps until there are notes. The engine's own thread receives them and never takes the interpreter's lock.
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

// The first byte of a frame with a note.
inline constexpr char kNote = 'N';

// All methods except fileno run under the engine's lock.
class Notes {
 public:
  using Note = std::pair<int, std::string>;  // the peer, and its frame

  Notes() : fd_(eventfd(0, EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~Notes() { close(); }
  Notes(const Notes&) = delete;
  Notes& operator=(const Notes&) = delete;

  // An eventfd. A read of it waits until there are notes.
  int fileno() const { return fd_; }
  // Notes are optional. Too long notes are dropped, and so are new notes while the queue is full.
  void add(int peer, std::string frame) {
    constexpr std::size_t kMost = 4096;
    constexpr std::size_t kLongest = 4096;  // bytes
    if (fd_ < 0 || notes_.size() == kMost || frame.size() > kLongest) return;
    notes_.emplace_back(peer, std::move(frame));
    std::uint64_t one = 1;
    [[maybe_unused]] ssize_t written = write(fd_, &one, sizeof one);
  }
  std::vector<Note> take() { return std::exchange(notes_, {}); }
  void close() {  // Idempotent.
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
  std::vector<Note> notes_;
};

}  // namespace aiocomms
