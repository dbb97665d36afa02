// The life of a communicator: opening, loss and closing.
#include <algorithm>
#include <stdexcept>

#include "engine/engine.hpp"

namespace aiocomms {
namespace {

constexpr std::size_t kMostRanks = 65'535;  // A header has 16 bits for a rank.
constexpr std::uint32_t kNobodys = ~0u;     // the number of no communicator

}  // namespace

std::uint32_t Engine::add_group(int rank, std::vector<int> peers) {
  if (rank < 0 || rank >= static_cast<int>(peers.size())) throw std::invalid_argument("this rank is none of them");
  if (peers.size() > kMostRanks) throw std::invalid_argument(std::to_string(peers.size()) + " ranks");
  std::lock_guard lock(lock_);
  for (int peer : peers) static_cast<void>(peers_.at(static_cast<std::size_t>(peer)));
  if (stopping_) throw std::runtime_error("the engine is closed");
  if (reports_.failed()) throw std::runtime_error("the engine has failed");
  return groups_.add(rank, std::move(peers));
}

Group& Engine::present(std::uint32_t id) {
  if (stopping_) throw std::runtime_error("the engine is closed");
  return groups_.at(id);
}

Group& Engine::opened(std::uint32_t id) {
  Group& group = present(id);
  if (!group.wire) throw std::invalid_argument("the communicator is not open yet");
  return group;
}

bool Engine::reads_all(const std::vector<int>& peers) {
  std::lock_guard lock(lock_);
  return std::all_of(peers.begin(), peers.end(), [this](int number) {
    const Peer& peer = peers_.at(static_cast<std::size_t>(number));
    return peer.readable == peer.pid;
  });
}

// The memory of a family's first communicator contains the family's pool.
std::unique_ptr<Pool> Engine::make_pool(const Group& group, const std::vector<int>& local, int segment) {
  const int ranks = static_cast<int>(local.size());
  std::vector<int> places(peers_.size(), -1);
  for (int place = 0; place < ranks; ++place) places[group.peers[local[place]]] = place;
  return std::make_unique<Pool>(segment, Segment::place_of_pool(ranks), number_, std::move(places),
                                [this] { wake_thread(); });
}

void Engine::open_group(std::uint32_t id, std::vector<std::uint32_t> their_ids, int segment, bool pooled,
                        std::vector<int> hosts, bool readable, bool in_place) {
  std::lock_guard lock(lock_);
  Group& group = present(id);
  if (hosts.size() != group.peers.size() || their_ids.size() != group.peers.size()) {
    throw std::invalid_argument("there is a number and a host for each rank");
  }
  std::vector<int> all, leaders;
  Hosts where;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    all.push_back(rank);
    if (hosts[rank] == static_cast<int>(leaders.size())) {
      leaders.push_back(rank);
      where.ranks.emplace_back();
    }
    if (hosts[rank] < 0 || hosts[rank] >= static_cast<int>(leaders.size())) {
      throw std::invalid_argument("hosts are numbered in the order in which they appear");
    }
    where.ranks[hosts[rank]].push_back(rank);
  }
  where.here = hosts[group.rank];
  const std::vector<int>& local = where.ranks[where.here];
  where.place = static_cast<int>(std::ranges::find(local, group.rank) - local.begin());
  std::unique_ptr<Pool> pool = pooled && segment >= 0 ? make_pool(group, local, segment) : nullptr;
  SharedMemory memory{segment, where.place, static_cast<int>(local.size()), pool ? pool.get() : pool_.get()};
  for (int rank : local) {
    if (memory.pool) memory.places.push_back(memory.pool->place_of(group.peers[rank]));
  }
  std::unique_ptr<Shared> shared;
  if (segment >= 0) {
    shared = std::make_unique<Shared>(memory);
    for (int rank : local) {
      if (readable && in_place) shared->pids.push_back(peers_[group.peers[rank]].readable);
    }
  }
  auto wire_between = [&](std::vector<int> ranks) {
    return std::make_unique<Wire>(sender_, inbox_, schedules_, group, std::move(ranks));
  };
  auto wire = wire_between(std::move(all));
  if (leaders.size() > 1) memory.fd = -1;
  auto keyed = std::make_unique<Lanes>(group, memory, sender_, inbox_, schedules_, reports_);
  if (local.front() == group.rank) group.leaders = wire_between(std::move(leaders));
  // A rank that may not read another's memory takes no offers. So no rank of this host makes offers.
  if (!readable) {
    for (int rank : local) peers_[group.peers[rank]].readable = 0;
  }
  // From here on nothing throws, so the communicator is either open or unchanged.
  if (pool) {
    pool_ = std::move(pool);
    offers_.share(pool_.get());
  }
  group.wire = std::move(wire);
  group.shared = std::move(shared);
  group.keyed = std::move(keyed);
  group.their_ids = std::move(their_ids);
  group.leader_of = std::move(hosts);
  group.hosts = std::move(where);
  group.crowded = group.local().size() > static_cast<std::size_t>(cores_);
}

bool Engine::send_frame(int peer, const std::string& frame) {
  std::lock_guard lock(lock_);
  return control_->send(peer, frame);
}

std::vector<Notes::Note> Engine::take_notes() {
  std::lock_guard lock(lock_);
  return notes_.take();
}

std::vector<std::uint64_t> Engine::signs(const std::vector<int>& peers) {
  std::lock_guard lock(lock_);
  std::vector<std::uint64_t> heard = control_->signs(peers);
  for (std::size_t at = 0; at < peers.size(); ++at) {
    const std::uint64_t asked = peers_[static_cast<std::size_t>(peers[at])].asked;
    if (asked != 0 && heard[at] != ~std::uint64_t{0}) heard[at] = std::min(heard[at], asked);
  }
  return heard;
}

bool Engine::has_let_go(std::uint32_t id, int rank) {
  std::lock_guard lock(lock_);
  return present(id).has_let_go(rank);
}

std::vector<int> Engine::missing(std::uint32_t id) {
  std::lock_guard lock(lock_);
  const Group& group = present(id);
  std::vector<int> ranks;
  if (!group.running || !group.shared) return ranks;
  for (int rank : group.shared->missing()) ranks.push_back(group.local()[rank]);
  return ranks;
}

std::vector<int> Engine::missing_in_lane(std::uint32_t id, std::uint64_t lane) {
  std::lock_guard lock(lock_);
  const Group& group = present(id);
  return group.keyed ? lanes_of(group).missing(lane) : std::vector<int>();
}

Ticket Engine::under_way_in_lane(std::uint32_t id, std::uint64_t lane) {
  std::lock_guard lock(lock_);
  const Group& group = present(id);
  return group.keyed ? lanes_of(group).under_way(lane) : 0;
}

template <typename Step>
void Engine::change_lanes(std::uint32_t id, const Step& step) {
  std::lock_guard lock(lock_);
  Group* group = stopping_ ? nullptr : groups_.find_open(id);
  if (group == nullptr || !group->keyed) return;
  schedules_.attempt(*group, [&] { step(lanes_of(*group)); });
  if (pacer_.thread_is_late(is_quiet())) wake_thread();
}

void Engine::give_up_lane(std::uint32_t id, std::uint64_t lane) {
  change_lanes(id, [&](Lanes& lanes) { lanes.give_up(lane); });
}

void Engine::forget_lane(std::uint32_t id, std::uint64_t lane, int rank) {
  change_lanes(id, [&](Lanes& lanes) { lanes.forget_rank(lane, rank); });
}

void Engine::lose_group(std::uint32_t id) {
  std::lock_guard lock(lock_);
  lose(groups_.at(id));
  tell_loop();
}

void Engine::lose(Group& group) noexcept {
  // The other ranks must see the loss before any op of the communicator ends.
  if (group.shared) group.shared->segment.let_go();
  if (group.keyed) lanes_of(group).let_go();
  release(group);
}

// Stops all activity of the communicator. Memory that UCX still uses stays valid.
void Engine::release(Group& group) noexcept {
  group.lost = true;
  group.running = false;
  schedules_.release(group);
  offers_.release(group);
  windows_.release(group);
  inbox_.release(group);
  groups_.lose(group);
  group.depart(group.rank);
}

void Engine::close_group(std::uint32_t id) {
  std::lock_guard lock(lock_);
  Group& group = groups_.at(id);
  // A communicator that was never opened has no number on the other ranks. Number 0 is a different communicator.
  const int told = group.lost ? 0 : static_cast<int>(group.their_ids.size());
  for (int rank = 0; rank < told; ++rank) {
    if (rank == group.rank) continue;
    const int peer = group.peers[rank];
    const Farewell farewell{Farewell::kCommunicator, worker_->sent(peer), group.their_ids[rank],
                            static_cast<std::uint32_t>(group.rank), group.collectives};
    attempt([&] { control_->send(peer, farewell.pack()); });
  }
  release(group);
  windows_.close_lanes(group);
  groups_.close(group);
}

// -------------------------------------------------------------------------------------------- departure of other ranks

void Engine::handle_frame(int peer, std::string frame) {
  std::lock_guard lock(lock_);
  Farewell farewell;
  if (!frame.empty() && frame[0] == kAcknowledgement) {
    farewells_.expect_acknowledgement(peer, false);
  } else if (!frame.empty() && frame[0] == kQuestion) {
    worker_->tell(peer, {.group = kNobodys}, nullptr, 0, nullptr);
    control_->send(peer, Farewell{Farewell::kEcho, worker_->sent(peer), 0, 0, 0}.pack());
  } else if (!frame.empty() && frame[0] == kNote) {
    notes_.add(peer, std::move(frame));
  } else if (Farewell::unpack(frame, farewell)) {
    farewells_.add(peer, farewell);
    apply_farewells(peer);  // If messages are missing, their arrival applies the farewell.
  } else {
    reports_.notify({Notice::kFrame, peer, 0, 0, std::move(frame)});
  }
}

// Messages that a peer has sent before its end count. If a farewell still waits for one of them, that message never
// arrives. Then the end is not in order.
void Engine::handle_end(int peer, bool parted) {
  std::lock_guard lock(lock_);
  if (parted && farewells_.waiting(peer)) {
    for (const std::uint64_t ends = now_ns() + Pacer::kSlice; advance() && now_ns() < ends;) {
    }
    apply_farewells(peer);
    parted = !farewells_.waiting(peer);
  }
  farewells_.expect_acknowledgement(peer, false);
  groups_.bury(peer);
  worker_->write_off(peer);
  if (parted) return;
  reports_.notify({Notice::kLost, peer, 0, 0, {}});
  if (peers_[peer].pid != 0) ask_the_others(peer);
}

void Engine::apply_farewells(int peer) {
  for (const Farewell& farewell : farewells_.take_due(peer, inbox_.received(peer))) {
    if (farewell.kind == Farewell::kEngine) {
      control_->send(peer, std::string(1, kAcknowledgement));
      continue;
    }
    if (farewell.kind == Farewell::kEcho) {
      if (peers_[peer].owes > 0 && --peers_[peer].owes == 0) peers_[peer].asked = 0;
      continue;
    }
    Group* group = groups_.find(farewell.group);
    if (group == nullptr) continue;
    if (farewell.rank >= group->peers.size() || group->peers[farewell.rank] != peer) {
      worker_->refuse(peer);  // A rank may only speak for itself.
    } else {
      handle_departure(*group, static_cast<int>(farewell.rank), farewell.collectives);
    }
  }
}

// A rank has closed a communicator. Ops that need this rank end.
void Engine::handle_departure(Group& group, int rank, std::uint64_t collectives) {
  group.left[rank] = 1 + collectives;
  inbox_.end_receives(group, rank);
  windows_.end_waits(group, rank);
  if (group.keyed) lanes_of(group).end_with(rank);
  reports_.notify({Notice::kLeft, rank, group.id, collectives, {}});
}

}  // namespace aiocomms
