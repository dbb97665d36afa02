// The choice between both ways of filling slots, with costs set by the test, and the equality of their copies.
#include "collectives/filling.hpp"

#include <vector>

#include "parts.hpp"

namespace aiocomms {
namespace {

constexpr std::size_t kBytes = 1 << 20;

// A writer and its reader. The test sets the ns that each takes for 1 MiB, with plain and with streaming stores.
struct Pair {
  Filling filling;
  Costs reads;
  std::uint64_t write[2], read[2];
  std::size_t streamed = 0, timed = 0;

  Pair(std::uint64_t plain_write, std::uint64_t plain_read, std::uint64_t stream_write, std::uint64_t stream_read)
      : write{plain_write, stream_write}, read{plain_read, stream_read} {}

  void fill(std::size_t slots) {
    streamed = timed = 0;
    for (std::size_t slot = 0; slot < slots; ++slot) {
      const Filled how = filling.next([this](bool way) { return reads.of(way); });
      streamed += how.streamed;
      timed += how.timed;
      if (!how.timed) continue;
      filling.writes.note(how.streamed, kBytes, write[how.streamed]);
      reads.note(how.streamed, kBytes, read[how.streamed]);
    }
  }
};

void cores_that_share_a_cache_use_it() {
  Pair near(40'000, 38'000, 55'000, 95'000);
  near.fill(64 * Filling::kCycle);
  CHECK(near.streamed == (kStreams ? 64 * Filling::kBurst : 0));
  Pair read_late(60'000, 38'000, 55'000, 95'000);  // The writer alone would choose the other way.
  read_late.fill(64 * Filling::kCycle);
  CHECK(read_late.streamed == (kStreams ? 64 * Filling::kBurst : 0));
}

void cores_far_apart_go_past_the_caches() {
  Pair far(220'000, 90'000, 55'000, 80'000);
  far.fill(2 * Filling::kFirst);
  far.fill(64 * Filling::kCycle);
  CHECK(kStreams ? far.streamed == 64 * (Filling::kCycle - Filling::kBurst) : far.streamed == 0);
}

void cores_may_move() {
  Pair pair(40'000, 38'000, 55'000, 95'000);
  pair.fill(2 * Filling::kCycle);
  pair.write[0] = 220'000, pair.read[0] = 90'000;
  pair.fill(8 * Filling::kMeasured);
  pair.fill(64 * Filling::kMeasured);
  CHECK(!kStreams || pair.streamed >= 64 * Filling::kMeasured - Filling::kBurst);
  pair.write[0] = 40'000, pair.read[0] = 38'000;
  pair.fill(2 * Filling::kCycle);
  pair.fill(Filling::kCycle);
  CHECK(pair.streamed <= Filling::kBurst);
}

void few_slots_are_measured() {
  Pair near(40'000, 38'000, 55'000, 95'000);
  near.fill(Filling::kCycle);
  CHECK(near.timed <= Filling::kCycle / Filling::kMeasured + Filling::kBurst);
}

void an_interruption_counts_for_little() {
  Costs costs;
  costs.note(false, kBytes, 40'000);
  costs.note(false, kBytes, 4'000'000);
  CHECK(costs.of(false) == 70'000);
  CHECK(costs.of(true) == 0);
  costs.note(true, kBytes, 0);
  CHECK(costs.of(true) == 1);  // 0 means that nothing was measured.
}

void both_ways_copy_the_same() {
  std::vector<std::byte> from(5 * kLine + 7), plain(6 * kLine + 7), second(3 * kLine + 5);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i % 251);
  for (std::size_t offset = 0; offset < kLine; ++offset) {
    for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, kLine - 1, kLine, 2 * kLine + 3, from.size()}) {
      for (std::size_t more : {std::size_t{0}, kLine - 1, 2 * kLine, second.size()}) {
        std::vector<std::byte> streamed(plain.size()), beside(second.size());
        plain.assign(plain.size(), std::byte{0});
        second.assign(second.size(), std::byte{0});
        std::memcpy(plain.data() + offset, from.data(), bytes);
        std::memcpy(second.data(), from.data() + 1, more);
        Copy also{beside.data(), from.data() + 1, more};
        stream(streamed.data() + offset, from.data(), bytes, &also);
        CHECK(streamed == plain);
        CHECK(!kStreams || bytes < 2 * kLine || more < kLine || also.bytes < more);
        also.advance(also.bytes);
        CHECK(beside == second);
      }
    }
  }
}

}  // namespace

void test_filling() {
  cores_that_share_a_cache_use_it();
  cores_far_apart_go_past_the_caches();
  cores_may_move();
  few_slots_are_measured();
  an_interruption_counts_for_little();
  both_ways_copy_the_same();
}

}  // namespace aiocomms
