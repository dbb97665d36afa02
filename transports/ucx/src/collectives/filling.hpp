// How a slot is filled that other ranks read: by plain stores, or by streaming ones, which go past the caches.
//
// Which takes less depends on where the cores are. Where ranks have a cache in common, plain stores cost least, and
// readers find the bytes there. Where they have none (two dies, two sockets), a line that a reader has is taken back
// from it before it is written, one by one; streaming stores take nothing back, and readers fetch the bytes from
// memory, as they would anyway. The cores of a virtual machine move from one case to the other within seconds, so no
// name of a processor says which it is: the writer of a slot now and then measures what it costs to fill, its readers
// what it costs to read, and the next ones are filled as costs less in all. (docs/benchmarks/cpu.md has figures.)
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "collectives/span.hpp"
#include "net/clock.hpp"

namespace aiocomms {

#if defined(__SSE2__)
inline constexpr bool kStreams = true;

// Copy past the caches. The fence makes the bytes visible before any later store of this thread.
inline void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t head = std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  std::size_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const auto in = reinterpret_cast<const __m128i*>(from + done);
    const auto out = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                  d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to + done, from + done, bytes - done);
  _mm_sfence();
}
#else
inline constexpr bool kStreams = false;
inline void stream(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
#endif

// How one slot was filled, as its readers are told.
struct Filled {
  bool streamed;
  bool timed;  // its readers measure, too
};

// The mean costs of both ways, in ns for 1 MiB; 0: not measured.
class Costs {
 public:
  void note(bool streamed, std::size_t bytes, std::uint64_t ns) {
    std::atomic<std::uint32_t>& mean = of_[streamed];
    const std::uint64_t before = mean.load(std::memory_order_relaxed),
                        now = std::max<std::uint64_t>(1, (ns << 20) / bytes);
    // A copy that was interrupted counts for four times the mean at most.
    const std::uint64_t next = before == 0 ? now : (3 * before + std::min(now, 4 * before)) / 4;
    mean.store(static_cast<std::uint32_t>(std::min<std::uint64_t>(next, kMost)), std::memory_order_relaxed);
  }
  std::uint64_t of(bool streamed) const { return of_[streamed].load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t kMost = 1 << 30;

  std::array<std::atomic<std::uint32_t>, 2> of_{};
};

// Of fewer bytes, two looks at the clock take too large a part.
inline constexpr std::size_t kMeasurable = 16 * 1024;

// Measures a copy into a slot or out of it, from its construction to its destruction.
class Timing {
 public:
  Timing(Costs& costs, Filled how, std::size_t bytes)
      : costs_(costs), how_(how), bytes_(bytes), began_(is_timed() ? now_ns() : 0) {}
  Timing(const Timing&) = delete;
  Timing& operator=(const Timing&) = delete;
  ~Timing() {
    if (is_timed()) costs_.note(how_.streamed, bytes_, now_ns() - began_);
  }

 private:
  bool is_timed() const { return bytes_ >= kMeasurable && how_.timed; }

  Costs& costs_;
  const Filled how_;
  const std::size_t bytes_;
  const std::uint64_t began_;
};

// The choice of one writer.
class Filling {
 public:
  // One slot of so many is measured.
  static constexpr std::uint32_t kMeasured = 8;
  // A burst of each cycle is filled in the other way; the first begins when all pages exist. Only its second half is
  // measured, for the cost of a slot depends on how it was filled the last time.
  static constexpr std::uint32_t kCycle = 1024, kBurst = 16, kFirst = 64;

  // The next slot's. reads: std::uint64_t (bool streamed): what its slowest reader has measured.
  template <typename Reads>
  Filled next(const Reads& reads) {
    if (!kStreams) return {};
    const std::uint32_t at = (count_++ + kCycle - kFirst) % kCycle;
    if (at < kBurst) return {!streams_, at >= kBurst / 2};
    if (at % kMeasured != 0) return {streams_, false};
    const auto cost = [&](bool streamed) { return writes.of(streamed) + reads(streamed); };
    streams_ = writes.of(true) != 0 && cost(true) < cost(false);
    return {streams_, true};
  }

  // Copy into a slot.
  void fill(Filled how, std::byte* to, const std::byte* from, std::size_t bytes) {
    const Timing timing(writes, how, bytes);
    if (how.streamed) {
      stream(to, from, bytes);
    } else if (bytes) {
      std::memcpy(to, from, bytes);
    }
  }

  Costs writes;

 private:
  std::uint32_t count_ = 0;
  bool streams_ = false;
};

}  // namespace aiocomms
