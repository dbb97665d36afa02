// Lanes that are given up, see lanes.hpp.
#include <algorithm>
#include <utility>

#include "engine/lanes.hpp"

namespace aiocomms {

void Lanes::give_up(std::uint64_t number) {
  poll();  // A collective that is already in the order runs to its end.
  const auto found = lanes_.find(number);
  if (found == lanes_.end() || found->second->calls.empty()) return;
  LaneCalls& lane = *found->second;
  lane.given_up = true;
  std::erase_if(unwritten_, [&](const Entry& entry) { return entry.lane == &lane; });
  while (lane.calls.size() > 1) drop_last(lane);
  for (int rank = 0; lane.wire && rank < lane.ranks(); ++rank) {
    inbox_.drop_receives(group_, Key(static_cast<std::uint16_t>(rank), kLane, static_cast<std::int64_t>(number)));
  }
  go_on(lane);
}

void Lanes::forget_rank(std::uint64_t number, int rank) {
  if (!board_) {
    const Key key(static_cast<std::uint16_t>(rank), kLane, static_cast<std::int64_t>(number));
    return inbox_.drop_messages(group_, key);
  }
  take_from(rank);
  const auto found = lanes_.find(number);
  if (found == lanes_.end()) return schedules_.wake_peers(group_);
  LaneCalls& lane = *found->second;
  lane.now.clear(rank);
  lane.next.clear(rank);
  if (rank == 0 && lane.given_up && !lane.calls.empty() && !lane.ordered) drop_first(lane);
  go_on(lane);
}

// Whether the first rank may have this rank's entry, and may write an order that this rank has not seen.
bool Lanes::may_be_ordered(const LaneCalls& lane) const {
  const bool told = lane.waits_ == LaneCalls::Waits::kTurn && lane.now.of[static_cast<std::size_t>(group_.rank)].come;
  return told && group_.rank != 0 && !group_.left[0];
}

// Whether no rank uses or needs the memory of a lane's first collective any more.
bool Lanes::is_free(const LaneCalls& lane) const {
  if (!lane.given_up || lane.calls.empty()) return false;
  return lane.wire ? lane.under_way == 0 : !lane.ordered && !may_be_ordered(lane);
}

void Lanes::drop_last(LaneCalls& lane) noexcept {
  const Schedule schedule = std::move(lane.calls.back());
  lane.calls.pop_back();
  --group_.lane_calls;
  schedule.op->drop();
}

// Either all other ranks have this rank's contribution, or none has.
void Lanes::drop_first(LaneCalls& lane) noexcept {
  if (board_) lane.now.clear(group_.rank);
  lane.running = lane.stuck = lane.ordering = false;
  lane.waits_ = LaneCalls::Waits::kNothing;
  lane.handle_ = nullptr;
  drop_last(lane);
}

// A rank that has closed the communicator announces no more lanes that it gives up.
void Lanes::forget_left(int rank) {
  std::vector<std::uint64_t> numbers;
  for (const auto& [number, lane] : lanes_) {
    if (lane->given_up) numbers.push_back(number);
  }
  for (const std::uint64_t number : numbers) forget_rank(number, rank);
}

}  // namespace aiocomms
