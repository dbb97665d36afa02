// The communicators of an engine, by the numbers that it gives them.
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
  // std::out_of_range: there is none of that number.
  Group& at(std::uint32_t id) { return *groups_.at(id); }
  // Null: it is closed, or lost.
  Group* find_open(std::uint32_t id) {
    auto found = groups_.find(id);
    return found == groups_.end() || found->second->lost ? nullptr : found->second.get();
  }
  // Null: it is closed.
  Group* find(std::uint32_t id) {
    auto found = groups_.find(id);
    return found == groups_.end() ? nullptr : found->second.get();
  }
  template <typename Each>
  void each(Each each) {
    for (auto& [id, group] : groups_) each(*group);
  }

  // One that is lost. Its collectives end as soon as UCX holds nothing of it any more, which is now or at a reap().
  void lose(Group& group) noexcept;
  // One that is lost is closed. It stays as long as UCX holds something of it, or others may read its slots.
  void close(Group& group) noexcept;
  // A peer of this host is gone.
  void bury(int peer) noexcept;
  // Look whether UCX, or who reads them, has let go of some.
  void reap() noexcept {
    if (!held_.empty()) reap_held();
    if (!closed_.empty()) reap_closed();
  }
  // UCX is gone, and holds nothing any more.
  void drop_schedules() noexcept;
  // This rank writes no slots any more, whoever reads them: forget what is closed. Returns whether nothing is left.
  bool forget_closed() noexcept;

 private:
  void reap_held() noexcept;
  void reap_closed() noexcept;

  std::unordered_map<std::uint32_t, std::unique_ptr<Group>> groups_;
  std::vector<Group*> held_;  // lost ones, whose collectives have not ended
  std::vector<std::unique_ptr<Group>> closed_;
  std::uint32_t next_ = 0;
};

}  // namespace aiocomms
