// Boards of three ranks in one memory. Entries arrive whole and in order. While one reader is late there is no room.
#include "collectives/board.hpp"

#include <unistd.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "collectives/segment.hpp"
#include "parts.hpp"
#include "segment_inside.hpp"

namespace aiocomms {
namespace {

struct Boards {
  int fd = Segment::create(3, false);
  std::vector<std::unique_ptr<Board>> of;
  Boards() {
    for (int rank = 0; rank < 3; ++rank) {
      of.push_back(std::make_unique<Board>(fd, 2 * Segment::bytes(3), rank, 3));
    }
  }
  ~Boards() { close(fd); }
};

std::vector<std::byte> bytes_of(std::uint64_t number, std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t at = 0; at < count; ++at) bytes[at] = static_cast<std::byte>(number * 31 + at);
  return bytes;
}

// Sizes that fit an entry, that exceed it, and that exceed the rest before the end of the room.
std::size_t size_of_entry(std::uint64_t number) {
  constexpr std::size_t kSizes[] = {0, 8, Board::kInline, Board::kInline + 1, 1000, 4000, Board::kLargest};
  return kSizes[number * 5 % std::size(kSizes)];
}

bool takes(Board& board, int writer, std::uint64_t number) {
  const Board::Entry entry = board.next(writer);
  if (entry.cell == nullptr) return false;
  const auto bytes = bytes_of(number, size_of_entry(number));
  CHECK(entry.cell->lane == number && entry.cell->fingerprint == ~number && entry.cell->bytes == bytes.size());
  CHECK(entry.cell->kind == (number % 2 ? Board::kGives : Board::kOrders));
  CHECK(bytes.empty() || std::memcmp(entry.data, bytes.data(), bytes.size()) == 0);
  board.take(writer);
  return true;
}

bool writes(Board& board, std::uint64_t number) {
  const auto bytes = bytes_of(number, size_of_entry(number));
  return board.write(number % 2 ? Board::kGives : Board::kOrders, number, ~number, bytes.data(), bytes.size());
}

void entries_come_in_order() {
  Boards boards;
  std::uint64_t written = 0, read[3] = {};
  for (int round = 0; round < 200; ++round) {
    while (writes(*boards.of[0], written)) ++written;
    CHECK(written - read[2] <= Board::kCells && written > read[2]);
    while (takes(*boards.of[1], 0, read[1])) ++read[1];
    CHECK(read[1] == written && !writes(*boards.of[0], written));  // The other reader is late.
    for (int some = 0; some <= round % 7 * 5 && takes(*boards.of[2], 0, read[2]); ++some) ++read[2];
  }
  CHECK(written > 20 * Board::kCells);
}

void small_ones_fill_all_cells() {
  Boards boards;
  for (std::uint64_t number = 0; number < Board::kCells; ++number) {
    CHECK(boards.of[1]->write(Board::kGives, number, 1, &number, sizeof number));
  }
  CHECK(!boards.of[1]->write(Board::kGives, 0, 1, nullptr, 0));
  CHECK(boards.of[0]->next(2).cell == nullptr);
}

// A waiter for all lines is woken by the last one, and a waiter for one line by that line. A message wakes every
// waiter.
void who_blocks_is_woken_by_what_it_awaits() {
  using Awaited = Segment::Awaited;
  const int fd = Segment::create(3, false);
  Segment here({fd, 0, 3}), second({fd, 1, 3}), third({fd, 2, 3});
  const auto wakes = [&](Segment& publisher, const Awaited& awaited) {
    here.begin_block(awaited);
    CHECK(!publisher.claim_wake(0));
    const bool woken = !SegmentInside::blocks(here);
    here.begin_block(awaited);
    second.rouse(0);
    CHECK(!SegmentInside::blocks(here));
    here.end_block();
    return woken;
  };
  CHECK(wakes(second, {}) && !wakes(second, {Awaited::kNever}));
  here.publish(0);
  second.publish(0);
  CHECK(!wakes(second, {Awaited::kAll, 0, 0}));
  CHECK(wakes(second, {Awaited::kOne, 1, 0}) && !wakes(second, {Awaited::kOne, 2, 0}));
  third.publish(0);
  CHECK(wakes(third, {Awaited::kAll, 0, 0}) && wakes(second, {Awaited::kAll, 2, 0}));
  CHECK(!wakes(third, {Awaited::kAll, 0, 1}));
  CHECK(wakes(third, {Awaited::kOne, 65'535, 1}));  // There is no such rank.
  third.publish_second(7);
  CHECK(wakes(third, {Awaited::kSecond, 2, 7}) && !wakes(third, {Awaited::kSecond, 1, 7}));
  CHECK(!wakes(third, {Awaited::kWritable, 0, Segment::kDepth}));
  for (Segment* each : {&here, &second, &third}) each->finish(1);
  CHECK(wakes(third, {Awaited::kWritable, 0, Segment::kDepth}));
  CHECK(!wakes(third, {Awaited::kWritable, 0, Segment::kDepth + 1}));
  here.sleep(true);
  third.rouse(0);  // UCX wakes its thread.
  CHECK(third.claim_wake(0));
  close(fd);
}

// A blocked post continues when another rank publishes. That rank then has no thread to wake.
void a_publisher_wakes_who_blocks() {
  constexpr std::uint64_t kForever = 60'000'000'000;
  const int fd = Segment::create(2, false);
  Segment here({fd, 0, 2}), there({fd, 1, 2});
  CHECK(!there.claim_wake(0));
  here.sleep(true);
  CHECK(there.claim_wake(0) && !there.claim_wake(0));
  CHECK(!here.begin_block({}));
  here.block(1000);  // no rank wakes it
  CHECK(!there.claim_wake(0));
  here.block(kForever);  // a rank has already woken it
  here.sleep(true);
  CHECK(here.begin_block({}));  // Otherwise the sleeping thread would not notice later publications.
  here.end_block();
  CHECK(!there.claim_wake(0));
  for (std::uint64_t round = 0; round < 1000; ++round) {
    std::thread publisher([&] {
      there.publish(round);
      CHECK(!there.claim_wake(0));
    });
    bool slept = false;
    while (!here.published(1, round)) {
      slept |= here.begin_block({Segment::Awaited::kAll, 1, round});
      if (!here.published(1, round)) here.block(kForever);
      here.end_block();
    }
    publisher.join();
    CHECK(!slept);  // The check comes after join(), because the publisher's thread counts checks too.
  }
  here.note_core(3);
  CHECK(there.shares_core(3));
  CHECK(!here.begin_block({}));
  CHECK(!there.shares_core(3));  // A blocked rank does not need its core until it is woken.
  here.end_block();
  CHECK(there.shares_core(3));
  close(fd);
}

}  // namespace

void test_board() {
  entries_come_in_order();
  small_ones_fill_all_cells();
  who_blocks_is_woken_by_what_it_awaits();
  a_publisher_wakes_who_blocks();
}

}  // namespace aiocomms
