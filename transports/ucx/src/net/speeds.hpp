// Measures how fast this host's processor and kernel move bytes between two processes. The ratio of the two ways
// differs between processors by a factor of three, so a processor's name cannot tell it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace aiocomms {

// The times of both ways for `kMeasuredBytes`, in ns.
struct Speeds {
  std::uint64_t read = 0;    // The kernel reads the bytes in place. 0: the kernel does not allow it.
  std::uint64_t copied = 0;  // The bytes are copied into a slot and out of it.
};

constexpr std::size_t kMeasuredBytes = 128 * 1024;
// Measurements of each way. They copy 3 MiB in all, which takes less than 1 ms at 4 GB/s.
constexpr int kMeasurements = 8;

// The two measured ways, and the clock in ns.
struct Measured {
  std::function<bool()> read;  // false: the kernel does not allow it
  std::function<void()> copy;
  std::function<std::uint64_t()> clock;
};

// Returns the shortest time of each way. A busy machine only adds time to a measurement.
Speeds shortest_of(const Measured& measured);

// Measures this host in memory of this process. The kernel looks up each page as it does for another process. The
// measurement leaves out the cost of cache lines of another core, because both ways fetch each of those lines once.
Speeds measure_speeds();

}  // namespace aiocomms
