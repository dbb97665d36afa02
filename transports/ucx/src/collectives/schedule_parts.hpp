// The common parts of schedules of messages: sizes at which algorithms change, scratch memory, and places in trees and
// rings.
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

// A reduction up to this size goes whole from rank to rank. Its time depends on the number of successive messages, not
// on the bytes.
inline constexpr std::size_t kSmallReduction = 8 * 1024;

// Longer transfers are cut into pieces of this size. 64 KiB take 5 us on a fast network and 60 us on a slow one. That
// is well above the cost of a message (about 1 us). A ring's scratch memory (2 * kWindow pieces) stays in the
// second-level cache.
inline constexpr std::size_t kSegment = 64 * 1024;

// Unfinished pieces to a neighbour. 256 KiB cover the product of bandwidth and delay at 100 Gbit/s and 20 us.
inline constexpr std::size_t kWindow = 4;

// An all-gather up to this total size takes Bruck's ceil(log2 size) steps, although it copies each byte twice more.
inline constexpr std::size_t kSmallGathered = 64 * 1024;

// Gather and scatter use a tree for blocks up to this size. It saves the root messages, and copies each block
// log2(size) times. They use it only with more than kFlatRanks ranks. Without a tree the root then has at least twice
// as many messages.
inline constexpr std::size_t kTreeBlock = 4 * 1024;
inline constexpr int kFlatRanks = 6;

// Bruck's all-to-all sends each block log2(size) / 2 times, and needs only log2(size) messages. It pays for blocks that
// cost much less than a message. The number of its messages must also be less than half the number of pairwise
// messages.
inline constexpr std::size_t kBruckBlock = 256;
inline constexpr int kBruckRanks = 8;

// Concurrent pairs of a pairwise exchange. A small group exchanges all pairs at once. The limit keeps a receiver from
// being flooded.
inline constexpr std::size_t kExchanges = 8;

// Copies unless there is nothing to do. `from` may be `to`, and any value if bytes is 0.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

inline std::byte* at(void* data, std::size_t bytes) { return static_cast<std::byte*>(data) + bytes; }
inline const std::byte* at(const void* data, std::size_t bytes) { return static_cast<const std::byte*>(data) + bytes; }

// Memory of a schedule. It is not cleared, because each part is written before it is read.
using Scratch = std::unique_ptr<std::byte[]>;
inline Scratch make_scratch(std::size_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

// The events of concurrent messages. Their memory is allocated before the first message.
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

// The event of successive messages. Awaiting it without an unfinished message continues at once.
class Slot {
 public:
  Event& renew() { return event_.emplace(); }

  bool await_ready() const { return !event_ || event_->done(); }
  void await_suspend(std::coroutine_handle<> waiter) { event_->await_suspend(waiter); }
  void await_resume() { event_.reset(); }

 private:
  std::optional<Event> event_;
};

// The events of messages n, n + 1, ..., n + kWindow - 1, if they exist. Message n's event is at n % kWindow.
using Slots = std::array<Slot, kWindow>;

// The rank `distance` places after (or before) `rank` in the ring of ranks. |distance| <= size.
inline int around(int rank, int distance, int size) { return (rank + distance + size) % size; }

// A rank's place in the binomial tree over positions 0 (the root) to size - 1. The subtree of position p has the
// existing positions p, p + 1, ..., p + span - 1. span is the lowest bit of p. The children are p + mask for each power
// of two mask < span.
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
  // The rank at a position relative to this one. For a child the offset is its mask.
  int rank_at(int offset) const { return around(root_, position_ + offset, size_); }
  // How many of the `span` positions from `offset` on exist, relative to this one.
  std::size_t existing(int offset, int span) const {
    return static_cast<std::size_t>(std::min(span, size_ - position_ - offset));
  }

 private:
  int root_, size_, position_, span_;
};

// The order of messages in a ring. One chunk of each rank travels `size` - 1 steps around it.
//
// Chunks are cut into segments, and kWindow segments of each chunk form a round. So only a few messages are unfinished
// at once. Turn t sends one segment to the next rank and receives one from the rank before. Turn t + kWindow sends the
// received segment, unless it starts a new round. A chunk that has ended has empty pieces, which are not sent.
class RingTurns {
 public:
  struct Piece {
    int chunk;
    std::size_t first, count;  // in the units of `lengths`
  };

  // `start`: the chunk that is sent first. `lengths` (per chunk) must stay valid.
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
