// What becomes of an exception where nobody can be told of it at once: in a schedule, in a call from UCX, on the
// engine's thread. Whatever was amid the step cannot be trusted to come to its end, so the communicator whose step it
// was has failed, or, if that is not known, all of the engine's; the loop is told, and aborts it.
//
// That needs no memory. What an op needs to end is taken before it is posted (Reports::make_room), and what a schedule
// needs before its first message (schedule_parts.hpp); ends, drops and releases allocate nothing, and are noexcept.
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
  // The first one stays.
  void note(const char* why) noexcept {
    if (!*this) std::memcpy(why_.data(), why, std::min(std::strlen(why), why_.size() - 1));
  }
  // In a handler: what the exception says.
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
