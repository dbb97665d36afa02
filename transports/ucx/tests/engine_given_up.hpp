// Ranks give up lanes at random moments, several at once, while other lanes continue. Successful results are correct,
// even if a rank overwrites the memory of a dropped op. Nothing is kept of a lane that all ranks have given up.
#pragma once

#include <memory>
#include <set>
#include <vector>

#include "engine_lanes.hpp"

namespace aiocomms {

// The messages between ranks that give up a lane, as in aiocomms. Each rank sends one to every other rank, behind all
// messages of the lane.
class GivingUp {
 public:
  explicit GivingUp(Comm& comm) : comm_(comm), words_(comm.size(), Ints(1)), ears_(comm.size()) {
    for (int other = 0; other < comm.size(); ++other) listen(other);
  }
  static std::uint64_t number(std::int32_t lane) { return 1ull << 60 | static_cast<std::uint64_t>(lane); }
  bool gave_up(std::int32_t lane) const { return lanes_.contains(lane); }
  std::size_t heard() const { return heard_; }

  void give_up(std::int32_t lane) {
    if (!lanes_.insert(lane).second) return;
    comm_.rank.engine->give_up_lane(comm_.group, number(lane));
    for (int other = 0; other < comm_.size(); ++other) {
      if (other == comm_.me) continue;
      auto word = std::make_shared<Ints>(1, lane);
      told_.push_back({comm_.rank.post([&](Ticket ticket) {
                         return comm_.rank.engine->send(ticket, comm_.group, word->data(), 4, other, 1, kTag, 4);
                       }),
                       [word] {}});
    }
  }
  void hear() {
    for (int other = 0; other < comm_.size(); ++other) {
      while (other != comm_.me && comm_.rank.ended(ears_[other])) {
        comm_.rank.finish(ears_[other], "a word of a lane that is given up");
        const std::int32_t lane = words_[other][0];
        listen(other);
        give_up(lane);
        comm_.rank.engine->forget_lane(comm_.group, number(lane), other);
        ++heard_;
      }
    }
  }
  void close() {
    end(comm_.rank, told_);
    for (int other = 0; other < comm_.size(); ++other) {
      if (other != comm_.me) expect(comm_.rank.engine->cancel(comm_.group, other, 1, kTag, ears_[other]), "more words");
    }
  }

 private:
  static constexpr std::int64_t kTag = 1ll << 61;

  void listen(int other) {
    if (other == comm_.me) return;
    ears_[other] = comm_.rank.post([&](Ticket ticket) {
      return comm_.rank.engine->recv(ticket, comm_.group, words_[other].data(), 4, other, 1, kTag, 4);
    });
  }

  Comm& comm_;
  std::set<std::int32_t> lanes_;
  std::vector<Ints> words_;
  std::vector<Ticket> ears_;
  std::vector<Op> told_;
  std::size_t heard_ = 0;
};

// A collective of a lane that may be given up.
struct Risked {
  std::int32_t lane;
  std::uint64_t round;
  int root;  // of a broadcast, or -1 for an all_reduce
  std::unique_ptr<Ints> data;
  Ticket ticket;
  bool over = false;
};

inline Risked post_risked(Comm& comm, std::int32_t lane, Random& common, std::uint64_t round) {
  static const std::vector<std::size_t> kSizes = {0, 3, 3, 900, 5000, 40'000};
  const std::size_t count = common.of(kSizes);
  const int root = static_cast<int>(common.below(static_cast<std::uint64_t>(comm.size()) + 2)) - 2;
  Risked it{lane, round, std::max(root, -1), std::make_unique<Ints>(filled(comm.me, count, round)), 0};
  comm.lane = GivingUp::number(lane);
  it.ticket = comm.collective(static_cast<std::uint64_t>(90 + it.root), [&](auto& on, Unequal&) {
    return it.root < 0 ? run_all_reduce(on, kSum, it.data->data(), count)
                       : run_broadcast(on, it.root, it.data->data(), count * 4);
  });
  comm.lane.reset();
  return it;
}

// Checks the collectives that have ended. The program may use the memory of a dropped one, and overwrites it.
inline bool settle(Comm& comm, std::vector<Risked>& risked, const GivingUp& ends) {
  bool all = true;
  for (Risked& it : risked) {
    if (it.over) continue;
    if (!comm.rank.ended(it.ticket)) {
      all = false;
      continue;
    }
    it.over = true;
    const Status status = comm.rank.wait(it.ticket).status;
    if (status == Status::kDone) {
      constexpr const char* kWhat = "a lane among some that end";
      if (it.root < 0) matches_sum(*it.data, comm.size(), it.round, kWhat);
      if (it.root >= 0) matches(*it.data, it.root, it.round, kWhat);
      continue;
    }
    expect(status == Status::kDropped && ends.gave_up(it.lane), "it ends with %d", static_cast<int>(status));
    it.data->assign(it.data->size(), -1);
  }
  return all;
}

// All messages have arrived, and nothing is kept.
inline void leave_nothing(Comm& comm, GivingUp& ends) {
  Rank& rank = comm.rank;
  ends.close();
  rank.look_until([&] { return EngineInside::users(*rank.engine, comm.group) == 0; }, "what nobody uses any more");
  rank.world.meeting.arrive_and_wait();
  const std::size_t kept = EngineInside::lanes(*rank.engine, comm.group);
  expect(kept == 0, "%zu lanes are kept", kept);
  rank.world.meeting.arrive_and_wait();
}

// The first rank gives up lanes with more collectives than its board has room for. The last rank has not called any,
// and reads none of the entries.
inline void crowds_given_up(Comm& comm) {
  constexpr std::int32_t kLanes = 3 * static_cast<std::int32_t>(Board::kCells);
  Rank& rank = comm.rank;
  const auto doomed = [](std::int32_t lane) { return lane % 3 == 0; };
  GivingUp ends(comm);
  std::vector<Risked> risked;
  const auto call = [&] {
    for (std::int32_t lane = 0; lane < kLanes; ++lane) {
      Random same(rank.world.seed * 15'485'863 + static_cast<std::uint64_t>(lane));
      if (!ends.gave_up(1000 + lane)) {
        risked.push_back(post_risked(comm, 1000 + lane, same, 1 + static_cast<std::uint64_t>(lane)));
      }
    }
  };
  const bool late = comm.me == comm.size() - 1;
  if (!late) call();
  for (std::int32_t lane = 0; lane < kLanes && comm.me == 0; ++lane) {
    if (doomed(lane)) ends.give_up(1000 + lane);
  }
  rank.turn();
  settle(comm, risked, ends);
  rank.world.meeting.arrive_and_wait();
  if (late) call();
  const std::size_t words = static_cast<std::size_t>(kLanes / 3) * static_cast<std::size_t>(comm.size() - 1);
  rank.until(
      [&] {
        ends.hear();
        return settle(comm, risked, ends) && ends.heard() == words;
      },
      "lanes for which a board has no room");
  leave_nothing(comm, ends);
}

inline void lanes_given_up(Comm& comm, int rounds) {
  constexpr std::int32_t kEach = 24;
  constexpr std::uint64_t kSteps = 4;
  Rank& rank = comm.rank;
  GivingUp ends(comm);
  std::size_t words = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<Risked> risked;
    for (const std::uint64_t at : shuffled(rank, kEach)) {
      const std::int32_t lane = round * kEach + static_cast<std::int32_t>(at);
      Random common(rank.world.seed * 7919 + static_cast<std::uint64_t>(lane));
      // One rank gives it up before some step or after the last one, or two ranks do, or none.
      const std::uint64_t first = common.below(2 * comm.size()), second = common.below(4 * comm.size());
      const auto me = static_cast<std::uint64_t>(comm.me);
      const std::uint64_t last = common.below(kSteps + 1);
      const bool gives_up = first == me || (second == me && first < static_cast<std::uint64_t>(comm.size()));
      for (std::uint64_t step = 0; step < kSteps && !ends.gave_up(lane); ++step) {
        Random same(rank.world.seed * 104'729 + static_cast<std::uint64_t>(lane) * kSteps + step);
        if (gives_up && step == last) break;
        risked.push_back(post_risked(comm, lane, same, 1 + static_cast<std::uint64_t>(lane) * kSteps + step));
        for (std::uint64_t turns = rank.random.below(4); turns > 1; --turns) rank.turn();
        ends.hear();
        settle(comm, risked, ends);
      }
      if (gives_up) ends.give_up(lane);
    }
    for (std::int32_t at = 0; at < kEach; ++at) {
      Random common(rank.world.seed * 7919 + static_cast<std::uint64_t>(round * kEach + at));
      if (common.below(2 * comm.size()) < static_cast<std::uint64_t>(comm.size())) {
        words += static_cast<std::size_t>(comm.size() - 1);
      }
    }
    rank.until(
        [&] {
          ends.hear();
          return settle(comm, risked, ends) && ends.heard() == words;
        },
        "lanes of which some are given up");
    comm.barrier();
  }
  leave_nothing(comm, ends);
}

}  // namespace aiocomms
