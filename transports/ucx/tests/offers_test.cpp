// Offers of large messages between two ranks that share memory.
#include "engine/offers.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "collectives/segment.hpp"
#include "parts.hpp"

namespace aiocomms {
namespace {

// Two ranks of one process that share memory, with the offers of each.
struct Pair {
  static constexpr std::size_t kBytes = 3 * Pool::kSlot * 4;
  int fd = Segment::create(2, true);
  Pool here_pool{fd, Segment::place_of_pool(2), 0, {0, 1}, [] {}};
  Pool there_pool{fd, Segment::place_of_pool(2), 1, {0, 1}, [] {}};
  Desk here, there;
  Offers sender{here.ucx}, receiver{there.ucx};
  std::vector<std::byte> message = std::vector<std::byte>(kBytes), taken = std::vector<std::byte>(kBytes);

  Pair() {
    open(here, 0);
    there.group.rank = 1;
    open(there, 1);
    for (std::size_t at = 0; at < kBytes; ++at) message[at] = static_cast<std::byte>(at * 7 + at / 4096);
    sender.share(&here_pool);
    receiver.share(&there_pool);
    sender.allow_assistance(true);
    receiver.allow_assistance(true);
  }
  ~Pair() { ::close(fd); }
  void open(Desk& desk, int rank) {
    desk.group.hosts = {{{0, 1}}, 0, rank};
    desk.group.shared = std::make_unique<Shared>(SharedMemory{fd, rank, 2});
  }
  Operation* offer() {
    Operation* op = here.operation();
    Header header = here.group.header_to(1, 0, 5);
    header.bytes = kBytes;
    CHECK(sender.offer(here.group, 1, header, message.data(), op) == UCS_INPROGRESS);
    return op;
  }
  // The receiver gets the last offer.
  Operation* pull(std::uint8_t dtype = 0) {
    const FakeUcx::Told& told = here.ucx.told.back();
    Offer offer;
    CHECK(told.peer == 1 && told.header.dtype & kOffered && told.what.size() == sizeof offer);
    std::memcpy(&offer, told.what.data(), sizeof offer);
    Operation* op = there.operation();
    op->data = taken.data();
    op->bytes = kBytes;
    op->dtype = dtype;
    if (dtype) op->status = Status::kDtype;
    receiver.pull(op, told.header, offer, 0);
    return op;
  }
};

void offers_are_pulled() {
  Pair pair;
  pair.receiver.allow_assistance(false);
  pair.offer();
  pair.pull();
  CHECK(pair.receiver.pulls() && !pair.sender.assists());
  while (pair.receiver.pulls()) pair.receiver.advance();
  CHECK(pair.taken == pair.message);
  CHECK(pair.there.outcomes()[0].status == Status::kDone);
  CHECK(pair.there.ucx.told.size() == 1 && pair.there.ucx.told[0].header.channel == kAnswer);
  Header answer = pair.there.ucx.told[0].header;
  CHECK(answer.source == 1);
  answer.source = 0;  // from a rank that has no offer
  pair.sender.end_offer(pair.here.group, answer);
  CHECK(pair.here.outcomes().empty());
  answer.source = 1;
  pair.sender.end_offer(pair.here.group, answer);
  CHECK(pair.here.outcomes()[0].status == Status::kDone);
  pair.sender.end_offer(pair.here.group, answer);  // twice
  CHECK(pair.here.outcomes().empty());
}

void offers_are_assisted() {
  Pair pair;
  pair.offer();
  pair.pull();
  pair.receiver.advance();
  CHECK(pair.there.ucx.told.size() == 1 && pair.there.ucx.told[0].header.channel == kAssist);
  pair.sender.begin_assistance(pair.here.group, pair.there.ucx.told[0].header);
  pair.sender.begin_assistance(pair.here.group, pair.there.ucx.told[0].header);
  CHECK(pair.sender.assists());
  for (std::uint64_t slot = 0; slot < Pool::kForMessage; ++slot) CHECK(pair.sender.advance());
  CHECK(!pair.sender.advance());  // the pool is full
  while (pair.receiver.pulls()) {
    pair.receiver.advance();
    pair.sender.advance();
  }
  CHECK(pair.taken == pair.message);
  CHECK(pair.here_pool.emptied(1) > 0);
  pair.sender.end_offer(pair.here.group, pair.there.ucx.told.back().header);
  CHECK(!pair.sender.assists() && pair.here.outcomes().size() == 1);
}

void offers_end_otherwise() {
  Pair pair;
  pair.offer();
  pair.pull(3);  // With another dtype no byte is read, and the sender gets an answer.
  while (pair.receiver.pulls()) pair.receiver.advance();
  CHECK(pair.there.outcomes()[0].status == Status::kDtype);
  CHECK(pair.taken == std::vector<std::byte>(Pair::kBytes));
  CHECK(pair.there.ucx.told.back().header.channel == kAnswer);
  pair.pull();
  pair.receiver.advance();
  pair.sender.begin_assistance(pair.here.group, pair.there.ucx.told.back().header);
  pair.here.group.lost = pair.there.group.lost = true;
  pair.sender.release(pair.here.group);
  pair.receiver.release(pair.there.group);
  CHECK(!pair.sender.assists() && !pair.receiver.pulls());
  CHECK(pair.here.outcomes()[0].status == Status::kDropped);
  CHECK(pair.there.outcomes()[0].status == Status::kDropped);
  CHECK(pair.here.group.users == 0 && pair.there.group.users == 0);
}

}  // namespace

void test_offers() {
  offers_are_pulled();
  offers_are_assisted();
  offers_end_otherwise();
}

}  // namespace aiocomms
