#include "collectives/pool.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>
#include <utility>

#include "collectives/segment.hpp"

namespace aiocomms {
namespace {

constexpr std::size_t kPage = 4096;
constexpr int kAtOnce = 4;  // communicators whose pages go back at a time: whoever posts an op waits for that

int count_here(const std::vector<int>& places) {
  return static_cast<int>(std::ranges::count_if(places, [](int place) { return place >= 0; }));
}

}  // namespace

void* map_shared(int fd, std::size_t offset, std::size_t bytes) {
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

std::size_t Pool::bytes(int ranks) {
  const std::size_t counters = (sizeof(Counters) * static_cast<std::size_t>(ranks) + kPage - 1) / kPage * kPage;
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

// Of the segments that have slots, the first whose readers are done with them gives them up. (One that is closed may
// have given them back before.)
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
