// Memory of another process, read from this one.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace aiocomms {

// What is copied without a look at anything else: some 20 µs, and far below what a loop notices on any processor.
constexpr std::size_t kCopyAtOnce = 256 * 1024;
constexpr std::size_t kPage = 4096;
// The bytes of a copy whose pages are looked up before it is made.
constexpr std::size_t kForeseen = 4 * kPage;

// Copy from a process's memory, or, if `pid` is 0, from this one's. False: it cannot be read any more.
inline bool copy_from(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (pid == 0) {
    std::memcpy(to, from, bytes);
    return true;
  }
  while (bytes > 0) {
    iovec here{to, bytes}, there{const_cast<std::byte*>(from), bytes};
    ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (got <= 0) return false;
    to += got;
    from += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

// A copy that is done in pieces.
struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;  // in the memory of process `pid`, if that is not 0
  std::size_t bytes = 0;            // that are left
  pid_t pid = 0;

  // One piece. False: it cannot be read any more.
  bool advance(std::size_t most) {
    const std::size_t now = std::min(bytes, most);
    if (now && !copy_from(pid, to, from, now)) return false;
    to += now;
    from += now;
    bytes -= now;
    return true;
  }

  // Have the processor look up the first pages while it makes another copy: pages that lie anywhere in memory take
  // longer to be found than to be copied.
  void foresee() const {
    for (std::size_t at = 0; at < std::min(bytes, kForeseen); at += kPage) {
      __builtin_prefetch(from + at);
      __builtin_prefetch(to + at, 1);
    }
  }
};

}  // namespace aiocomms
