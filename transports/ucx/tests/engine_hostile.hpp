// Random messages of a process with a worker's address and no cookie, and of a rank that sends invalid messages.
// Headers and payloads come from a seed. No engine crashes, foreign memory does not change, and the other ranks
// continue.
#pragma once

#include <algorithm>
#include <array>

#include "engine_collectives.hpp"

namespace aiocomms {

constexpr std::size_t kCanaries = 4096;  // bytes before and behind a window
constexpr std::byte kCanary{0x5A};

// Sends to rank 0 in the name of another rank, which sends nothing itself.
class Intruder {
 public:
  Intruder(World& world, int as, bool knows)
      : random_(world.seed),
        as_(static_cast<std::uint32_t>(as)),
        group_(world.ids[0]),
        large_(300'000, std::byte{1}),
        worker_({{"TLS", "^sysv,tcp"}}, {}, [](int, const Header&, const void*, void*) {}, [](int) {}) {
    const std::uint64_t cookie = knows ? world.cookie(as, 0) : world.cookie(as, 0) ^ (1ull << random_.below(64));
    worker_.make_room(2);
    const std::string address = world.ranks[0]->engine->address();
    worker_.introduce(0, address, false, {cookie, 0}, as_);
    worker_.introduce(1, address, false, {cookie, 0}, static_cast<std::uint32_t>(random_.below(1ull << 32)));
  }
  ~Intruder() {
    settle(kPatience);
    expect(worker_.unfinished() == 0, "%d messages of an intruder are not let go of", worker_.unfinished());
    worker_.disconnect([ends = now_ns() + 1'000'000'000] { return now_ns() < ends; });
  }

  void send_any() {
    Header header = any_header();
    const int to = random_.below(16) == 0 ? 1 : 0;  // the same rank, but with a wrong number of the sender
    if (random_.below(8) == 0) {                    // A message of this size stays with its sender for a while.
      header.bytes = large_.size();
      worker_.send(to, header, large_.data(), Memory::kOwn, nullptr);
    } else {
      std::array<std::byte, 64> payload;
      for (std::byte& it : payload) it = static_cast<std::byte>(random_.below(256));
      std::size_t bytes = random_.below(payload.size() + 1);
      if (header.dtype & kOffered && random_.below(2)) bytes = sizeof(Offer);
      if (header.channel == kAtomic && random_.below(2)) bytes = any_atomic(payload.data(), header);
      worker_.tell(to, header, payload.data(), bytes, nullptr);
    }
    settle(1);
  }
  // An invalid message: it has fewer bytes than its header says.
  void send_nonsense() {
    Header header{.group = group_, .source = static_cast<std::uint16_t>(as_), .dtype = 4, .bytes = ~0ull};
    worker_.tell(0, header, nullptr, 0, nullptr);
  }
  // Sends the messages that find room, for at most `most` ms.
  void settle(std::uint64_t most) {
    const std::uint64_t ends = now_ns() + most * 1'000'000;
    do {
      worker_.progress();
    } while (worker_.unfinished() > 0 && now_ns() < ends);
  }

 private:
  Header any_header() {
    static constexpr std::uint8_t kChannels[] = {0,       kSchedule, kSignal,       kAtomic, kAnswer,
                                                 kAssist, kVouch,    kAtomicAnswer, 255};
    static constexpr std::uint64_t kSizes[] = {0, 1, 16, 40, 64, 1ull << 31, 1ull << 63, ~0ull};
    Header header{.group = group_,
                  .source = static_cast<std::uint16_t>(as_),
                  .channel = kChannels[random_.below(std::size(kChannels))],
                  .dtype = static_cast<std::uint8_t>(4 | (random_.below(3) ? 0 : kOffered)),
                  .tag = static_cast<std::int64_t>(random_.below(4)),
                  .bytes = kSizes[random_.below(std::size(kSizes))],
                  .value = random_.below(3)};
    auto raw = reinterpret_cast<unsigned char*>(&header);
    for (std::uint64_t flips = random_.below(3); flips > 0; --flips) {
      raw[random_.below(offsetof(Header, cookie))] ^= static_cast<unsigned char>(1u << random_.below(8));
    }
    return header;
  }
  std::size_t any_atomic(std::byte* payload, Header& header) {
    static constexpr std::uint64_t kOffsets[] = {0, 8, 56, 60, 64, 1ull << 32, ~0ull, ~7ull};
    static constexpr std::uint32_t kWidths[] = {0, 4, 8, 16};
    const Atomic what{kOffsets[random_.below(8)], 1, 2, kWidths[random_.below(4)], 0, random_.below(3)};
    std::memcpy(payload, &what, sizeof what);
    header.tag = 0;
    header.bytes = sizeof what;
    header.dtype = 0;
    return sizeof what;
  }

  Random random_;
  std::uint32_t as_, group_;
  std::vector<std::byte> large_;
  Worker worker_;
};

inline bool misled(const Rank& rank) {
  return std::any_of(rank.notices.begin(), rank.notices.end(),
                     [](const Notice& it) { return it.kind == Notice::kMisled; });
}

// Ranks 0 and 1 continue while messages reach rank 0 in the name of rank 2.
template <class GoOn>
void attacked(Rank& rank, bool knows, GoOn go_on) {
  Comm pair(rank, {0, 1}), all(rank, {0, 1, 2});
  if (rank.number == 2) {
    Intruder intruder(rank.world, 2, knows);
    for (int sent = 0; sent < (knows ? 20 : 400); ++sent) intruder.send_any();
    // A farewell is only valid for the rank itself. (The first communicator of rank 0 is that of ranks 0 and 1.)
    if (knows) rank.engine->send_frame(0, Farewell{Farewell::kCommunicator, 0, 0, 1, 0}.pack());
    if (knows) intruder.send_nonsense();
    intruder.settle(100);
    for (int phase = 0; phase < 3; ++phase) {
      rank.world.meeting.arrive_and_wait();
      intruder.settle(20);
    }
  } else {
    std::vector<std::byte> memory(2 * kCanaries + 64, kCanary);
    Ints taken(16, -1);
    if (rank.number == 0) {
      rank.engine->map_window(all.group, 0, memory.data() + kCanaries, 64, false);
      for (std::int64_t tag = 0; tag < 4; ++tag) {
        rank.post([&](Ticket ticket) {
          return rank.engine->recv(ticket, all.group, taken.data() + 4 * tag, 16, 2, 0, tag, 4);
        });
      }
    }
    go_on(pair);
    rank.world.meeting.arrive_and_wait();
    go_on(pair);
    if (rank.number == 0) {
      if (knows) rank.wait_for([](const Notice& it) { return it.kind == Notice::kMisled && it.peer == 2; }, "nonsense");
      expect(knows || !misled(rank), "a stranger is taken for a rank");
      expect(std::count_if(rank.notices.begin(), rank.notices.end(),
                           [](const Notice& it) { return it.kind == Notice::kMisled; }) == (knows ? 1 : 0),
             "nonsense is told of more than once");
      expect(knows || taken == Ints(16, -1), "a stranger's message is received");
      for (std::size_t at : {std::size_t{0}, kCanaries + 64}) {
        expect(std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(at),
                           memory.begin() + static_cast<std::ptrdiff_t>(at + kCanaries),
                           [](std::byte it) { return it == kCanary; }),
               "memory around a window is written");
      }
    }
    rank.world.meeting.arrive_and_wait();
    rank.engine->lose_group(all.group);
    if (rank.number == 0) rank.engine->close_window(all.group, 0);
    rank.engine->close_group(all.group);
    rank.engine->close_group(pair.group);
    rank.world.meeting.arrive_and_wait();  // The kept messages are released by now, so the intruder may end.
  }
  rank.world.meeting.arrive_and_wait();
  rank.close(false);
}

}  // namespace aiocomms
