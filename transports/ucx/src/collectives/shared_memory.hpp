// Memory that the ranks of a host share, by descriptor.
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

// Ranks communicate through atomics. A lock of one process could not guard them.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// Each part begins on its own page, so that it can be mapped. On aarch64 a page has up to 64 KiB. Untouched pages take
// no memory.
constexpr std::size_t kLargestPage = 64 * 1024;
constexpr std::size_t whole_pages(std::size_t bytes) { return rounded_up(bytes, kLargestPage); }

// Maps a part of a descriptor's memory, without closing it. std::system_error: the map fails, or the memory is too
// small.
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
