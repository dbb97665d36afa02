// The parts of the engine, each alone: no engine, no UCX, no other process, and a clock that stands where the test puts
// it. UCX is a Network that writes down what it is asked.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collectives/segment.hpp"
#include "engine/closing.hpp"
#include "engine/groups.hpp"
#include "engine/inbox.hpp"
#include "engine/offers.hpp"
#include "engine/pacer.hpp"
#include "engine/priority_lock.hpp"
#include "engine/reports.hpp"
#include "engine/request.hpp"
#include "windows/windows.hpp"

namespace aiocomms {
namespace {

unsigned checks = 0, failures = 0;

void check(bool holds, const char* what, int line) {
  ++checks;
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "FAILED at line %d: %s\n", line, what);
}
#define CHECK(condition) check((condition), #condition, __LINE__)

// -------------------------------------------------------------------------------------------------------------- Pacer

using Next = Pacer::Next;
using Rest = Pacer::Rest;
constexpr std::uint64_t kStart = 1'000'000'000;

// A post that spins in vain from `began` on; returns for how long.
std::uint64_t spin_in_vain(Pacer& pacer, std::uint64_t began) {
  Pacer::Spin spin = pacer.begin_post(began);
  std::uint64_t now = began;
  while (pacer.after_look(spin, false, now) != Next::kStop) now += 100;
  pacer.end_post(spin, false);
  return now - began;
}

void pacer_spins() {
  Pacer pacer;
  pacer.configure(true, false);
  CHECK(spin_in_vain(pacer, kStart) == Pacer::kSpin);
  CHECK(spin_in_vain(pacer, kStart) == Pacer::kSpin / 2);
  CHECK(pacer.spin_budget() == Pacer::kSpin / 4);
  // An outcome soon after its post has returned: it would have been worth it.
  pacer.note_outcome(kStart + Pacer::kSpin - 1);
  CHECK(pacer.spin_budget() == Pacer::kSpin / 2 + 1000);
  pacer.note_outcome(kStart + Pacer::kSpin);
  CHECK(pacer.spin_budget() == Pacer::kSpin / 2 + 1000);  // not any more so late
  for (int i = 0; i < 100; ++i) pacer.note_outcome(kStart);
  CHECK(pacer.spin_budget() == Pacer::kSpin);
  for (int i = 0; i < 100; ++i) spin_in_vain(pacer, kStart);
  CHECK(pacer.spin_budget() == 0);
  pacer.end_post(pacer.begin_post(kStart), true);
  CHECK(pacer.spin_budget() == Pacer::kSpin);
  CHECK(!pacer.bulk());
}

void pacer_waits_as_long_as_it_has_worked() {
  Pacer pacer;
  pacer.configure(true, false);
  Pacer::Spin spin = pacer.begin_post(kStart);
  CHECK(pacer.after_look(spin, true, kStart + 100'000) == Next::kLook);
  CHECK(pacer.after_look(spin, false, kStart + 110'000) == Next::kRelax);
  CHECK(pacer.after_look(spin, false, kStart + 219'999) == Next::kRelax);
  CHECK(pacer.after_look(spin, false, kStart + 220'000) == Next::kStop);
  // Never beyond the slice.
  spin = pacer.begin_post(kStart);
  CHECK(pacer.after_look(spin, true, kStart + Pacer::kSlice - 2) == Next::kLook);
  CHECK(pacer.after_look(spin, false, kStart + Pacer::kSlice - 1) == Next::kRelax);
  CHECK(pacer.after_look(spin, false, kStart + Pacer::kSlice) == Next::kStop);
}

void pacer_in_a_crowd() {
  Pacer pacer;
  pacer.configure(true, true);
  Pacer::Spin spin = pacer.begin_post(kStart);
  CHECK(pacer.after_look(spin, false, kStart) == Next::kYield);
  CHECK(pacer.slice_ends() == kStart + Pacer::kCrowdedSlice);
  for (int i = 0; i < 100; ++i) spin_in_vain(pacer, kStart);
  CHECK(pacer.spin_budget() == Pacer::kCrowdedSpin / 4);
  CHECK(pacer.end_visit(false, false) == Pacer::Visit::kYields);
  CHECK(pacer.end_visit(false, true) == Pacer::Visit::kDone);
  Pacer shared;  // with another rank in this process
  shared.configure(false, false);
  CHECK(spin_in_vain(shared, kStart) == 0);
}

void pacer_hands_over() {
  Pacer pacer;
  pacer.configure(true, false);
  Pacer::Spin spin = pacer.begin_post(kStart);
  CHECK(pacer.after_look(spin, true, kStart + Pacer::kSlice) == Next::kStop);
  pacer.end_post(spin, false);  // something still moves: it is bulk
  CHECK(pacer.bulk() && pacer.thread_is_late(true));
  CHECK(pacer.spin_budget() == Pacer::kSpin);
  CHECK(!pacer.loop_is_about(kStart));  // the thread is at it whatever the loop does
  pacer.begin_turn(kStart);
  CHECK(pacer.end_turn(true, false, kStart, kStart).kind == Rest::kNone);
  CHECK(pacer.bulk());
  CHECK(pacer.end_turn(true, true, kStart, kStart).kind == Rest::kNone);
  CHECK(!pacer.bulk());  // the next post is the loop's again
  pacer.hand_over();
  CHECK(pacer.bulk());
}

void pacer_parks_the_loop() {
  Pacer pacer;
  pacer.configure(true, false);
  pacer.loop_comes(kStart);
  for (int turn = 1; turn < Pacer::kTurns; ++turn) CHECK(pacer.end_visit(false, false) == Pacer::Visit::kDone);
  CHECK(pacer.end_visit(true, false) == Pacer::Visit::kDone);  // which starts the count again
  for (int turn = 1; turn < Pacer::kTurns; ++turn) CHECK(pacer.end_visit(false, true) == Pacer::Visit::kDone);
  CHECK(pacer.loop_is_about(kStart));
  CHECK(pacer.end_visit(false, false) == Pacer::Visit::kParks);
  CHECK(!pacer.loop_is_about(kStart));
}

void pacer_ticks_lingers_dozes_and_sleeps() {
  Pacer pacer;
  pacer.configure(true, false);
  pacer.loop_comes(kStart);
  CHECK(pacer.loop_is_about(kStart + Pacer::kLoopAway - 1));
  CHECK(!pacer.loop_is_about(kStart + Pacer::kLoopAway));
  for (int ms : {2, 4, 8, 8}) CHECK(pacer.tick(false).ms == ms);
  CHECK(pacer.thread_is_late(true));  // it looks too seldom
  CHECK(pacer.tick(true).ms == Pacer::kShortestTickMs);
  CHECK(!pacer.thread_is_late(false));
  // It lingers after something has moved, but not where all that can happen would wake it.
  pacer.begin_turn(kStart);
  CHECK(pacer.end_turn(true, false, kStart, kStart + 10).kind == Rest::kNone);
  CHECK(pacer.end_turn(false, false, kStart + 9 + Pacer::kLinger, kStart).kind == Rest::kNone);
  CHECK(pacer.end_turn(false, true, kStart + 11, kStart).kind == Rest::kSleep);
  CHECK(pacer.end_turn(false, false, kStart + 10 + Pacer::kLinger, kStart).kind == Rest::kSleep);
  for (int ms : {2, 4, 8, 8}) {
    const Rest rest = pacer.fall_asleep(true);
    CHECK(rest.kind == Rest::kDoze && rest.ms == ms);
  }
  const Rest sleep = pacer.fall_asleep(false);
  CHECK(sleep.kind == Rest::kSleep && sleep.ms == -1);
  CHECK(pacer.sleeps_well(true) && !pacer.sleeps_well(false));
  CHECK(pacer.thread_is_late(false) && !pacer.thread_is_late(true));
  pacer.wake_thread();
  CHECK(!pacer.sleeps_well(true) && !pacer.thread_is_late(false));
  CHECK(pacer.fall_asleep(true).ms == 2);
  CHECK(pacer.has_to_listen(Pacer::kListen) && !pacer.has_to_listen(Pacer::kListen - 1));
  pacer.has_listened(kStart);
  CHECK(!pacer.has_to_listen(kStart + Pacer::kListen - 1));
}

// The loop's thread and the engine's at once, as the engine calls them. Built with ThreadSanitizer this shows races.
void pacer_on_two_threads() {
  PriorityLock lock;
  Pacer pacer;
  pacer.configure(true, false);
  int shared = 0;
  constexpr int kRounds = 2000;
  std::thread thread([&] {
    for (int round = 0; round < kRounds; ++round) {
      {
        PriorityLock::Background held(lock);
        ++shared;
        if (pacer.loop_is_about(kStart)) {
          pacer.tick(false);
        } else {
          pacer.begin_turn(kStart);
          pacer.end_turn(round % 2, true, kStart, kStart);
        }
      }
      lock.give_way();
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    if (pacer.bulk()) pacer.loop_parks();
    pacer.loop_comes(kStart);
    std::lock_guard held(lock);
    ++shared;
    spin_in_vain(pacer, kStart);
    if (round % 8 == 0) pacer.hand_over();
  }
  thread.join();
  CHECK(shared == 2 * kRounds);
  CHECK(!lock.is_wanted());
}

// ---------------------------------------------------------------------------------------------- what the parts stand
// on

// UCX as a list of what it was asked. Calls with a Pending stay under way until the test ends them.
class FakeUcx final : public Network {
 public:
  struct Told {
    int peer;
    Header header;
    std::string what;
  };
  std::vector<Told> told;
  std::vector<void*> released;
  std::vector<int> refused;
  std::vector<Pending*> under_way;
  std::vector<std::string> calls;
  ucs_status_t answer = UCS_INPROGRESS;  // to all but tell()

  // End the oldest call that is under way.
  void finish(ucs_status_t status = UCS_OK) {
    Pending* pending = under_way.front();
    under_way.erase(under_way.begin());
    pending->finished(status);
  }

  ucs_status_t tell(int peer, Header header, const void* what, std::size_t bytes, Pending*) override {
    told.push_back({peer, header, std::string(static_cast<const char*>(what), what ? bytes : 0)});
    return UCS_OK;
  }
  ucs_status_t fetch(void* descriptor, void* data, std::size_t bytes, Memory, Pending* pending) override {
    std::memcpy(data, descriptor, bytes);
    return call("fetch", pending);
  }
  ucs_status_t fetch_beginning(void* descriptor, Beginning* beginning, Pending* pending) override {
    std::memcpy(beginning->data, descriptor, beginning->room);
    return call("fetch_beginning", pending);
  }
  void release(void* descriptor) override { released.push_back(descriptor); }
  void refuse(int peer) override { refused.push_back(peer); }
  ucs_status_t put(int, ucp_rkey_h, std::uint64_t, const void*, std::size_t, Pending* pending) override {
    return call("put", pending);
  }
  ucs_status_t get(int, ucp_rkey_h, std::uint64_t, void*, std::size_t, Pending* pending) override {
    return call("get", pending);
  }
  ucs_status_t flush(int, Pending* pending) override { return call("flush", pending); }
  ucp_mem_h map(void*, std::size_t) override { return nullptr; }
  void unmap(ucp_mem_h) override {}
  std::string pack(ucp_mem_h) override { return "key"; }
  ucp_rkey_h unpack(int, const std::string&) override { return reinterpret_cast<ucp_rkey_h>(this); }
  void destroy(ucp_rkey_h) override { calls.push_back("destroy"); }

 private:
  ucs_status_t call(const char* name, Pending* pending) {
    calls.push_back(name);
    if (answer == UCS_INPROGRESS) under_way.push_back(pending);
    return answer;
  }
};

// Two ranks; this one is rank 0, and peer 0 of its family.
struct Desk : Inbox::Owner {
  Pacer pacer;
  Reports reports{pacer};
  FakeUcx ucx;
  Groups groups;
  std::vector<Peer> peers;
  Inbox inbox;
  Group& group;
  std::vector<Header> handled;
  std::vector<Request*> pulled;
  Ticket last_ticket = 0;

  explicit Desk(Peer other = {}, bool device = false)
      : peers{Peer{}, other}, inbox(peers, device, groups, ucx, *this), group(groups.at(groups.add(0, {0, 1}))) {
    group.their_ids = {group.id, 7};
  }
  ~Desk() { group.drop_schedules(); }

  void handle(Group&, const Header& header, const void*) override { handled.push_back(header); }
  bool agrees(Group& where, const Header&) override { return where.disagrees < 0; }
  void pull(Request* receive, const Header&, const Offer&) override { pulled.push_back(receive); }

  // An op whose post has returned.
  Operation* operation() {
    auto op = new Operation(reports, group, ++last_ticket);
    op->leave_post();
    return op;
  }
  Operation* receive(void* data, std::size_t bytes, std::int64_t tag, std::uint8_t dtype = 4) {
    Operation* op = operation();
    op->data = data;
    op->bytes = bytes;
    op->dtype = dtype;
    inbox.post(op, Key(1, 0, tag));
    return op;
  }
  Header header(std::uint32_t order, std::int64_t tag, std::uint64_t bytes) const {
    return {.group = group.id, .order = order, .source = 1, .dtype = 4, .peer = 1, .tag = tag, .bytes = bytes};
  }
  std::vector<Outcome> outcomes() {
    std::vector<Outcome> taken;
    std::vector<Notice> notices;
    reports.collect(taken, notices);
    return taken;
  }
  void lose() {
    group.lost = true;
    inbox.release(group);
  }
};

// -------------------------------------------------------------------------------------------------------------- Inbox

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
  // The same number twice is nonsense, and so is one from the past.
  desk.inbox.arrive(1, desk.header(5, 0, 4), &first, nullptr);
  desk.inbox.arrive(1, desk.header(5, 0, 4), &first, &desk);
  CHECK(desk.ucx.refused == std::vector<int>{1} && desk.ucx.released == std::vector<void*>{&desk});
  desk.inbox.arrive(1, desk.header(0, 0, 4), &first, nullptr);
  CHECK(desk.ucx.refused.size() == 2);
  desk.inbox.forget_early(1);
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
  // Too long, and of another dtype.
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
  Desk desk;  // the other rank is on another host: it has no process here
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
  // The sender closes without it.
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
  CHECK(taken == 9 && events.size() == 1 && !event.done());
  // An offer is somebody else's, and nonsense is nobody's.
  const Offer offer{reinterpret_cast<std::uint64_t>(&data), 1};
  Operation* op = desk.receive(&taken, 4, 0);
  header = desk.header(2, 0, 4);
  header.dtype |= kOffered;
  desk.inbox.arrive(1, header, &offer, nullptr);
  CHECK(desk.pulled == std::vector<Request*>{op});
  op->end(Status::kDone);
  header = desk.header(3, 0, 4);
  header.source = 0;  // not what peer 1 is
  desk.inbox.arrive(1, header, &data, nullptr);
  CHECK(desk.ucx.refused == std::vector<int>{1});
  header = desk.header(4, 0, 4);
  header.dtype |= kVouched;  // within a host nobody vouches
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

// -------------------------------------------------------------------------------------------------------------- Offers

// Two ranks of one process that share memory: this one's offers, and the other's.
struct Pair {
  static constexpr std::size_t kBytes = 3 * Segment::kSlot * 4;
  int fd = Segment::create(2);
  Desk here, there;
  Offers sender{here.ucx}, receiver{there.ucx};
  std::vector<std::byte> message = std::vector<std::byte>(kBytes), taken = std::vector<std::byte>(kBytes);

  Pair() {
    open(here, 0);
    there.group.rank = 1;
    open(there, 1);
    for (std::size_t at = 0; at < kBytes; ++at) message[at] = static_cast<std::byte>(at * 7 + at / 4096);
    sender.allow_assistance(true);
    receiver.allow_assistance(true);
  }
  ~Pair() { ::close(fd); }
  void open(Desk& desk, int rank) {
    desk.group.local = {0, 1};
    desk.group.shared = std::make_unique<Shared>(fd, rank, 2);
  }
  Operation* offer() {
    Operation* op = here.operation();
    Header header = here.group.header_to(1, 0, 5);
    header.bytes = kBytes;
    CHECK(sender.offer(here.group, 1, header, message.data(), op) == UCS_INPROGRESS);
    return op;
  }
  // The receiver has got the offer that was told last.
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
  answer.source = 0;  // from a rank that was not asked
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
  for (std::uint64_t slot = 0; slot < Segment::kPool; ++slot) CHECK(pair.sender.advance());
  CHECK(!pair.sender.advance());  // the pool is full
  while (pair.receiver.pulls()) {
    pair.receiver.advance();
    pair.sender.advance();
  }
  CHECK(pair.taken == pair.message);
  CHECK(pair.here.group.shared->segment.emptied(1) > 0);
  pair.sender.end_offer(pair.here.group, pair.there.ucx.told.back().header);
  CHECK(!pair.sender.assists() && pair.here.outcomes().size() == 1);
}

void offers_end_otherwise() {
  Pair pair;
  pair.offer();
  pair.pull(3);  // of another dtype: no byte is read, and the sender hears of it
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

// ------------------------------------------------------------------------------------------------------------- Windows

struct Office : Desk {
  Windows windows{ucx, false};
  std::int64_t memory[8] = {};

  explicit Office(bool near) {
    windows.map(group, 0, memory, sizeof memory, !near);
    windows.open(group, 0, 1, near ? memory : nullptr, near ? "" : "key", 4096, sizeof memory);
  }
  ~Office() { windows.destroy_keys(); }
};

void windows_near() {
  Office office(true);
  const std::int64_t give = 11;
  std::int64_t back = 0;
  office.windows.put(office.operation(), {0, 1, 8, 8}, &give);
  office.windows.get(office.operation(), {0, 1, 8, 8}, &back);
  CHECK(office.memory[1] == 11 && back == 11 && office.ucx.calls.empty());
  office.windows.change_atomically(office.operation(), {0, 1, 8, 8}, false, 5, 0);
  CHECK(office.memory[1] == 16);
  const auto outcomes = office.outcomes();
  CHECK(outcomes.size() == 3 && outcomes[2].details[0] == 11);
  bool thrown = false;
  auto op = std::make_unique<Operation>(office.reports, office.group, 99);
  try {
    office.windows.put(op.get(), {0, 1, 60, 8}, &give);
  } catch (const std::out_of_range&) {
    thrown = true;
  }
  CHECK(thrown);
  office.windows.close(office.group, 0);
}

void windows_far_keep_the_order() {
  Office office(false);
  std::int64_t data[2] = {};
  office.windows.put(office.operation(), {0, 1, 0, 8}, data);
  office.windows.put(office.operation(), {0, 1, 8, 8}, data);  // other bytes
  CHECK(office.ucx.calls == (std::vector<std::string>{"put", "put"}));
  office.windows.get(office.operation(), {0, 1, 0, 8}, data);  // the same bytes: it comes behind a flush
  CHECK(office.ucx.calls.back() == "flush" && office.windows.has_waiting_ops());
  office.ucx.finish();
  office.ucx.finish();
  CHECK(office.outcomes().size() == 2 && !office.windows.advance_lanes());
  office.ucx.finish();
  CHECK(office.windows.advance_lanes() && office.ucx.calls.back() == "get" && !office.windows.has_waiting_ops());
  office.windows.signal(office.operation(), 0, 1);  // behind the get
  CHECK(office.ucx.told.empty());
  office.ucx.finish();
  CHECK(office.windows.advance_lanes() && office.ucx.told[0].header.channel == kSignal);
  // An op on a window that closes does not begin any more.
  office.windows.put(office.operation(), {0, 1, 0, 8}, data);
  office.windows.get(office.operation(), {0, 1, 0, 8}, data);
  office.windows.close(office.group, 0);
  while (!office.ucx.under_way.empty()) office.ucx.finish();
  CHECK(office.ucx.calls.back() == "destroy");
  CHECK(office.reports.pending() == 0);
}

void windows_serve_and_ask_atomics() {
  Office office(false);
  office.windows.change_atomically(office.operation(), {0, 1, 8, 8}, false, 5, 0);
  CHECK(office.ucx.told[0].header.channel == kAtomic);
  Atomic asked;
  std::memcpy(&asked, office.ucx.told[0].what.data(), sizeof asked);
  Header answer = office.header(0, static_cast<std::int64_t>(asked.number), 0);
  answer.value = 77;
  answer.source = 0;  // which was not asked
  office.windows.end_atomic(office.group, answer);
  CHECK(office.outcomes().empty());
  answer.source = 1;
  office.windows.end_atomic(office.group, answer);
  CHECK(office.outcomes()[0].details[0] == 77);
  Header question = office.header(0, 0, sizeof asked);
  office.windows.serve_atomic(office.group, question, &asked);
  CHECK(office.memory[1] == 5 && office.ucx.told.back().header.channel == kAtomicAnswer);
  asked.offset = 60;
  office.windows.serve_atomic(office.group, question, &asked);
  CHECK(office.ucx.refused == std::vector<int>{1});
}

void windows_signal() {
  Office office(true);
  Header header = office.header(0, 0, 0);
  office.windows.accept_signal(office.group, header);
  office.windows.wait_signal(office.operation(), 0, 1);
  office.windows.wait_signal(office.operation(), 0, 1);
  CHECK(office.outcomes().size() == 1);
  office.windows.accept_signal(office.group, header);
  CHECK(office.outcomes().size() == 1);
  office.windows.wait_signal(office.operation(), 0, 1);
  Request* withdrawn = office.windows.withdraw_wait(office.group, 0, 1, office.last_ticket);
  CHECK(withdrawn != nullptr);
  office.reports.withdraw();
  delete withdrawn;
  office.windows.wait_signal(office.operation(), 0, 1);
  office.group.left[1] = 1;
  office.windows.end_waits(office.group, 1);
  office.windows.wait_signal(office.operation(), 0, 1);
  const auto outcomes = office.outcomes();
  CHECK(outcomes.size() == 2 && outcomes[0].status == Status::kClosed && outcomes[1].status == Status::kClosed);
}

void windows_are_lost() {
  Office office(false);
  std::int64_t data = 0;
  office.windows.put(office.operation(), {0, 1, 0, 8}, &data);
  office.windows.get(office.operation(), {0, 1, 0, 8}, &data);
  office.windows.wait_signal(office.operation(), 0, 1);
  office.group.lost = true;
  office.windows.release(office.group);
  CHECK(office.outcomes().size() == 2 && office.group.users == 1);  // UCX holds the put
  while (!office.ucx.under_way.empty()) office.ucx.finish(UCS_ERR_CANCELED);
  CHECK(office.outcomes()[0].status == Status::kDropped && office.group.users == 0);
  office.windows.close_lanes(office.group);
}

// ----------------------------------------------------------------------------------------------------------- Farewells

void farewells_wait_for_messages() {
  Farewells farewells(2);
  const Farewell sent{Farewell::kCommunicator, 3, 7, 1, 42};
  Farewell got;
  CHECK(Farewell::unpack(sent.pack(), got) && got.order == 3 && got.group == 7 && got.collectives == 42);
  CHECK(!Farewell::unpack("B", got) && !Farewell::unpack("X" + sent.pack().substr(1), got));
  farewells.add(1, got);
  CHECK(farewells.take_due(1, 2).empty() && farewells.waiting(1));
  CHECK(farewells.take_due(1, 3).size() == 1 && !farewells.waiting(1));
  farewells.expect_acknowledgement(1, true);
  CHECK(!farewells.all_acknowledged());
  farewells.expect_acknowledgement(1, false);
  CHECK(farewells.all_acknowledged());
}

}  // namespace
}  // namespace aiocomms

int main() {
  using namespace aiocomms;
  for (auto test : {pacer_spins,
                    pacer_waits_as_long_as_it_has_worked,
                    pacer_in_a_crowd,
                    pacer_hands_over,
                    pacer_parks_the_loop,
                    pacer_ticks_lingers_dozes_and_sleeps,
                    pacer_on_two_threads,
                    inbox_restores_the_order,
                    inbox_matches,
                    inbox_fetches,
                    inbox_waits_for_vouches,
                    inbox_hands_on,
                    inbox_drops,
                    offers_are_pulled,
                    offers_are_assisted,
                    offers_end_otherwise,
                    windows_near,
                    windows_far_keep_the_order,
                    windows_serve_and_ask_atomics,
                    windows_signal,
                    windows_are_lost,
                    farewells_wait_for_messages}) {
    test();
  }
  std::printf("%u checks, %u failures\n", checks, failures);
  return failures ? 1 : 0;
}
