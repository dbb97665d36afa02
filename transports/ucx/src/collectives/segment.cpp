#include "collectives/segment.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <ctime>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "collectives/board.hpp"
#include "collectives/shared_memory.hpp"

namespace aiocomms {
namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

std::size_t Segment::bytes(int ranks) {
  if (ranks < 1 || ranks > kMostRanks) {
    throw std::invalid_argument("ranks of one host: " + std::to_string(ranks) + ", wanted 1 to " +
                                std::to_string(kMostRanks));
  }
  return whole_pages(sizeof(Owner) * static_cast<std::size_t>(ranks)) +
         static_cast<std::size_t>(ranks) * kDepth * kSlot;
}

std::size_t Segment::place_of_pool(int ranks) { return 2 * bytes(ranks) + Board::bytes(ranks); }

int Segment::create(int ranks, bool with_pool) {
  // The memory has no name, so no other process can open it and no file remains. Pages exist once they are touched.
  const auto size = static_cast<off_t>(place_of_pool(ranks) + (with_pool ? Pool::bytes(ranks) : 0));
  int fd = memfd_create("aiocomms", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create");
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, size) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    int error = errno;
    close(fd);
    errno = error;
    fail("shared memory for collectives");
  }
  return fd;
}

Segment::Segment(SharedMemory memory, std::size_t offset)
    : rank_(memory.rank),
      ranks_(memory.ranks),
      pool_(memory.pool),
      places_(std::move(memory.places)),
      bytes_(bytes(memory.ranks)) {
  if (rank_ < 0 || rank_ >= ranks_) {
    throw std::invalid_argument("rank " + std::to_string(rank_) + " of " + std::to_string(ranks_));
  }
  held_.fill(Pool::kNone);
  filled_.fill(0);
  memory_ = map_shared(memory.fd, offset, bytes_);
  try {
    if (pool_) pool_->admit();
  } catch (...) {
    munmap(memory_, bytes_);
    throw;
  }
  owners_ = static_cast<Owner*>(memory_);
  slots_ = static_cast<std::byte*>(memory_) + whole_pages(sizeof(Owner) * static_cast<std::size_t>(ranks_));
}

Segment::~Segment() {
  if (pool_) pool_->forget(*this);
  munmap(memory_, bytes_);
}

// A futex has 32 bits. It is the lower half of the number.
std::uint32_t* Segment::futex_of(int rank) {
  constexpr int kLower = std::endian::native == std::endian::little ? 0 : 1;
  return reinterpret_cast<std::uint32_t*>(&owners_[rank].rest.is) + kLower;
}

void Segment::block(std::uint64_t most_ns) {
  constexpr std::uint64_t kSecond = 1'000'000'000;
  const timespec most{static_cast<time_t>(most_ns / kSecond), static_cast<long>(most_ns % kSecond)};
  syscall(SYS_futex, futex_of(rank_), FUTEX_WAIT, static_cast<std::uint32_t>(kBlocked), &most, nullptr, 0);
}

void Segment::unblock(int rank) { syscall(SYS_futex, futex_of(rank), FUTEX_WAKE, 1, nullptr, nullptr, 0); }

bool Segment::writable(std::uint64_t round) {
  if (round < all_done_ + kDepth) return true;
  std::uint64_t done = ~std::uint64_t{0};
  for (int rank = 0; rank < ranks_; ++rank) {
    done = std::min(done, owners_[rank].done.round.load(std::memory_order_seq_cst));
  }
  all_done_ = done;
  return round < all_done_ + kDepth;
}

bool Segment::has_come(const Awaited& awaited) {
  if (awaited.rank >= ranks_) return true;  // The value comes from another rank, which may look for itself.
  switch (awaited.what) {
    case Awaited::kAnything:
      return true;
    case Awaited::kWritable:
      return writable(awaited.round);
    case Awaited::kOne:
      return published(awaited.rank, awaited.round);
    case Awaited::kSecond:
      return published_second(awaited.rank, awaited.round);
    case Awaited::kNever:
      return false;
    case Awaited::kAll:
      break;
  }
  for (int rank = awaited.rank; rank < ranks_; ++rank) {
    if (!published(rank, awaited.round)) return false;
  }
  return true;
}

void Segment::copy_in(std::uint64_t round, std::size_t offset, const void* from, std::size_t bytes,
                      Copy* second) noexcept {
  Filled& is = how(rank_, round);
  if (std::exchange(filled_[round % kDepth], round + 1) != round + 1) {
    own_slot(round);
    is = bytes < kMeasurable ? Filled{} : filling_.next([&](bool streamed) {
      std::uint64_t most = 0;
      for (int rank = 0; rank < ranks_; ++rank) most = std::max(most, owners_[rank].reads.of(streamed));
      return most;
    });
  }
  filling_.fill(is, slot(rank_, round) + offset, static_cast<const std::byte*>(from), bytes, second);
}

bool Segment::give_back() noexcept {
  if (!rests()) return false;
  for (std::uint32_t& number : held_) {
    if (number < Pool::kSlots) pool_->put_back(std::exchange(number, Pool::kNone));
  }
  return true;
}

bool Segment::holds_slots() noexcept {
  const auto of_pool = [](std::uint32_t number) { return number < Pool::kSlots; };
  return std::ranges::any_of(held_, of_pool) && !give_back();
}

bool Segment::release_own() noexcept {
  if (!rests()) return false;
  std::ranges::replace(held_, Pool::kOwn, Pool::kNone);
  // If the system refuses, the pages stay until the communicator is closed.
  madvise(own(rank_, 0), kDepth * kSlot, MADV_REMOVE);
  return true;
}

}  // namespace aiocomms
