// The unfinished collectives of each lane, in the order of the calls. All calls hold the interpreter's lock. No Python
// code runs within a call, so several threads may add and remove.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace aiocomms {

class LaneQueues {
 public:
  using Queue = std::vector<nanobind::object>;

  void add(std::uint64_t lane, nanobind::object work) {
    Queue one;
    one.push_back(work);
    const auto [found, alone] = queues_.try_emplace(lane, std::move(one));
    if (!alone) found->second.push_back(std::move(work));
  }
  // Whether it was the last collective of its lane.
  bool remove(std::uint64_t lane, nanobind::handle work) {
    const auto found = queues_.find(lane);
    if (found == queues_.end()) return false;
    Queue& queue = found->second;
    const auto place = std::find_if(queue.begin(), queue.end(), [&](const auto& it) { return it.is(work); });
    if (place == queue.end()) return false;
    const nanobind::object removed =
        std::move(*place);  // This reference is released last, because that may run Python code.
    queue.erase(place);
    const bool last = queue.empty();
    if (last) queues_.erase(found);
    return last;
  }
  bool contains(std::uint64_t lane) const { return queues_.contains(lane); }
  std::size_t size() const { return queues_.size(); }

  int traverse(visitproc visit, void* arg) const {
    for (const auto& [lane, queue] : queues_) {
      for (const nanobind::object& work : queue) Py_VISIT(work.ptr());
    }
    return 0;
  }
  void clear() { const auto queues = std::exchange(queues_, {}); }

 private:
  std::unordered_map<std::uint64_t, Queue> queues_;
};

}  // namespace aiocomms
