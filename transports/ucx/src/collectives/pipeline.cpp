#include "collectives/pipeline.hpp"

#include <algorithm>
#include <optional>
namespace aiocomms {
namespace {

// A published round that this rank has not read yet.
struct Round {
  std::size_t unit, round;
  std::uint64_t number;
};

std::uint64_t rounds_of(const Stages& stages) {
  std::uint64_t rounds = 0;
  for (std::size_t unit = 0; unit < stages.units(); ++unit) rounds += stages.contributions(unit) + stages.results(unit);
  return rounds;
}

// On networks of 50 Gbit/s and more, these bytes take no longer than the fixed cost of a message.
constexpr std::size_t kSmallestMessage = 8 * 1024;

}  // namespace

std::size_t unit_for(std::size_t bytes, std::size_t messages) {
  return std::clamp(rounded_up(divided_up(bytes, 8), kLine), messages * kSmallestMessage, messages * kSegment);
}

Task run_pipeline(std::unique_ptr<Stages> stages) {
  Shared* const shared = stages->reach.shared;
  const std::size_t units = stages->units(), ahead = Stages::kAhead;
  // Numbers before the first unit have wrapped, and are none.
  const auto is_unit = [=](std::size_t unit) { return unit < units; };
  const std::uint64_t meeting = shared ? shared->take(rounds_of(*stages)) : 0;
  std::uint64_t next = meeting;
  std::optional<Round> contributed, given;
  for (std::size_t turn = 0; turn < units + 2 * ahead + 2; ++turn) {
    const std::size_t reduced = turn - 1, returned = reduced - ahead, done = returned - ahead;
    const std::size_t contributions = is_unit(turn) ? stages->contributions(turn) : 0;
    const std::size_t results = is_unit(done) ? stages->results(done) : 0;
    for (std::size_t beat = 0; beat < std::max({contributions, results, std::size_t{1}}); ++beat) {
      std::optional<Round> now_contributed, now_given;
      if (beat < contributions) {
        co_await shared->writable(next);
        stages->contribute(turn, beat, next);
        shared->publish(next);
        now_contributed = Round{turn, beat, next++};
      }
      if (contributed) {
        co_await shared->all(contributed->number);
        stages->reduce(contributed->unit, contributed->round, contributed->number);
        shared->finish(contributed->number);
      }
      if (beat == 0 && is_unit(reduced)) stages->exchange(reduced);
      if (given) {
        if (given->number == meeting) co_await shared->all(meeting);
        for (std::size_t place = 0; place < static_cast<std::size_t>(shared->ranks()); ++place) {
          if (!stages->takes(given->unit, given->round, place)) continue;
          co_await shared->one(static_cast<int>(place), given->number);
          stages->take(given->unit, given->round, place, given->number);
        }
        shared->finish(given->number);
      }
      if (beat == 0 && is_unit(returned)) {
        for (Slot& message : stages->first.of(returned)) co_await message;
        stages->first.end(returned);
        stages->return_results(returned);
      }
      if (beat == 0 && is_unit(done)) {
        for (Slot& message : stages->second.of(done)) co_await message;
        stages->second.end(done);
      }
      if (beat < results) {
        co_await shared->writable(next);
        stages->give(done, beat, next);
        shared->publish(next);
        now_given = Round{done, beat, next++};
      }
      contributed = now_contributed;
      given = now_given;
      if (shared) co_await shared->turn();
    }
  }
}

}  // namespace aiocomms
