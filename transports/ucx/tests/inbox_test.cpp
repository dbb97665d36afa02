// The inbox: matching, order of arrival, fetches, vouches, and messages that are passed on or dropped.
#include "engine/inbox.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "parts.hpp"

namespace aiocomms {
namespace {

void inbox_restores_the_order() {
  Desk desk;
  const int first = 1, second = 2, third = 3;
  int taken[3] = {};
  for (int& it : taken) desk.receive(&it, 4, 0);
  desk.inbox.arrive(1, desk.header(2, 0, 4), &third, nullptr);
  desk.inbox.arrive(1, desk.header(1, 0, 4), &second, nullptr);
  CHECK(desk.outcomes().empty());
  CHECK(desk.inbox.received(1) == 0);
  desk.inbox.arrive(1, desk.header(0, 0, 4), &first, nullptr);
  CHECK(desk.outcomes().size() == 3);
  CHECK(desk.inbox.received(1) == 3);
  CHECK(taken[0] == 1 && taken[1] == 2 && taken[2] == 3);
  // A number that comes twice is invalid, and so is an old one.
  desk.inbox.arrive(1, desk.header(5, 0, 4), &first, nullptr);
  desk.inbox.arrive(1, desk.header(5, 0, 4), &first, &desk);
  CHECK(desk.ucx.refused == std::vector<int>{1} && desk.ucx.released == std::vector<void*>{&desk});
  desk.inbox.arrive(1, desk.header(0, 0, 4), &first, nullptr);
  CHECK(desk.ucx.refused.size() == 2);
  desk.inbox.forget_early(1);
}

// The numbers of messages restart at 0 after 2^32 messages. Messages also overtake each other there.
void inbox_restores_the_order_across_the_wrap() {
  constexpr std::uint32_t kFirst = ~std::uint32_t{0} - 1;  // 2^32 - 2
  constexpr std::uint32_t kCount = 6;
  Desk desk({}, false, kFirst);
  std::uint32_t taken[kCount] = {};
  for (std::uint32_t& it : taken) desk.receive(&it, 4, 0);
  for (std::uint32_t at : {5u, 1u, 3u, 2u, 4u}) {
    desk.inbox.arrive(1, desk.header(kFirst + at, 0, 4), &at, nullptr);
    CHECK(desk.outcomes().empty());
  }
  const std::uint32_t at = 0;
  desk.inbox.arrive(1, desk.header(kFirst, 0, 4), &at, nullptr);
  CHECK(desk.outcomes().size() == kCount && desk.inbox.received(1) == kFirst + kCount);
  for (std::uint32_t number = 0; number < kCount; ++number) CHECK(taken[number] == number);
  CHECK(desk.ucx.refused.empty());
  desk.inbox.arrive(1, desk.header(kFirst, 0, 4), &at, nullptr);  // an old number
  CHECK(desk.ucx.refused == std::vector<int>{1});
}

// Two messages of the same number cannot both wait for a vouch, which could not tell them apart.
void inbox_refuses_a_number_that_still_waits() {
  Desk desk({}, false, ~std::uint32_t{0});
  Header header = desk.header(~std::uint32_t{0}, 5, 4);
  header.dtype |= kVouched;
  const int data = 1;
  desk.group.vouches[{1, header.order}];  // 2^32 messages ago
  desk.inbox.arrive(1, header, &data, nullptr);
  CHECK(desk.ucx.refused == std::vector<int>{1});
  int taken = 0;
  desk.receive(&taken, 4, 5);
  CHECK(desk.outcomes().empty() && taken == 0);
  desk.lose();
}

void inbox_matches() {
  Desk desk;
  const int data = 42;
  int taken = 0, narrow[1] = {}, other = 0;
  const Operation* waits = desk.receive(&taken, 4, 8);
  const Ticket ticket = waits->ticket;
  desk.inbox.arrive(1, desk.header(0, 9, 4), &data, nullptr);
  CHECK(desk.outcomes().empty());
  desk.receive(&other, 4, 9);
  CHECK(other == 42 && desk.outcomes().size() == 1);
  Request* withdrawn = desk.inbox.withdraw(desk.group, Key(1, 0, 8), ticket);
  CHECK(withdrawn == waits);
  desk.reports.withdraw();
  delete withdrawn;
  CHECK(desk.inbox.withdraw(desk.group, Key(1, 0, 8), ticket) == nullptr);
  // One message is too long, and one has another dtype.
  const int pair[2] = {1, 2};
  desk.receive(narrow, 4, 1);
  desk.inbox.arrive(1, desk.header(1, 1, 8), pair, nullptr);
  desk.receive(&taken, 4, 2, 5);
  desk.inbox.arrive(1, desk.header(2, 2, 4), &data, nullptr);
  const auto outcomes = desk.outcomes();
  CHECK(outcomes.size() == 2 && outcomes[0].status == Status::kTruncated && outcomes[0].details[0] == 8);
  CHECK(narrow[0] == 1);
  CHECK(outcomes[1].status == Status::kDtype && outcomes[1].details[1] == 4 && taken == 0);
  CHECK(desk.reports.pending() == 0);
}

// A probe reports the message that a receive would take, and takes nothing.
void inbox_probes() {
  Desk desk;
  const int pair[2] = {3, 4};
  int taken[2] = {};
  const auto probe = [&](std::int64_t tag) {
    Operation* made = desk.operation();
    desk.inbox.probe(made, Key(1, 0, tag));
    return made;  // A probe that has ended is deleted.
  };
  desk.inbox.arrive(1, desk.header(0, 5, 8), pair, nullptr);
  for (int turn = 0; turn < 2; ++turn) {
    probe(5);
    const auto outcomes = desk.outcomes();
    CHECK(outcomes.size() == 1 && outcomes[0].status == Status::kDone && outcomes[0].details[0] == 8);
  }
  desk.receive(taken, 8, 5);
  CHECK(taken[1] == 4 && desk.outcomes().size() == 1);
  // All waiting probes report the message, unless a receive takes it.
  probe(5);
  probe(5);
  desk.receive(taken, 8, 5);
  desk.inbox.arrive(1, desk.header(1, 5, 8), pair, nullptr);
  CHECK(desk.outcomes().size() == 1 && desk.reports.pending() == 2);
  desk.inbox.arrive(1, desk.header(2, 5, 4), pair, nullptr);
  const auto heard = desk.outcomes();
  CHECK(heard.size() == 2 && heard[0].details[0] == 4 && heard[1].details[0] == 4);
  // One waiting probe is withdrawn, one ends with its peer, and one is dropped.
  Operation* waits = probe(6);
  CHECK(desk.inbox.withdraw(desk.group, Key(1, 0, 6), waits->ticket) == waits);
  waits->withdraw();
  probe(6);
  desk.group.left[1] = true;
  desk.inbox.end_receives(desk.group, 1);
  CHECK(desk.outcomes()[0].status == Status::kClosed);
  probe(5);  // the arrived message is still there
  probe(6);
  const auto left = desk.outcomes();
  CHECK(left[0].status == Status::kDone && left[1].status == Status::kClosed);
  desk.group.left[1] = false;
  probe(6);
  desk.lose();
  CHECK(desk.outcomes()[0].status == Status::kDropped && desk.group.users == 0);
}

void inbox_fetches() {
  Desk desk;
  int data[2] = {5, 6}, taken[2] = {}, one = 0;
  desk.receive(taken, 8, 1);
  desk.inbox.arrive(1, desk.header(0, 1, 8), nullptr, data);
  CHECK(desk.outcomes().empty() && desk.ucx.under_way.size() == 1);
  desk.ucx.finish();
  CHECK(desk.outcomes().size() == 1 && taken[1] == 6);
  desk.receive(&one, 4, 2);
  desk.inbox.arrive(1, desk.header(1, 2, 8), nullptr, data);
  CHECK(desk.ucx.calls.back() == "fetch_beginning");
  desk.ucx.finish();
  CHECK(one == 5 && desk.outcomes()[0].status == Status::kTruncated);
  desk.receive(&one, 4, 3);
  desk.inbox.arrive(1, desk.header(2, 3, 4), nullptr, data);
  desk.ucx.finish(UCS_ERR_CONNECTION_RESET);
  CHECK(desk.outcomes()[0].status == Status::kBroken);
}

void inbox_waits_for_vouches() {
  Desk desk;  // The other rank is on another host, so it has no process here.
  const int data = 7;
  int taken = 0;
  auto vouched = [&](std::uint32_t order) {
    Header header = desk.header(order, 0, 4);
    header.dtype |= kVouched;
    return header;
  };
  auto vouch = [&](std::uint32_t order, std::uint32_t of) {
    Header header = desk.header(order, of, 0);
    header.channel = kVouch;
    return header;
  };
  desk.receive(&taken, 4, 0);
  desk.inbox.arrive(1, vouched(0), &data, nullptr);
  CHECK(desk.outcomes().empty());
  desk.inbox.arrive(1, vouch(1, 0), nullptr, nullptr);
  CHECK(desk.outcomes()[0].status == Status::kDone);
  // The vouch may come before the receive.
  desk.inbox.arrive(1, vouched(2), &data, nullptr);
  desk.inbox.arrive(1, vouch(3, 2), nullptr, nullptr);
  desk.receive(&taken, 4, 0);
  CHECK(desk.outcomes()[0].status == Status::kDone);
  // The sender closes without a vouch.
  desk.receive(&taken, 4, 0);
  desk.inbox.arrive(1, vouched(4), &data, nullptr);
  desk.receive(&taken, 4, 1);
  desk.group.left[1] = 1;
  desk.inbox.end_receives(desk.group, 1);
  const auto outcomes = desk.outcomes();
  CHECK(outcomes.size() == 2 && outcomes[0].status == Status::kClosed && outcomes[1].status == Status::kClosed);
  desk.receive(&taken, 4, 1);
  CHECK(desk.outcomes()[0].status == Status::kClosed);
  CHECK(desk.group.vouches.empty() && desk.group.users == 0);
}

void inbox_hands_on() {
  Desk desk(Peer{getpid(), getpid()});
  Header header = desk.header(0, 3, 0);
  header.channel = kSignal;
  desk.inbox.arrive(1, header, nullptr, nullptr);
  CHECK(desk.handled.size() == 1 && desk.handled[0].tag == 3);
  // A schedule's receive ends by its event, outside the inbox.
  Events events;
  Event event;
  int taken = 0;
  const int data = 9;
  auto receive = new ScheduleReceive(desk.group, events, event);
  receive->data = &taken;
  receive->bytes = 4;
  desk.inbox.post(receive, Key(1, kSchedule, 0));
  header = desk.header(1, 0, 4);
  header.channel = kSchedule;
  header.dtype = 0;
  desk.inbox.arrive(1, header, &data, nullptr);
  CHECK(taken == 9 && !events.empty() && !event.done());
  delete events.pop();
  // An offer is passed on to the owner. An invalid message is refused.
  const Offer offer{reinterpret_cast<std::uint64_t>(&data), 1};
  Operation* op = desk.receive(&taken, 4, 0);
  header = desk.header(2, 0, 4);
  header.dtype |= kOffered;
  desk.inbox.arrive(1, header, &offer, nullptr);
  CHECK(desk.pulled == std::vector<Request*>{op});
  op->end(Status::kDone);
  header = desk.header(3, 0, 4);
  header.source = 0;  // peer 1 does not have this rank
  desk.inbox.arrive(1, header, &data, nullptr);
  CHECK(desk.ucx.refused == std::vector<int>{1});
  header = desk.header(4, 0, 4);
  header.dtype |= kVouched;  // Ranks of one host do not vouch.
  desk.inbox.arrive(1, header, &data, nullptr);
  CHECK(desk.ucx.refused.size() == 2);
}

void inbox_drops() {
  Desk desk;
  int taken = 0;
  desk.receive(&taken, 4, 1);
  desk.inbox.arrive(1, desk.header(0, 2, 4), nullptr, &taken);
  desk.lose();
  CHECK(desk.outcomes()[0].status == Status::kDropped);
  CHECK(desk.ucx.released == std::vector<void*>{&taken});
  desk.inbox.arrive(1, desk.header(1, 2, 4), nullptr, &desk);
  CHECK(desk.ucx.released.size() == 2 && desk.ucx.refused.empty());
  CHECK(desk.group.users == 0);
}

}  // namespace

void test_inbox() {
  inbox_restores_the_order();
  inbox_restores_the_order_across_the_wrap();
  inbox_refuses_a_number_that_still_waits();
  inbox_matches();
  inbox_probes();
  inbox_fetches();
  inbox_waits_for_vouches();
  inbox_hands_on();
  inbox_drops();
}

}  // namespace aiocomms
