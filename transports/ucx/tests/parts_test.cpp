// The parts of the engine, each alone.
#include "parts.hpp"

#include <sched.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "engine/closing.hpp"
#include "engine/notes.hpp"
#include "words/yielding_copy.hpp"

namespace aiocomms {
namespace {

void farewells_wait_for_messages() {
  Farewells farewells;
  farewells.make_room(2);
  const Farewell sent{Farewell::kCommunicator, 3, 7, 1, 42};
  Farewell got;
  CHECK(Farewell::unpack(sent.pack(), got) && got.order == 3 && got.group == 7 && got.collectives == 42);
  CHECK(!Farewell::unpack("B", got) && !Farewell::unpack("X" + sent.pack().substr(1), got));
  farewells.add(1, got);
  CHECK(farewells.take_due(1, 2).empty() && farewells.waiting(1));
  CHECK(farewells.take_due(1, 3).size() == 1 && !farewells.waiting(1));
  const std::uint32_t last = ~std::uint32_t{0};  // After this number the numbers of messages restart at 0.
  farewells.add(1, {Farewell::kCommunicator, last, 7, 1, 42});
  farewells.add(1, {Farewell::kCommunicator, 1, 8, 1, 42});
  CHECK(farewells.take_due(1, last - 1).empty());
  CHECK(farewells.take_due(1, last).size() == 1 && farewells.take_due(1, 0).empty());
  CHECK(farewells.take_due(1, 1).size() == 1);
  farewells.expect_acknowledgement(1, true);
  CHECK(!farewells.acknowledged(1) && farewells.acknowledged(0));
  farewells.expect_acknowledgement(1, false);
  CHECK(farewells.acknowledged(1));
}

void notes_wait_to_be_taken() {
  Notes notes;
  std::uint64_t added = 0;
  notes.add(1, "N");
  notes.add(2, "Nothing else");
  notes.add(2, "N" + std::string(4096, 'o'));  // too long
  CHECK(read(notes.fileno(), &added, sizeof added) == sizeof added && added == 2);
  CHECK((notes.take() == std::vector<Notes::Note>{{1, "N"}, {2, "Nothing else"}}) && notes.take().empty());
  for (int peer = 0; peer < 5000; ++peer) notes.add(peer, "N");
  const std::vector<Notes::Note> taken = notes.take();
  CHECK(taken.size() == 4096 && taken.back().first == 4095);
  notes.add(7, "N");
  CHECK(notes.take().size() == 1);
}

// A message of a communicator that UCX still handles.
struct InUcxsHands final : Pending {
  explicit InUcxsHands(Group& the_group) : group(the_group) { ++group.users; }
  ~InUcxsHands() override { --group.users; }
  void finished(ucs_status_t) noexcept override { delete this; }
  Group& group;
};

// The collectives of a lost communicator end once UCX has released its messages, whether it is closed by then or not.
void what_is_lost_ends_when_ucx_lets_go(bool closed_before, bool closed_at_once) {
  Desk desk;
  Group& group = desk.groups.at(desk.groups.add(0, {0, 1}));
  desk.reports.make_room();
  auto op = new Operation(desk.reports, group, 1);
  op->leave_post(0);
  group.schedules.push_back({Task(), 0, op});
  auto message = new InUcxsHands(group);
  desk.groups.lose(group);
  if (closed_before) {
    desk.groups.lose(group);  // as a close does
    desk.groups.close(group);
  }
  desk.groups.reap();
  CHECK(desk.outcomes().empty());
  message->finished(UCS_OK);
  if (closed_at_once) {
    desk.groups.lose(group);
    desk.groups.close(group);
  }
  desk.groups.reap();
  const std::vector<Outcome> ended = desk.outcomes();
  CHECK(ended.size() == 1 && ended[0].ticket == 1 && ended[0].status == Status::kDropped);
  desk.groups.reap();
}

void what_is_lost_ends() {
  what_is_lost_ends_when_ucx_lets_go(false, false);
  what_is_lost_ends_when_ucx_lets_go(true, false);
  what_is_lost_ends_when_ucx_lets_go(false, true);
}

// A copy runs on a thread of the lowest priority. The thread that waits for it keeps its own priority.
void a_copy_gives_way() {
  int policy = -1;
  const int before = sched_getscheduler(0);
  give_way([&] { policy = sched_getscheduler(0); });
  CHECK(policy == SCHED_IDLE);
  CHECK(sched_getscheduler(0) == before);
}

// Two layers of two rows of three elements, from rows of four into contiguous rows of three.
void a_copy_keeps_to_its_strides() {
  int from[16], to[13] = {};
  for (int i = 0; i < 16; ++i) from[i] = i;
  const std::vector<Dim> dims{{2, 24, 32}, {2, 12, 16}, {3, 4, 4}};
  YieldingCopy().copy(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from + 1), dims, 4);
  const int wanted[13] = {1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 0};
  CHECK(std::memcmp(to, wanted, sizeof to) == 0);
  int whole[16] = {}, one = 0;
  YieldingCopy().copy(reinterpret_cast<std::byte*>(whole), reinterpret_cast<const std::byte*>(from),
                      {{4, 16, 16}, {4, 4, 4}}, 4);
  CHECK(std::memcmp(whole, from, sizeof whole) == 0);
  YieldingCopy().copy(reinterpret_cast<std::byte*>(&one), reinterpret_cast<const std::byte*>(from + 7), {}, 4);
  CHECK(one == 7);
  std::vector<std::byte> large(3 * kBetweenYields + 5), there(large.size());
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<std::byte>(i % 251);
  YieldingCopy().copy(there.data(), large.data(), {{large.size(), 1, 1}}, 1);
  CHECK(there == large);
  YieldingCopy stopped;
  stopped.stop();
  stopped.copy(there.data(), large.data() + 1, {{large.size() - 1, 1, 1}}, 1);
  CHECK(there == large);
}

}  // namespace
}  // namespace aiocomms

int main() {
  using namespace aiocomms;
  for (auto test : {test_board, test_pacer, test_inbox, test_offers, test_pool, test_windows, test_filling, test_speeds,
                    farewells_wait_for_messages, notes_wait_to_be_taken, what_is_lost_ends, a_copy_gives_way,
                    a_copy_keeps_to_its_strides}) {
    test();
  }
  std::printf("%u checks, %u failures\n", checks, failures);
  return failures ? 1 : 0;
}
