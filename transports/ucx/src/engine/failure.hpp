// Handles an exception that no caller can receive: in a schedule, in a callback of UCX, or on the engine's thread. The
// interrupted step may never finish. So its communicator has failed. If the communicator is unknown, all communicators
// of the engine have failed. The loop receives a notice and aborts the communicator.
//
// A failure needs no memory. An op reserves the memory for its end before it is posted (Reports::make_room). A schedule
// reserves memory before its first message (schedule_parts.hpp). Ends, drops and releases allocate nothing and are
// noexcept.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

namespace aiocomms {

class Failure {
 public:
  explicit operator bool() const { return why_[0] != 0; }
  const char* why() const { return why_.data(); }
  // Only the first reason is kept.
  void note(const char* why) noexcept {
    if (!*this) std::memcpy(why_.data(), why, std::min(std::strlen(why), why_.size() - 1));
  }
  // Called in a handler. It stores the exception's message.
  void note() noexcept {
    try {
      throw;
    } catch (const std::exception& error) {
      note(error.what());
    } catch (...) {
      note("an exception that says nothing");
    }
  }

 private:
  std::array<char, 128> why_{};
};

}  // namespace aiocomms
