// Communicators: their collectives one after the other, whether the ranks agree, and how they come and go.

#include <algorithm>
#include <atomic>

#include "engine/engine.hpp"
#include "net/copy.hpp"

namespace aiocomms {
namespace {

constexpr std::size_t kMostMarks = 1 << 16;  // of collectives that this rank has not begun

}  // namespace

std::uint64_t Engine::begin(Group& group, Schedule schedule) {
  const std::uint64_t began = now_ns();
  Request* request = schedule.request;
  group.schedules.push_back(std::move(schedule));
  begin_next(group);
  return settle(request, began);
}

void Engine::begin_next(Group& group) {
  if (group.running || group.schedules.empty() || group.lost) return;
  Schedule& schedule = group.schedules.front();
  group.running = true;
  if (std::find(active_.begin(), active_.end(), &group) == active_.end()) active_.push_back(&group);
  if (group.shared) {
    group.shared->mark = schedule.mark;
    group.shared->slice_ends = &pacer_.slice_ends();
  }
  auto early = group.marks.find(group.collectives);
  if (early != group.marks.end()) {
    check_mark(group, early->second.first, group.collectives, early->second.second);
    group.marks.erase(early);
  }
  schedule.task.start();
  rouse(group);
  end_finished(group);
}

void Engine::end_finished(Group& group) {
  if (!group.running || !group.schedules.front().task.done()) return;
  Schedule schedule = std::move(group.schedules.front());
  group.schedules.pop_front();
  group.running = false;
  ++group.collectives;
  const Unequal& unequal = schedule.request->unequal;
  if (unequal.rank >= 0) {
    complete(schedule.request, Status::kUnequal, static_cast<std::uint64_t>(unequal.rank), unequal.given);
  } else {
    complete(schedule.request, Status::kDone);
  }
  begin_next(group);
}

// Rank `source` has begun a collective; is it the one that this rank has begun, or will begin, as that?
void Engine::check_mark(Group& group, int source, std::uint64_t collective, std::uint64_t mark) {
  if (collective < group.collectives) return;
  if (collective > group.collectives || !group.running) {
    if (group.marks.size() < kMostMarks) group.marks.try_emplace(collective, source, mark);
  } else if (mark != group.schedules.front().mark) {
    disagree(group, source, collective);
  }
}

void Engine::disagree(Group& group, int source, std::uint64_t collective) {
  if (group.disagrees >= 0) return;
  group.disagrees = source;
  reports_.notify({Notice::kDisagrees, source, group.id, collective, {}});
}

// ------------------------------------------------------------ communicators

std::uint32_t Engine::add_group(int rank, std::vector<int> peers) {
  std::lock_guard lock(lock_);
  std::uint32_t id = next_group_++;  // never used again: a late message must not find another communicator
  groups_.emplace(id, std::make_unique<Group>(id, rank, std::move(peers)));
  return id;
}

bool Engine::reads_all(const std::vector<int>& peers) const {
  return std::all_of(peers.begin(), peers.end(),
                     [this](int peer) { return peers_[peer].readable == peers_[peer].pid; });
}

void Engine::open_group(std::uint32_t id, std::vector<std::uint32_t> their_ids, int segment, std::vector<int> hosts,
                        bool readable) {
  std::lock_guard lock(lock_);
  Group& it = group(id);
  it.their_ids = std::move(their_ids);
  std::vector<int> all, leaders;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    all.push_back(rank);
    if (hosts[rank] == static_cast<int>(leaders.size())) leaders.push_back(rank);
    if (hosts[rank] == hosts[it.rank]) it.local.push_back(rank);
  }
  it.hosts = static_cast<int>(leaders.size());
  it.leader_of = std::move(hosts);
  bool leads = it.local.front() == it.rank;
  it.wire = std::make_unique<Wire>(*this, it, std::move(all));
  if (leads) it.leaders = std::make_unique<Wire>(*this, it, std::move(leaders));
  if (segment >= 0) {
    int here = static_cast<int>(std::find(it.local.begin(), it.local.end(), it.rank) - it.local.begin());
    it.shared = std::make_unique<Shared>(segment, here, static_cast<int>(it.local.size()));
    if (readable && (pacer_.crowded() || reads_quickly())) {
      for (int rank : it.local) it.shared->pids.push_back(peers_[it.peers[rank]].readable);
    }
  }
}

void Engine::lose_group(std::uint32_t id) {
  std::lock_guard lock(lock_);
  lose(group(id));
}

void Engine::lose(Group& it) {
  if (it.shared) it.shared->segment.let_go();  // before anybody hears that an op of it has ended
  drop(it);
}

void Engine::close_group(std::uint32_t id) {
  std::lock_guard lock(lock_);
  Group& it = group(id);
  // One that was never opened has no name that the others would know, and 0 is another communicator's.
  const int told = it.lost ? 0 : static_cast<int>(it.their_ids.size());
  for (int rank = 0; rank < told; ++rank) {
    if (rank == it.rank) continue;
    control_->send(it.peers[rank], Farewell{'B', worker_->sent(it.peers[rank]), it.their_ids[rank],
                                            static_cast<std::uint32_t>(it.rank), it.collectives}
                                       .pack());
  }
  drop(it);
  close_lanes(it);
  if (it.users > 0) lost_.push_back(std::move(groups_.at(id)));
  groups_.erase(id);
}

// Nothing of it moves any more. What UCX still holds stays where it is.
void Engine::drop(Group& it) {
  it.lost = true;
  it.running = false;
  std::erase(active_, &it);
  std::erase_if(events_, [&](auto& entry) { return entry.first == &it; });
  auto end = [&](Request* request) {
    if (request->event) {
      delete request;
    } else {
      complete(request, Status::kDropped);
    }
  };
  for (std::deque<Job>* jobs : {&jobs_, &pulls_}) {
    std::erase_if(*jobs, [&](const Job& job) {
      bool its = &job.request->group == &it;
      if (its) end(job.request);
      return its;
    });
  }
  for (auto& [rank, lane] : it.lanes) lane->end(UCS_ERR_CANCELED, [](const Lane::Op&) { return true; });
  for (auto entry = asked_.begin(); entry != asked_.end();) {
    const Asked asked = entry->second;
    if (asked.group == &it) std::erase(pours_, entry->first);
    entry = asked.group == &it ? asked_.erase(entry) : std::next(entry);
    if (asked.group == &it) asked.pending->finished(UCS_ERR_CANCELED);
  }
  it.mail.drain_receives([](const Key&) { return true; }, end);
  for (auto& [message, vouch] : std::exchange(it.vouches, {})) {
    if (vouch.waits) end(vouch.waits);
  }
  it.mail.drain_messages([](const Key&) { return true; },
                         [&](Message* message) {
                           if (message->descriptor) worker_->drop(message->descriptor);
                           delete message;
                         });
  for (auto& [number, window] : it.windows) {
    for (Window::Part& part : window.parts) {
      while (!part.waits.empty()) end(part.waits.pop());
    }
  }
  if (!it.held()) drop_schedules(it);  // else once UCX has let go of it
}

// Its collectives, the running one and those behind it. UCX holds nothing of theirs any more.
void Engine::drop_schedules(Group& it) {
  if (it.shared) it.shared->forget();
  while (!it.schedules.empty()) {
    complete(it.schedules.front().request, Status::kDropped);
    it.schedules.pop_front();
  }
}

// The closed communicators that UCX has let go of since.
void Engine::bury() {
  std::erase_if(lost_, [&](const std::unique_ptr<Group>& group) {
    if (group->held()) return false;
    drop_schedules(*group);
    return true;
  });
}

bool Engine::has_let_go(std::uint32_t id, int rank) {
  std::lock_guard lock(lock_);
  return group(id).has_let_go(rank);
}

std::vector<int> Engine::missing(std::uint32_t id) {
  std::lock_guard lock(lock_);
  Group& it = group(id);
  std::vector<int> ranks;
  if (!it.running || !it.shared) return ranks;
  for (int rank : it.shared->missing()) ranks.push_back(it.local[rank]);
  return ranks;
}

}  // namespace aiocomms
