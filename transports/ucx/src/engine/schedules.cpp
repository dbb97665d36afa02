#include "engine/schedules.hpp"

#include <utility>

#include "engine/lanes.hpp"

namespace aiocomms {
namespace {

constexpr std::size_t kMostFingerprints = 1 << 16;  // of collectives that this rank has not begun

}  // namespace

void Schedules::begin(Group& group, Schedule schedule) {
  enqueue(group, std::move(schedule));
  start_next(group);
}

void Schedules::begin_next(Group& group) {
  if (group.running || group.schedules.empty() || group.lost) return;
  Schedule& schedule = group.schedules.front();
  group.running = true;
  activate(group);
  if (group.shared) {
    group.shared->fingerprint = schedule.fingerprint;
    group.shared->slice_ends = &slice_ends_;
  }
  auto early = group.fingerprints.find(group.collectives);
  if (early != group.fingerprints.end()) {
    check_fingerprint(group, early->second.first, group.collectives, early->second.second);
    group.fingerprints.erase(early);
  }
  schedule.task.start();
  wake_peers(group);
  end_finished(group);
}

// Ends the running schedule if it is done.
void Schedules::end_finished(Group& group) {
  if (!group.running || !group.schedules.front().task.done()) return;
  group.schedules.front().task.check();  // A failed collective stops itself and all collectives behind it.
  Schedule schedule = std::move(group.schedules.front());
  group.schedules.pop_front();
  group.running = false;
  ++group.collectives;
  const Unequal& unequal = schedule.op->unequal;
  if (unequal.rank >= 0) {
    schedule.op->end(Status::kUnequal, static_cast<std::uint64_t>(unequal.rank), unequal.given);
  } else {
    schedule.op->end(Status::kDone);
  }
  begin_next(group);
}

bool Schedules::poll_group(Group& group) {
  const bool of_lanes = group.lane_calls > 0 && lanes_of(group).poll();
  if (!group.running || !group.shared) return of_lanes;
  const bool moved = group.shared->poll();
  if (moved) {
    wake_peers(group);
    end_finished(group);
  }
  if (group.shared->disagrees >= 0) {
    report_mismatch(group, group.local()[std::exchange(group.shared->disagrees, -1)], group.collectives);
  }
  return moved || of_lanes;
}

bool Schedules::resume() noexcept {
  bool moved = false;
  while (!events_.empty()) {
    std::unique_ptr<Awaited> ended(events_.pop());
    Group& group = ended->whose;
    LaneCalls* lane = ended->lane;
    moved = true;
    attempt(group, [&] {
      if (!lane || !lane->given_up) ended->event.complete();  // A lane that is given up does not continue.
      ended.reset();  // The message refers to its lane, which may be released next.
      if (lane) return lanes_of(group).go_on(*lane);
      wake_peers(group);
      end_finished(group);
    });
  }
  std::erase_if(active_, [](Group* group) { return !group->running && group->lane_calls == 0; });
  return moved;
}

void Schedules::wake_peers(Group& group) {
  if (!group.shared || !group.shared->published_any) return;
  group.shared->published_any = false;
  for (int rank = 0; rank < group.shared->ranks(); ++rank) {
    if (rank != group.shared->rank() && group.shared->segment.claim_wake(rank)) {
      wake_peer_(group.peers[group.local()[rank]]);
    }
  }
}

void Schedules::announce_sleep(bool asleep) {
  for (Group* group : active_) {
    if (group->shared) group->shared->segment.sleep(asleep);
  }
}

void Schedules::check_fingerprint(Group& group, int source, std::uint64_t collective, std::uint64_t fingerprint) {
  if (collective < group.collectives) return;
  if (collective > group.collectives || !group.running) {
    if (group.fingerprints.size() < kMostFingerprints) group.fingerprints.try_emplace(collective, source, fingerprint);
  } else if (fingerprint != group.schedules.front().fingerprint) {
    report_mismatch(group, source, collective);
  }
}

void Schedules::report_mismatch(Group& group, int source, std::uint64_t collective) {
  if (group.disagrees >= 0) return;
  group.disagrees = source;
  reports_.notify({Notice::kDisagrees, source, group.id, collective, {}});
}

void Schedules::release(Group& group) noexcept {
  std::erase(active_, &group);
  while (Awaited* ended = events_.take([&](const Awaited& it) { return &it.whose == &group; })) delete ended;
}

}  // namespace aiocomms
