#include "collectives/pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "collectives/segment.hpp"
#include "collectives/shared_memory.hpp"

namespace aiocomms {
namespace {

constexpr int kAtOnce = 4;  // Communicators whose pages are returned at a time. A post waits for that.

int count_here(const std::vector<int>& places) {
  return static_cast<int>(std::ranges::count_if(places, [](int place) { return place >= 0; }));
}

}  // namespace

std::size_t Pool::bytes(int ranks) {
  const std::size_t counters = whole_pages(sizeof(Counters) * static_cast<std::size_t>(ranks));
  return counters + static_cast<std::size_t>(ranks) * (kForMessage + kSlots) * kSlot;
}

Pool::Pool(int fd, std::size_t offset, int rank, std::vector<int> places, std::function<void()> overflows)
    : places_(std::move(places)),
      place_(place_of(rank)),
      bytes_(bytes(count_here(places_))),
      overflows_(std::move(overflows)) {
  for (std::uint32_t number = kSlots; number > 0; --number) free_.push_back(number - 1);
  memory_ = map_shared(fd, offset, bytes_);
  counters_ = static_cast<Counters*>(memory_);
  slots_ = static_cast<std::byte*>(memory_) + bytes_ -
           static_cast<std::size_t>(count_here(places_)) * (kForMessage + kSlots) * kSlot;
}

Pool::~Pool() { munmap(memory_, bytes_); }

void Pool::admit() {
  if (overflowing_.capacity() <= segments_) overflowing_.reserve(2 * segments_ + 1);
  if (holders_.capacity() <= segments_) holders_.reserve(2 * segments_ + 1);
  ++segments_;
}

std::uint32_t Pool::take(Segment& segment) noexcept {
  if (free_.empty()) reclaim();
  if (free_.empty()) {
    const auto known = [&](const Overflow& overflow) { return overflow.segment == &segment; };
    if (std::ranges::any_of(overflowing_, known)) return kOwn;
    overflowing_.push_back({&segment, 0, 0});
    if (overflowing_.size() == 1) overflows_();
    return kOwn;
  }
  if (std::ranges::find(holders_, &segment) == holders_.end()) holders_.push_back(&segment);
  const std::uint32_t number = free_.back();
  free_.pop_back();
  return number;
}

// The first segment whose readers have finished returns its slots. (A closed one may have returned them earlier.)
void Pool::reclaim() noexcept {
  auto holder = holders_.begin();
  while (free_.empty() && holder != holders_.end()) {
    holder = (*holder)->give_back() ? holders_.erase(holder) : std::next(holder);
  }
}

void Pool::forget(Segment& segment) noexcept {
  --segments_;
  std::erase(holders_, &segment);
  std::erase_if(overflowing_, [&](const Overflow& overflow) { return overflow.segment == &segment; });
}

void Pool::trim(std::uint64_t now) noexcept {
  int released = 0;
  std::erase_if(overflowing_, [&](Overflow& overflow) {
    const std::uint64_t round = overflow.segment->last_slot();
    if (overflow.since == 0 || overflow.round != round) {
      overflow.round = round;
      overflow.since = now;
    }
    const bool idle = now - overflow.since >= kIdle && released < kAtOnce && overflow.segment->release_own();
    released += idle;
    return idle;
  });
}

}  // namespace aiocomms
