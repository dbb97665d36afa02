// Tests with a parked loop and a sleeping engine thread. A third thread that makes progress must wake both. On a busy
// machine either may lack a core for long. Here it lacks one until the test is over.
#pragma once

#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine_coming.hpp"

namespace aiocomms {

inline std::unique_ptr<Engine> engine_without_thread() {
  const std::vector<std::pair<std::string, std::string>> options{{"TLS", "^sysv,tcp"}};
  return std::make_unique<Engine>(0, options, std::nullopt);
}

// Acts as a parked loop. Returns whether it is woken, and gets the expected outcome of a ticket.
inline bool is_told(Engine& engine, Ticket ticket, Status status) {
  if (!becomes_readable(engine.fileno())) return false;
  std::vector<Outcome> outcomes;
  std::vector<Notice> notices;
  engine.progress(outcomes, notices);
  return outcomes.size() == 1 && outcomes[0].ticket == ticket && outcomes[0].status == status;
}

// Another thread parts from a peer that does not answer, or gives up a communicator. This ends the loop's op. The
// engine's own thread has not started.
inline void ends_beside_a_parked_loop(std::uint64_t seed) {
  const auto near = engine_without_thread(), far = engine_without_thread(), silent = engine_without_thread();
  const Visit visit(*near, *far, 1, seed), other(*near, *silent, 2, seed + 1);
  std::int32_t given = 7, taken = 0, never = 0;
  far->start();
  near->recv(1, visit.at_hub, &taken, sizeof taken, 1, 0, 3, 4);
  std::thread parting([&] { near->part({2}, true, kPatience * 1e-3); });
  far->send(1, visit.at_guest, &given, sizeof given, 0, 0, 3, 4);
  expect(is_told(*near, 1, Status::kDone) && taken == given, "a loop does not hear what another thread has received");
  near->recv(2, visit.at_hub, &never, sizeof never, 1, 0, 3, 4);
  std::thread losing([&] { near->lose_group(visit.at_hub); });
  losing.join();
  expect(is_told(*near, 2, Status::kDropped), "a loop does not hear what another thread has given up");
  near->start();
  silent->start();  // Only now the third engine answers.
  parting.join();
  for (Engine* engine : {near.get(), far.get(), silent.get()}) engine->close(false, 0);
}

// The loop takes large messages, each within its post, and then stops. UCX has no room for so many answers.
inline void leaves_answers_behind(std::uint64_t seed) {
  constexpr Ticket kMessages = 700;  // more than twice as many as UCX keeps for a peer
  constexpr std::size_t kCount = 16'384;
  const auto near = engine_without_thread(), far = engine_without_thread();
  const Visit visit(*near, *far, 1, seed);
  near->start();
  far->start();
  const Ints given = filled(1, kCount, seed);
  Ints taken(kCount);
  std::unordered_set<Ticket> ended;
  const auto until = [](const auto& is, const auto& turn, const char* what) {
    for (const std::uint64_t ends = when_patience_ends(); !is(); turn()) {
      if (!expect(now_ns() < ends, "%s in vain", what)) return;
      usleep(100);
    }
  };
  const auto turn = [&] {
    std::vector<Outcome> outcomes;
    std::vector<Notice> notices;
    far->progress(outcomes, notices);
    for (const Outcome& outcome : outcomes) ended.insert(outcome.ticket);
  };
  for (Ticket ticket = 1; ticket <= kMessages; ++ticket) {
    far->send(ticket, visit.at_guest, given.data(), kCount * 4, 0, 0, 3, 4);
  }
  until([&] { return EngineInside::received(*near, 1) == kMessages; }, turn, "messages are waited for");
  until([&] { return EngineInside::thread_sleeps(*near); }, [] {}, "an engine's thread is awake");
  {
    const auto away = EngineInside::hold(*far);  // as if it had no core
    for (Ticket ticket = 1; ticket <= kMessages; ++ticket) {
      near->recv(ticket, visit.at_hub, taken.data(), kCount * 4, 1, 0, 3, 4);
    }
  }
  until([&] { return ended.size() == kMessages; }, turn, "answers are waited for");
  matches(taken, 1, seed, "the last of many large messages");
  for (Engine* engine : {near.get(), far.get()}) engine->close(false, 0);
}

inline unsigned beside(std::uint64_t seed) {
  ends_beside_a_parked_loop(seed);
  leaves_answers_behind(2 * seed);  // Each engine may then read the other's memory.
  return 2;
}

}  // namespace aiocomms
