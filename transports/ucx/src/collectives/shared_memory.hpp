// Memory that the ranks of a host share, by a descriptor.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <system_error>

#include "collectives/span.hpp"

namespace aiocomms {

// What ranks tell each other is in atomics that no lock of one process guards.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// The next part begins on a page of its own, which can be mapped, whatever size pages have: on aarch64 up to 64 KiB.
// Those that nobody touches take no memory.
constexpr std::size_t kLargestPage = 64 * 1024;
constexpr std::size_t whole_pages(std::size_t bytes) { return rounded_up(bytes, kLargestPage); }

// Maps a part of a descriptor's memory, and does not close it. std::system_error: it cannot, or there is less.
inline void* map_shared(int fd, std::size_t offset, std::size_t bytes) {
  const auto fail = [](const char* what) { throw std::system_error(errno, std::generic_category(), what); };
  struct stat status;
  if (fstat(fd, &status) != 0) fail("fstat");
  if (static_cast<std::size_t>(status.st_size) < offset + bytes) {
    errno = EINVAL;
    fail("shared memory of another size than expected");
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) fail("mmap");
  return memory;
}

}  // namespace aiocomms
