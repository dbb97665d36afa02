// Engines that join and leave another one, in order or not, while others continue.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine_collectives.hpp"
#include "engine_given_up.hpp"

namespace aiocomms {

constexpr std::uint32_t kHub = 1;  // each guest's number of the hub
constexpr int kGuests = 4;
constexpr std::size_t kVisit[] = {1, 5'000, 300'000};  // elements of a message

// Introduces two engines to each other, with common memory.
class Visit {
 public:
  Visit(Engine& hub, Engine& guest, int number, std::uint64_t seed) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
    hub.introduce(number, {guest.address(), Socket(pair[0]), getpid(), {seed, ~seed}, kHub}, 1024);
    guest.introduce(kHub, {hub.address(), Socket(pair[1]), getpid(), {~seed, seed}, static_cast<std::uint32_t>(number)},
                    1024);
    const int segment = Segment::create(2, false);
    at_hub = hub.add_group(0, {0, number});
    at_guest = guest.add_group(1, {static_cast<int>(kHub), 0});
    const bool readable = seed % 2 == 0;
    hub.open_group(at_hub, {at_hub, at_guest}, segment, false, {0, 0}, readable, seed % 3 == 0);
    guest.open_group(at_guest, {at_hub, at_guest}, segment, false, {0, 0}, readable, seed % 3 == 0);
    ::close(segment);
  }
  std::uint32_t at_hub, at_guest;
};

// Messages of all sizes, in both directions between two ranks.
inline void exchange(Rank& rank, std::uint32_t group, int me, std::uint64_t round) {
  for (std::size_t count : kVisit) {
    const Ints give = filled(me, count, round);
    Ints take(count);
    const Ticket recv = rank.post(
        [&](Ticket ticket) { return rank.engine->recv(ticket, group, take.data(), count * 4, 1 - me, 0, 3, 4); });
    const Ticket send = rank.post(
        [&](Ticket ticket) { return rank.engine->send(ticket, group, give.data(), count * 4, 1 - me, 0, 3, 4); });
    rank.finish(send, "a guest's or its host's send");
    rank.finish(recv, "a guest's or its host's receive");
    matches(take, 1 - me, round, "what a guest and its host have sent");
  }
}

// One guest of a hub with other guests. It leaves before or after the hub, or without a farewell while the hub waits
// for it.
enum class Leaves { kFirst, kLast, kSilently };

inline void be_guest(Rank& rank, std::uint32_t group, Leaves how, std::barrier<>& meeting) {
  exchange(rank, group, 1, 1);
  meeting.arrive_and_wait();
  if (how == Leaves::kSilently) return rank.close(false);
  if (how == Leaves::kLast)
    rank.wait_for([](const Notice& it) { return it.kind == Notice::kLeft; }, "the hub's leaving");
  rank.engine->close_group(group);
  rank.close(true);
}

inline void be_hub(Rank& rank, std::uint32_t group, int number, Leaves how, std::barrier<>& meeting) {
  exchange(rank, group, 0, 1);
  meeting.arrive_and_wait();
  if (how == Leaves::kFirst) {
    rank.wait_for([&](const Notice& it) { return it.kind == Notice::kLeft && it.group == group; }, "a guest's leaving");
  }
  if (how == Leaves::kSilently) {
    Ints never(1);
    const Ticket recv =
        rank.post([&](Ticket ticket) { return rank.engine->recv(ticket, group, never.data(), 4, 1, 0, 9, 4); });
    rank.wait_for([&](const Notice& it) { return it.kind == Notice::kLost && it.peer == number; }, "a guest's death");
    rank.engine->lose_group(group);
    expect(rank.wait(recv).status == Status::kDropped, "a receive from a guest that is gone does not end");
  }
  rank.engine->close_group(group);
  bool clean = false;
  std::thread parting([&] { clean = rank.engine->part({number}, how != Leaves::kSilently, 60.0); });
  parting.join();
  expect(clean || how == Leaves::kSilently, "UCX keeps something of a guest that has left in order");
}

// After a death each engine must show by an echo, without its loop, that its messages still arrive. Otherwise it counts
// as silent, even if its control connection works.
inline void deaths_and_echoes(Rank& hub, std::uint64_t seed) {
  const auto heard = [&] { return hub.engine->signs({1}).front(); };
  std::uint64_t refused = 0;
  for (int number = 100; number < 102; ++number) {
    if (number == 101) {  // as if a queue had stopped
      EngineInside::refuse(*hub.engine, 1);
    }
    World away(1, Spread::kOne, seed);
    Rank& guest = *away.ranks[0];
    const Visit visit(*hub.engine, *guest.engine, number, seed);
    guest.close(false);
    hub.wait_for([&](const Notice& it) { return it.kind == Notice::kLost && it.peer == number; }, "a death");
    const std::uint64_t died = now_ns();
    if (number == 101) refused = died;
    hub.engine->lose_group(visit.at_hub);
    hub.engine->close_group(visit.at_hub);
    hub.engine->part({number}, false, 60.0);
    if (!refused) hub.look_until([&] { return heard() > died; }, "a sign of life of the other");
  }
  const std::uint64_t asks = now_ns();
  hub.look_until([&] { return EngineInside::heard(*hub.engine, 1) > asks; }, "the other's control connection");
  expect(heard() < refused, "one whose messages do not come counts as alive");
}

// The hub continues with one guest while the others join and leave.
inline unsigned comings_and_goings(std::uint64_t seed) {
  World home(1, Spread::kOne, seed), constant(1, Spread::kOne, seed + 1);
  Rank& hub = *home.ranks[0];
  Rank& friend_ = *constant.ranks[0];
  const Visit stays(*hub.engine, *friend_.engine, 1, seed);
  for (int number = 2; number < 2 + kGuests; ++number) {
    const Leaves how = static_cast<Leaves>(number % 3);
    World away(1, Spread::kOne, seed + static_cast<std::uint64_t>(number));
    Rank& guest = *away.ranks[0];
    const Visit visit(*hub.engine, *guest.engine, number, seed + static_cast<std::uint64_t>(number));
    std::barrier meeting(2);
    std::thread at_guest([&] { be_guest(guest, visit.at_guest, how, meeting); });
    std::thread at_friend([&] { exchange(friend_, stays.at_guest, 1, 2); });
    std::thread at_hub([&] {
      be_hub(hub, visit.at_hub, number, how, meeting);
      exchange(hub, stays.at_hub, 0, 2);
    });
    for (std::thread* thread : {&at_guest, &at_friend, &at_hub}) thread->join();
  }
  deaths_and_echoes(hub, seed);
  std::thread at_friend([&] {
    friend_.engine->close_group(stays.at_guest);
    friend_.close(true);
  });
  hub.engine->close_group(stays.at_hub);
  hub.close(true);
  at_friend.join();
  return 2 + kGuests;
}

}  // namespace aiocomms
