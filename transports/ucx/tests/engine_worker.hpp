// Two workers without an engine: the contract between UCX and the worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine_world.hpp"

namespace aiocomms {

// A receiver may release a message at once. A large message then also ends for its sender.
inline void unwanted() {
  constexpr int kMessages = 20;
  const std::vector<std::pair<std::string, std::string>> options{{"TLS", "^sysv,tcp"}};
  const std::vector<std::byte> large(300'000);
  int arrived = 0;
  Worker* takes = nullptr;
  const auto drop = [&](int, const Header&, const void*, void* descriptor) {
    ++arrived;
    if (descriptor) takes->release(descriptor);
  };
  Worker taker(options, {}, drop, [](int) {});
  Worker giver(options, {}, [](int, const Header&, const void*, void*) {}, [](int) {});
  takes = &taker;
  giver.make_room(2);
  taker.make_room(1);
  giver.introduce(1, taker.address(), false, {7, 9}, 0);
  taker.introduce(0, giver.address(), false, {9, 7}, 1);
  for (int sent = 0; sent < kMessages; ++sent) {
    const Header header{.dtype = 4, .bytes = large.size()};
    giver.send(1, header, large.data(), Memory::kOwn, nullptr);
  }
  const std::uint64_t ends = when_patience_ends();
  while ((arrived < kMessages || giver.unfinished() > 0) && now_ns() < ends) {
    giver.progress();
    taker.progress();
  }
  expect(arrived == kMessages && giver.unfinished() == 0, "%d messages have come, %d stay with their sender", arrived,
         giver.unfinished());
  giver.disconnect([&] { return taker.progress(), now_ns() < ends; });
  taker.disconnect([&] { return now_ns() < ends; });
}

}  // namespace aiocomms
