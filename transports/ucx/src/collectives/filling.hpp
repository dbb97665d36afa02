// Chooses how a rank fills a slot that other ranks read: with plain stores, or with streaming stores, which bypass the
// caches.
//
// The cheaper way depends on the cores. If ranks share a cache, plain stores cost least, and readers find the bytes
// there. Without a common cache (two dies, two sockets), each line must be taken back from its reader before it is
// written. Streaming stores take nothing back. Readers then fetch the bytes from memory, as they would anyway.
//
// The cores of a virtual machine move between both cases within seconds, so a processor's name does not tell the case.
// Instead, a slot's writer sometimes measures the cost of filling, and its readers the cost of reading. The next slots
// are filled in the way with the lower total. (docs/benchmarks/cpu.md has figures.)
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
#include "net/copy.hpp"

namespace aiocomms {

#if defined(__SSE2__)
inline constexpr bool kStreams = true;

template <bool streams>
void copy_line(std::byte* to, const std::byte* from) {
  const auto in = reinterpret_cast<const __m128i*>(from);
  const auto out = reinterpret_cast<__m128i*>(to);
  const __m128i words[] = {_mm_loadu_si128(in), _mm_loadu_si128(in + 1), _mm_loadu_si128(in + 2),
                           _mm_loadu_si128(in + 3)};
  for (int i = 0; i < 4; ++i) streams ? _mm_stream_si128(out + i, words[i]) : _mm_storeu_si128(out + i, words[i]);
}

// Copies past the caches. The fence makes the bytes visible before any later store of this thread. The same loop also
// advances `second`, if there is one, by whole lines, until one of the two copies ends. Its plain stores proceed while
// the streaming stores wait for memory.
inline void stream(std::byte* to, const std::byte* from, std::size_t bytes, Copy* second) {
  const std::size_t head = std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  const Copy also = second != nullptr ? *second : Copy{};
  const std::size_t both = std::min(bytes - head, also.bytes) / kLine * kLine;
  std::size_t done = head;
  for (std::size_t at = 0; at < both; at += kLine, done += kLine) {
    copy_line<true>(to + done, from + done);
    copy_line<false>(also.to + at, also.from + at);
  }
  for (; done + kLine <= bytes; done += kLine) copy_line<true>(to + done, from + done);
  if (second != nullptr) *second = {also.to + both, also.from + both, also.bytes - both};
  std::memcpy(to + done, from + done, bytes - done);
  _mm_sfence();
}
#else
inline constexpr bool kStreams = false;
inline void stream(std::byte* to, const std::byte* from, std::size_t bytes, Copy*) { std::memcpy(to, from, bytes); }
#endif

// How a slot was filled. Its readers see this.
struct Filled {
  bool streamed;
  bool timed;  // its readers measure too
};

// The mean costs of both ways, in ns for 1 MiB. 0: not measured.
class Costs {
 public:
  void note(bool streamed, std::size_t bytes, std::uint64_t ns) {
    std::atomic<std::uint32_t>& mean = of_[streamed];
    const std::uint64_t before = mean.load(std::memory_order_relaxed),
                        now = std::max<std::uint64_t>(1, (ns << 20) / bytes);
    // An interrupted copy counts for at most four times the mean.
    const std::uint64_t next = before == 0 ? now : (3 * before + std::min(now, 4 * before)) / 4;
    mean.store(static_cast<std::uint32_t>(std::min<std::uint64_t>(next, kMost)), std::memory_order_relaxed);
  }
  std::uint64_t of(bool streamed) const { return of_[streamed].load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t kMost = 1 << 30;

  std::array<std::atomic<std::uint32_t>, 2> of_{};
};

// For fewer bytes, two readings of the clock would distort the result.
inline constexpr std::size_t kMeasurable = 16 * 1024;

// Measures a copy into or out of a slot, from construction to destruction.
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
  // One slot in this many is measured.
  static constexpr std::uint32_t kMeasured = 8;
  // A burst in each cycle is filled in the other way. The first burst begins when all pages exist. Only the second half
  // of a burst is measured, because a slot's cost depends on how it was filled before.
  static constexpr std::uint32_t kCycle = 1024, kBurst = 16, kFirst = 64;

  // Chooses for the next slot. reads: std::uint64_t (bool streamed) returns the slowest reader's measurement.
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

  // Copies into a slot. `second`, a copy within this process, advances meanwhile if the slot is streamed and not
  // measured.
  void fill(Filled how, std::byte* to, const std::byte* from, std::size_t bytes, Copy* second = nullptr) {
    const Timing timing(writes, how, bytes);
    if (how.streamed) {
      stream(to, from, bytes, how.timed ? nullptr : second);
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
