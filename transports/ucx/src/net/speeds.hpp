// How quickly this host's processor and kernel move bytes from one process to another: which of two ways is better
// differs between processors by a factor of three, so it is measured, and not known by their names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace aiocomms {

// The two ways of `kMeasuredBytes`, in ns.
struct Speeds {
  std::uint64_t read = 0;    // the kernel reads them where they lie; 0: it may not
  std::uint64_t copied = 0;  // they are copied into a slot, and out of it
};

constexpr std::size_t kMeasuredBytes = 128 * 1024;
// Of each way. That is 3 MiB to be copied in all: below 1 ms at 4 GB/s.
constexpr int kMeasurements = 8;

// What is measured, and the clock (ns) to do it by.
struct Measured {
  std::function<bool()> read;  // false: the kernel does not allow it
  std::function<void()> copy;
  std::function<std::uint64_t()> clock;
};

// The shortest time of each way: on a busy machine some take longer, and on none they take less.
Speeds shortest_of(const Measured& measured);

// The same of this host, in memory of this process: the kernel looks up each page as it does that of another process.
// What the lines of another core cost is left out. Both ways fetch them once, and then copy what is near.
Speeds measure_speeds();

}  // namespace aiocomms
