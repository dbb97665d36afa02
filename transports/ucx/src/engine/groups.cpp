#include "engine/groups.hpp"

#include "engine/request.hpp"

namespace aiocomms {

Group::Group(std::uint32_t the_id, int the_rank, std::vector<int> the_peers)
    : id(the_id), rank(the_rank), peers(std::move(the_peers)), left(peers.size(), 0) {}

void Group::drop_schedules() noexcept {
  if (keyed) keyed->drop_schedules();
  if (shared) shared->forget();
  while (!schedules.empty()) {
    schedules.front().op->drop();
    schedules.pop_front();
  }
}

std::uint32_t Groups::add(int rank, std::vector<int> peers) {
  const std::size_t most = groups_.size() + closed_.size() + 1;
  held_.reserve(most);  // A loss must not need memory.
  closed_.reserve(most);
  const std::uint32_t id = next_++;  // Numbers are never reused. A late message must not reach a later communicator.
  groups_.emplace(id, std::make_unique<Group>(id, rank, std::move(peers)));
  return id;
}

void Groups::lose(Group& group) noexcept {
  std::erase(held_, &group);
  if (group.held()) return held_.push_back(&group);
  group.drop_schedules();
}

void Groups::close(Group& group) noexcept {
  auto node = groups_.extract(group.id);
  if (group.users > 0 || group.holds_slots()) closed_.push_back(std::move(node.mapped()));
}

void Groups::reap_held() noexcept {
  std::erase_if(held_, [](Group* group) {
    if (group->held()) return false;
    group->drop_schedules();
    return true;
  });
}

void Groups::reap_closed() noexcept {
  std::erase_if(closed_,
                [](const std::unique_ptr<Group>& group) { return group->users == 0 && !group->holds_slots(); });
}

bool Groups::forget_closed() noexcept {
  std::erase_if(closed_, [](const std::unique_ptr<Group>& group) { return group->users == 0; });
  return groups_.empty() && closed_.empty();
}

void Groups::bury(int peer) noexcept {
  const auto depart = [peer](const Group& group) {
    const auto found = std::ranges::find(group.peers, peer);
    if (found != group.peers.end()) group.depart(static_cast<int>(found - group.peers.begin()));
  };
  each(depart);
  for (const auto& group : closed_) depart(*group);
}

void Groups::drop_schedules() noexcept {
  each([](Group& group) { group.drop_schedules(); });
  for (auto& group : closed_) group->drop_schedules();
}

}  // namespace aiocomms
