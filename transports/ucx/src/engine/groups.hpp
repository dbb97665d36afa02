// The communicators of an engine, by number.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/group.hpp"

namespace aiocomms {

class Groups {
 public:
  std::uint32_t add(int rank, std::vector<int> peers);
  // std::out_of_range: there is no such communicator.
  Group& at(std::uint32_t id) { return *groups_.at(id); }
  // Null: the communicator is closed or lost.
  Group* find_open(std::uint32_t id) {
    auto found = groups_.find(id);
    return found == groups_.end() || found->second->lost ? nullptr : found->second.get();
  }
  // Null: the communicator is closed.
  Group* find(std::uint32_t id) {
    auto found = groups_.find(id);
    return found == groups_.end() ? nullptr : found->second.get();
  }
  template <typename Each>
  void each(Each each) {
    for (auto& [id, group] : groups_) each(*group);
  }

  // Records a lost communicator. Its collectives end now, or at the first reap() after UCX holds nothing of it.
  void lose(Group& group) noexcept;
  // Closes a lost communicator. It is kept as long as UCX holds its memory, or other ranks may read its slots.
  void close(Group& group) noexcept;
  // A peer of this host is lost.
  void bury(int peer) noexcept;
  // Releases communicators that UCX and reading ranks do not use any more.
  void reap() noexcept {
    if (!held_.empty()) reap_held();
    if (!closed_.empty()) reap_closed();
  }
  // Called after UCX's end, when UCX holds nothing any more.
  void drop_schedules() noexcept;
  // This rank writes no slots any more, even if ranks still read them. Forgets the closed communicators. Returns
  // whether none is left.
  bool forget_closed() noexcept;

 private:
  void reap_held() noexcept;
  void reap_closed() noexcept;

  std::unordered_map<std::uint32_t, std::unique_ptr<Group>> groups_;
  std::vector<Group*> held_;  // lost communicators whose collectives have not ended
  std::vector<std::unique_ptr<Group>> closed_;
  std::uint32_t next_ = 0;
};

}  // namespace aiocomms
