// What the schedules of messages share: sizes at which algorithms change, scratch memory, places in trees and rings.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>

#include "collectives/schedule.hpp"

namespace aiocomms {

// A reduction up to this size goes whole from rank to rank: the number of messages in a row matters, not the bytes.
inline constexpr std::size_t kSmallReduction = 8 * 1024;

// Longer transfers are cut into pieces of this size. 64 KiB take 5 to 60 us on a fast and a slow network, well above
// the cost of a message (about 1 us), and a ring's scratch memory (2 * kWindow pieces) stays in the second-level cache.
inline constexpr std::size_t kSegment = 64 * 1024;

// Pieces under way to a neighbour at once: 256 KiB cover bandwidth times delay of 100 Gbit/s at 20 us.
inline constexpr std::size_t kWindow = 4;

// An all-gather up to this size altogether takes Bruck's ceil(log2 size) steps, though it copies each byte twice more.
inline constexpr std::size_t kSmallGathered = 64 * 1024;

// Gather and scatter use a tree for blocks up to this size, which spares the root messages and copies each block
// log2(size) times; and only among more ranks than kFlatRanks, where the root has at least twice as many messages
// without a tree.
inline constexpr std::size_t kTreeBlock = 4 * 1024;
inline constexpr int kFlatRanks = 6;

// Bruck's all-to-all sends each block log2(size) / 2 times to need only log2(size) messages: worth it for blocks much
// smaller than what a message costs, and where that is fewer than half of the pairwise messages.
inline constexpr std::size_t kBruckBlock = 256;
inline constexpr int kBruckRanks = 8;

// Pairs of a pairwise exchange under way at once: all of them in a small group, few enough not to flood a receiver.
inline constexpr std::size_t kExchanges = 8;

// Copies unless there is nothing to do; `from` may be `to`, and anything where bytes is 0.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

inline std::byte* at(void* data, std::size_t bytes) { return static_cast<std::byte*>(data) + bytes; }
inline const std::byte* at(const void* data, std::size_t bytes) { return static_cast<const std::byte*>(data) + bytes; }

// Memory of a schedule. It is not cleared: each part is written before it is read.
using Scratch = std::unique_ptr<std::byte[]>;
inline Scratch make_scratch(std::size_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

// The events of messages that are under way all at once, at most so many. Their memory is taken before the first.
class Burst {
 public:
  explicit Burst(std::size_t most) : events_(std::make_unique<Event[]>(most)) {}
  explicit Burst(int most) : Burst(static_cast<std::size_t>(most)) {}

  Event& next() { return events_[count_++]; }
  Event* begin() { return events_.get(); }
  Event* end() { return events_.get() + count_; }

 private:
  std::unique_ptr<Event[]> events_;
  std::size_t count_ = 0;
};

// The event of one message after the other. Awaiting it when there is no message under way goes on at once.
class Slot {
 public:
  Event& renew() { return event_.emplace(); }

  bool await_ready() const { return !event_ || event_->done(); }
  void await_suspend(std::coroutine_handle<> waiter) { event_->await_suspend(waiter); }
  void await_resume() { event_.reset(); }

 private:
  std::optional<Event> event_;
};

// The events of messages n, n + 1, ..., n + kWindow - 1, as far as there are any: message n's is at n % kWindow.
using Slots = std::array<Slot, kWindow>;

// The rank `distance` further on (or back) around the ring of ranks; |distance| <= size.
inline int around(int rank, int distance, int size) { return (rank + distance + size) % size; }

// A rank's place in the binomial tree over positions 0 (the root) to size - 1. Below and including position p are
// p, p + 1, ..., p + span - 1 (as far as they exist), where span is the lowest bit of p. The children are p + mask for
// each power of two mask < span.
class TreePlace {
 public:
  TreePlace(int rank, int root, int size)
      : root_(root),
        size_(size),
        position_(around(rank, -root, size)),
        span_(position_ == 0 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(size))) : position_ & -position_) {}

  bool is_root() const { return position_ == 0; }
  int span() const { return span_; }
  std::size_t most_children() const {
    return static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(span_)) - 1);
  }
  int parent() const { return rank_at(-span_); }
  bool has_child(int mask) const { return position_ + mask < size_; }
  // The rank at a position, relative to this one: of a child where that is its mask.
  int rank_at(int offset) const { return around(root_, position_ + offset, size_); }
  // How many of the `span` positions from `offset` on, relative to this one, there are.
  std::size_t existing(int offset, int span) const {
    return static_cast<std::size_t>(std::min(span, size_ - position_ - offset));
  }

 private:
  int root_, size_, position_, span_;
};

// The order of messages in a ring in which one chunk of each rank travels around, `size` - 1 steps far.
//
// Chunks are cut into segments, and kWindow segments of each chunk make a round, so that what is under way stays small.
// Turn t sends one segment to the next rank and receives one from the rank before; what it receives is what turn
// t + kWindow sends, unless that starts a new round. A chunk that has ended gives empty pieces, which no one sends.
class RingTurns {
 public:
  struct Piece {
    int chunk;
    std::size_t first, count;  // in the units of `lengths`
  };

  // `start`: the chunk sent first. `lengths` (per chunk) stays alive.
  RingTurns(int start, int size, const std::size_t* lengths, std::size_t segment)
      : start_(start), size_(size), lengths_(lengths), segment_(segment), steps_(static_cast<std::size_t>(size) - 1) {
    std::size_t round = kWindow * segment;
    rounds_ = (*std::max_element(lengths, lengths + size) + round - 1) / round;
  }

  std::size_t count() const { return rounds_ * steps_ * kWindow; }
  bool is_first_step(std::size_t turn) const { return step(turn) == 0; }
  bool is_last_step(std::size_t turn) const { return step(turn) == steps_ - 1; }
  Piece outgoing(std::size_t turn) const { return piece(turn, around(start_, -static_cast<int>(step(turn)), size_)); }
  Piece incoming(std::size_t turn) const {
    return piece(turn, around(start_, -static_cast<int>(step(turn)) - 1, size_));
  }

 private:
  std::size_t step(std::size_t turn) const { return turn / kWindow % steps_; }
  Piece piece(std::size_t turn, int chunk) const {
    std::size_t round = turn / kWindow / steps_;
    std::size_t first = (round * kWindow + turn % kWindow) * segment_;
    std::size_t length = lengths_[chunk];
    return {chunk, first, first < length ? std::min(segment_, length - first) : 0};
  }

  int start_, size_;
  const std::size_t* lengths_;
  std::size_t segment_, steps_, rounds_;
};

}  // namespace aiocomms
