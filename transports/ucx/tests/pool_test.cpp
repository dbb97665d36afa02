// Segments of two ranks take slots from a pool in turn. The tests check when slots return, and the slots beyond the
// pool.
#include "collectives/pool.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "collectives/segment.hpp"
#include "parts.hpp"

namespace aiocomms {
namespace {

// Two ranks of one process, with a pool and any number of communicators. Rank 1 only reads.
struct Family {
  struct Communicator {
    int fd;
    Segment writer, reader;
    std::uint64_t round = 0;

    explicit Communicator(Family& family)
        : fd(Segment::create(2, false)),
          writer({fd, 0, 2, &family.pools[0], {0, 1}}),
          reader({fd, 1, 2, &family.pools[1], {0, 1}}) {}
    ~Communicator() { close(fd); }

    // Publishes a slot, with a mark of its round.
    std::byte* publish() {
      CHECK(writer.writable(round));
      std::byte* slot = writer.own_slot(round);
      std::memset(slot, mark(round), Segment::kSlot);
      writer.publish(round);
      return slot;
    }
    // Both ranks read the slot and finish with it.
    void read() {
      const std::byte* slot = reader.slot(0, round);
      CHECK(reader.published(0, round));
      CHECK(slot[0] == std::byte(mark(round)) && slot[Segment::kSlot - 1] == std::byte(mark(round)));
      writer.finish(round + 1);
      reader.finish(round + 1);
      ++round;
    }
    int mark(std::uint64_t which) const { return static_cast<int>(which + static_cast<std::uint64_t>(fd) * 31) % 251; }
  };

  int fd = Segment::create(2, true);
  int told = 0;
  Pool pools[2] = {{fd, Segment::place_of_pool(2), 0, {0, 1}, [this] { ++told; }},
                   {fd, Segment::place_of_pool(2), 1, {0, 1}, [this] { ++told; }}};
  std::vector<std::unique_ptr<Communicator>> communicators;

  Communicator& add() { return *communicators.emplace_back(std::make_unique<Communicator>(*this)); }
  ~Family() {
    communicators.clear();
    close(fd);
  }
};

std::size_t pages(int fd) {
  struct stat status;
  fstat(fd, &status);
  return static_cast<std::size_t>(status.st_blocks) * 512 / 4096;
}

// Communicators that run one after the other use the same few slots, and few pages of their own.
void slots_go_round() {
  Family family;
  std::set<std::byte*> slots;
  for (int turn = 0; turn < 100; ++turn) {
    Family::Communicator& communicator = family.add();
    for (std::uint64_t round = 0; round < 2 * Segment::kDepth; ++round) {
      communicator.publish();
      communicator.read();
    }
    CHECK(pages(communicator.fd) < 8);
  }
  CHECK(pages(family.fd) <= Pool::kSlots * Pool::kSlot / 4096 + 8);
  CHECK(family.told == 0 && !family.pools[0].overflows());
}

// A communicator that is used again has its earlier slots.
void slots_are_kept() {
  Family family;
  Family::Communicator& communicator = family.add();
  std::vector<std::byte*> slots;
  for (std::uint64_t round = 0; round < 3 * Segment::kDepth; ++round) {
    slots.push_back(communicator.publish());
    communicator.read();
    if (round >= Segment::kDepth) CHECK(slots[round] == slots[round - Segment::kDepth]);
  }
}

// No slot goes to another communicator while a rank may read it. A communicator without one uses its own.
void nobody_takes_what_is_read() {
  Family family;
  std::set<std::byte*> slots;
  std::vector<Family::Communicator*> under_way;
  for (std::uint32_t at = 0; at < Pool::kSlots; ++at) {
    under_way.push_back(&family.add());
    slots.insert(under_way.back()->publish());
  }
  CHECK(slots.size() == Pool::kSlots && family.told == 0);
  Family::Communicator &more = family.add(), &another = family.add();
  slots.insert(more.publish());
  slots.insert(another.publish());
  CHECK(slots.size() == Pool::kSlots + 2 && family.told == 1 && family.pools[0].overflows());
  CHECK(pages(more.fd) >= Segment::kSlot / 4096);
  for (Family::Communicator* communicator : under_way) communicator->read();
  more.read();
  // The late communicator takes a slot of the pool, which one of the first ones had.
  Family::Communicator& late = family.add();
  CHECK(slots.contains(late.publish()));
  late.read();
  another.read();
}

// Pages of a segment's own slots return after all ranks have finished with them and they were idle, and no sooner.
void pages_go_back() {
  Family family;
  std::vector<Family::Communicator*> under_way;
  for (std::uint32_t at = 0; at < Pool::kSlots; ++at) {
    under_way.push_back(&family.add());
    under_way.back()->publish();
  }
  Family::Communicator& more = family.add();
  Pool& pool = family.pools[0];
  std::uint64_t now = 1;
  more.publish();
  const std::size_t full = pages(more.fd);
  const auto trim_after = [&](std::uint64_t time) { pool.trim(now += time); };
  trim_after(0);
  trim_after(2 * Pool::kIdle);
  CHECK(pages(more.fd) == full && pool.overflows());  // a rank reads it
  more.read();
  more.publish();
  more.read();
  trim_after(Pool::kIdle);
  CHECK(pages(more.fd) == full + Segment::kSlot / 4096);  // it was used meanwhile
  trim_after(Pool::kIdle - 1);
  CHECK(pool.overflows());
  trim_after(1);
  CHECK(!pool.overflows() && pages(more.fd) < 8);
  more.publish();  // the segment and the pool have no free slot
  more.read();
  CHECK(family.told == 2 && pool.overflows());
  under_way[0]->read();
  trim_after(1);
  trim_after(Pool::kIdle);
  more.publish();  // a slot of the pool
  CHECK(!pool.overflows() && pages(more.fd) < 8);
  more.read();
}

// A departed rank reads nothing. The slots of an ended segment are never reused.
void ranks_depart() {
  Family family;
  Family::Communicator& lost = family.add();
  lost.publish();
  CHECK(!lost.writer.give_back() && lost.writer.holds_slots());
  lost.writer.depart(0);
  CHECK(lost.writer.holds_slots());
  lost.writer.depart(1);
  CHECK(!lost.writer.holds_slots());
  std::set<std::byte*> slots;
  for (std::uint32_t at = 1; at < Pool::kSlots; ++at) slots.insert(family.add().publish());
  Family::Communicator* doomed = family.communicators.back().get();
  std::byte* read = doomed->writer.slot(0, 0);
  family.communicators.pop_back();
  Family::Communicator &first = family.add(), &second = family.add();
  CHECK(first.publish() != read && !family.pools[0].overflows());
  CHECK(second.publish() != read && family.pools[0].overflows());
}

// Each part of a communicator's memory is mapped separately, on a kernel with pages of any size.
void parts_begin_on_pages() {
  constexpr std::size_t kPages[] = {4096, 16 * 1024, 64 * 1024};
  for (const int ranks : {1, 2, 3, 64, Segment::kMostRanks}) {
    const std::size_t parts[] = {Segment::bytes(ranks), Segment::place_of_pool(ranks), Pool::bytes(ranks)};
    for (const std::size_t page : kPages) {
      CHECK(std::ranges::all_of(parts, [&](std::size_t part) { return part % page == 0; }));
    }
  }
}

}  // namespace

void test_pool() {
  parts_begin_on_pages();
  slots_go_round();
  slots_are_kept();
  nobody_takes_what_is_read();
  pages_go_back();
  ranks_depart();
}

}  // namespace aiocomms
