// Reads the memory of another process.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace aiocomms {

// The largest copy that is made at once. It takes about 20 µs, far less than an event loop notices on any processor.
constexpr std::size_t kCopyAtOnce = 256 * 1024;
constexpr std::size_t kPage = 4096;
// The number of bytes whose pages Copy::foresee looks up.
constexpr std::size_t kForeseen = 4 * kPage;

// Copies from the memory of process `pid`, or of this process if `pid` is 0. False: the memory is not readable any
// more.
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

// A copy in pieces.
struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;  // in the memory of process `pid`, or of this process if `pid` is 0
  std::size_t bytes = 0;            // the bytes that are left
  pid_t pid = 0;

  // Copies one piece. False: the memory is not readable any more.
  bool advance(std::size_t most) {
    const std::size_t now = std::min(bytes, most);
    if (now && !copy_from(pid, to, from, now)) return false;
    to += now;
    from += now;
    bytes -= now;
    return true;
  }

  // Makes the processor look up the first pages while it makes another copy. For scattered pages the lookup takes
  // longer than the copy.
  void foresee() const {
    for (std::size_t at = 0; at < std::min(bytes, kForeseen); at += kPage) {
      __builtin_prefetch(from + at);
      __builtin_prefetch(to + at, 1);
    }
  }
};

}  // namespace aiocomms
