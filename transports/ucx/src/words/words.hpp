// Words of shared memory that processes change by compare-and-swap.
//
// All operations are sequentially consistent, and order a process's other accesses to the memory, as a seqlock needs. A
// process that sees a word sees all that was written before the swap. Its later writes are not seen without that word.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "collectives/shared_memory.hpp"
#include "net/fence.hpp"

namespace aiocomms {

class Words {
 public:
  Words(int fd, std::size_t count)
      : count_(count), bytes_(count * sizeof(Line)), lines_(static_cast<Line*>(map_shared(fd, 0, bytes_))) {}
  ~Words() { munmap(lines_, bytes_); }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  std::uint64_t load(std::size_t at) const {
    fence(std::memory_order_acquire);
    const std::uint64_t word = line(at).load(std::memory_order_seq_cst);
    fence(std::memory_order_release);
    return word;
  }
  // Returns the old value.
  std::uint64_t swap(std::size_t at, std::uint64_t expected, std::uint64_t desired) {
    line(at).compare_exchange_strong(expected, desired, std::memory_order_seq_cst);
    fence(std::memory_order_release);
    return expected;
  }

 private:
  // Each word has its own cache line, because ranks poll some words while others change.
  struct alignas(64) Line {
    std::atomic<std::uint64_t> word;
  };

  std::atomic<std::uint64_t>& line(std::size_t at) const {
    if (at >= count_) throw std::out_of_range("there is no such word");
    return lines_[at].word;
  }

  std::size_t count_;
  std::size_t bytes_;
  Line* lines_;
};

}  // namespace aiocomms
