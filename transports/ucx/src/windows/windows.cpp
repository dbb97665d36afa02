#include "windows/windows.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

namespace aiocomms {
namespace {

template <typename T>
std::uint64_t atomically(std::byte* where, bool swap, std::uint64_t a, std::uint64_t b) {
  static_assert(std::atomic_ref<T>::is_always_lock_free);  // Other processes change the element too.
  std::atomic_ref<T> element(*reinterpret_cast<T*>(where));
  if (!swap) return element.fetch_add(static_cast<T>(a));
  T expected = static_cast<T>(a);
  element.compare_exchange_strong(expected, static_cast<T>(b));
  return expected;  // This is the old value. It equals the original `expected` if the exchange succeeded.
}

std::uint64_t atomically(std::byte* where, std::size_t bytes, bool swap, std::uint64_t a, std::uint64_t b) {
  return bytes == 4 ? atomically<std::uint32_t>(where, swap, a, b) : atomically<std::uint64_t>(where, swap, a, b);
}

void finish(Operation* op) { op->finished(UCS_OK); }

// Calls `then` after `count` calls of UCX have finished, with UCS_OK or the first failure.
struct Countdown final : Pending {
  Countdown(int the_count, std::function<void(ucs_status_t)> the_then) : count(the_count), then(std::move(the_then)) {}
  void finished(ucs_status_t status) noexcept override {
    if (failure == UCS_OK) failure = status;
    if (--count > 0) return;
    then(failure);
    delete this;
  }
  int count;
  std::function<void(ucs_status_t)> then;
  ucs_status_t failure = UCS_OK;
};

// An atomic or a get, which its lane counts until it ends.
struct Counted final : Pending {
  Counted(int& the_count, Pending* the_pending) : count(the_count), pending(the_pending) { ++count; }
  ~Counted() override { --count; }
  void finished(ucs_status_t status) noexcept override {
    Pending* const waits = pending;
    delete this;
    waits->finished(status);
  }
  int& count;
  Pending* pending;
};

}  // namespace

Window::Part& Windows::part_of(Group& group, std::uint64_t window, int rank) {
  return group.windows.at(window).parts.at(static_cast<std::size_t>(rank));
}

Window::Part& Windows::part_of(Group& group, const Place& place) {
  Window::Part& part = part_of(group, place.window, place.rank);
  if (place.offset > part.bytes || place.bytes > part.bytes - place.offset) {
    throw std::out_of_range("beyond the end of a window");
  }
  return part;
}

Window::Part& Windows::part_of(Group& group, const Runs& runs) {
  for (const std::uint64_t offset : runs.offsets) part_of(group, Place{runs.window, runs.rank, offset, runs.bytes});
  return part_of(group, runs.window, runs.rank);
}

// ------------------------------------------------------------------------------------------------- opening and closing

std::string Windows::map(Group& group, std::uint64_t number, void* data, std::size_t bytes, bool remote) {
  Window& window = group.windows[number];
  window.parts.resize(group.peers.size());
  if (!device_) window.parts[group.rank].mapped = static_cast<std::byte*>(data);
  window.parts[group.rank].bytes = bytes;
  if (!(remote || device_) || bytes == 0) return {};
  window.memory = network_.map(data, bytes);
  return network_.pack(window.memory);
}

void Windows::open(Group& group, std::uint64_t number, int rank, void* mapped, const std::string& rkey,
                   std::uint64_t address, std::size_t bytes) {
  Window::Part& part = part_of(group, number, rank);
  part.bytes = bytes;
  if (mapped && !device_) part.mapped = static_cast<std::byte*>(mapped);
  part.address = address;
  if (!rkey.empty()) part.rkey = network_.unpack(group.peers[rank], rkey);
}

void Windows::close(Group& group, std::uint64_t number) {
  auto found = group.windows.find(number);
  if (found == group.windows.end()) return;
  std::vector<Window::Part>& parts = found->second.parts;
  for (int rank = 0; rank < static_cast<int>(parts.size()); ++rank) {
    if (parts[rank].rkey == nullptr) continue;
    Lane& lane = lane_to(group, rank);
    lane.end_ops(UCS_ERR_CANCELED, [&](const Lane::Op& op) { return op.window == number; });
    lane.keys.push_back(parts[rank].rkey);
    parts[rank].rkey = nullptr;
    if (lane.clean()) {
      lane.destroy_keys();
    } else if (!lane.flushing) {
      lane.flush();
    }
  }
  if (found->second.memory) network_.unmap(found->second.memory);
  group.windows.erase(found);
}

// ----------------------------------------------------------------------------------------- copies and lanes, in pieces

// Copies within this process, which cannot fail. It copies now, or after earlier unfinished copies. then(op) ends the
// op.
template <typename Then>
void Windows::copy(Operation* op, Copy copy, const Then& then) {
  if (jobs_.empty() && copy.bytes <= kStep) {
    copy.advance(kStep);
    return then(op);
  }
  jobs_.push_back({op, copy, then});
  if (jobs_.size() == 1) advance_job();
}

// Makes the copies of one op, in the reverse order of the vector.
void Windows::copy_all(Operation* op, std::vector<Copy> copies) {
  if (copies.empty()) return copy(op, {}, finish);
  const Copy first = copies.back();
  copies.pop_back();
  jobs_.push_back({op, first, finish, std::move(copies)});
  if (jobs_.size() == 1) advance_job();
}

bool Windows::advance_job() noexcept {
  Job& job = jobs_.front();
  for (std::size_t left = kStep; left > 0;) {
    const std::size_t before = job.copy.bytes;
    job.copy.advance(left);
    left -= before - job.copy.bytes;
    if (job.copy.bytes > 0 || job.more.empty()) break;
    job.copy = job.more.back();
    job.more.pop_back();
    if (!job.more.empty()) job.more.back().foresee();
  }
  if (job.copy.bytes > 0 || !job.more.empty()) return true;
  const Job done = std::move(job);
  jobs_.pop_front();
  try {
    done.then(done.op);
  } catch (const std::bad_alloc&) {  // The op has not been passed on yet.
    done.op->finished(UCS_ERR_NO_MEMORY);
  }
  return true;
}

Lane& Windows::lane_to(Group& group, int rank) {
  if (const auto found = group.lanes.find(rank); found != group.lanes.end()) return *found->second;
  waiting_.reserve(lanes_.size() + 1);  // room for all lanes
  std::list<Lane> made;
  made.emplace_back(&group, group.peers[rank], network_);
  Lane& lane = *group.lanes.emplace(rank, &made.front()).first->second;
  lanes_.splice(lanes_.end(), made);
  return lane;
}

// The op begins at its turn.
void Windows::enqueue(Lane& lane, Lane::Op op) noexcept {
  if (lane.group->lost) return op.pending->finished(UCS_ERR_CANCELED);
  try {
    lane.ops.push_back(std::move(op));
  } catch (const std::bad_alloc&) {  // The failed call has not moved `op`.
    return op.pending->finished(UCS_ERR_NO_MEMORY);
  }
  advance_lane(lane);
  if (!lane.ops.empty() && std::find(waiting_.begin(), waiting_.end(), &lane) == waiting_.end()) {
    waiting_.push_back(&lane);
  }
}

bool Windows::advance_lane(Lane& lane) noexcept {
  bool moved = false;
  while (!lane.ops.empty() && !lane.flushing) {
    if (lane.needs_flush(lane.ops.front())) {
      lane.flush();
      continue;
    }
    if (lane.needs_answer(lane.ops.front())) break;
    std::list<Lane::Op> first;
    first.splice(first.begin(), lane.ops, lane.ops.begin());
    const Lane::Op& op = first.front();
    try {
      if (op.kind == Lane::kPut) lane.put.emplace(op.begin, op.end);
      op.start();
    } catch (const std::bad_alloc&) {  // UCX does not have the op yet.
      op.pending->finished(UCS_ERR_NO_MEMORY);
    }
    moved = true;
  }
  return moved;
}

bool Windows::advance_lanes() noexcept {
  bool moved = false;
  for (Lane* lane : waiting_) moved |= advance_lane(*lane);
  std::erase_if(waiting_, [](Lane* lane) { return lane->ops.empty(); });
  return moved;
}

// ---------------------------------------------------------------------------------------------------------- operations

void Windows::put(Operation* op, const Place& place, const void* data) {
  Group& group = op->group;
  const Window::Part& to = part_of(group, place);
  if (to.mapped || place.bytes == 0) {
    return copy(op, {to.mapped + place.offset, static_cast<const std::byte*>(data), place.bytes}, finish);
  }
  put_far(group, op, place, data);
}

void Windows::put_far(Group& group, Pending* pending, const Place& place, const void* data) {
  const Window::Part& to = part_of(group, place);
  const std::uint64_t there = to.address + place.offset;
  Lane& lane = lane_to(group, place.rank);
  auto start = [this, pending, data, there, bytes = place.bytes, peer = lane.peer, rkey = to.rkey] {
    follow(pending, network_.put(peer, rkey, there, data, bytes, pending));
  };
  enqueue(lane, {Lane::kPut, place.window, pending, start, there, there + place.bytes});
}

void Windows::put_signal(Operation* op, const Place& place, const void* data) {
  Group& group = op->group;
  const Window::Part& to = part_of(group, place);
  const std::uint64_t window = place.window;
  const int rank = place.rank;
  if (to.mapped) {
    return copy(op, {to.mapped + place.offset, static_cast<const std::byte*>(data), place.bytes},
                [=, this](Operation* it) { send_signal(it->group, it, window, rank); });
  }
  if (place.bytes == 0) return signal(op, window, rank);
  auto owned = std::make_unique<Countdown>(2, [op](ucs_status_t status) { op->finished(status); });
  Countdown* const both = owned.get();
  Lane& lane = lane_to(group, rank);
  std::function<void()> tell = [=, this, &group] {
    // The signal would vouch for data that has not arrived.
    if (both->failure != UCS_OK) return both->finished(both->failure);
    send_signal(group, both, window, rank);
  };
  put_far(group, both, place, data);  // This is the last call that may throw. After it the lane knows the op.
  static_cast<void>(owned.release());
  enqueue(lane, {Lane::kTell, window, both, std::move(tell)});
}

void Windows::get(Operation* op, const Place& place, void* data) {
  const Window::Part& from = part_of(op->group, place);
  if (from.mapped || place.bytes == 0) {
    return copy(op, {static_cast<std::byte*>(data), from.mapped + place.offset, place.bytes}, finish);
  }
  get_far(op->group, op, place, data);
}

void Windows::get_far(Group& group, Pending* pending, const Place& place, void* data) {
  const Window::Part& from = part_of(group, place);
  const std::uint64_t there = from.address + place.offset;
  Lane& lane = lane_to(group, place.rank);
  auto start = [this, pending, data, there, bytes = place.bytes, &lane, rkey = from.rkey] {
    auto counted = new Counted(lane.gets, pending);
    follow(counted, network_.get(lane.peer, rkey, there, data, bytes, counted));
  };
  enqueue(lane, {Lane::kGet, place.window, pending, start, there, there + place.bytes});
}

void Windows::put_v(Operation* op, const Runs& runs, const std::byte* data) {
  const Window::Part& to = part_of(op->group, runs);
  if (!to.mapped && runs.bytes > 0) {
    return move_far(op, runs, [&](Pending* pending, const Place& place, std::uint64_t start) {
      put_far(op->group, pending, place, data + start);
    });
  }
  std::vector<Copy> copies;
  for (std::size_t i = runs.bytes > 0 ? runs.starts.size() : 0; i-- > 0;) {
    copies.push_back({to.mapped + runs.offsets[i], data + runs.starts[i], runs.bytes});
  }
  copy_all(op, std::move(copies));
}

void Windows::get_v(Operation* op, const Runs& runs, std::byte* data) {
  const Window::Part& from = part_of(op->group, runs);
  if (!from.mapped && runs.bytes > 0) {
    return move_far(op, runs, [&](Pending* pending, const Place& place, std::uint64_t start) {
      get_far(op->group, pending, place, data + start);
    });
  }
  std::vector<Copy> copies;
  for (std::size_t i = runs.bytes > 0 ? runs.starts.size() : 0; i-- > 0;) {
    copies.push_back({data + runs.starts[i], from.mapped + runs.offsets[i], runs.bytes});
  }
  copy_all(op, std::move(copies));
}

// far(pending, place, start) begins the operation of one run.
template <typename Far>
void Windows::move_far(Operation* op, const Runs& runs, const Far& far) {
  if (runs.starts.empty()) return op->finished(UCS_OK);
  lane_to(op->group, runs.rank);  // The lane is made now, because that may throw. After it the op is known.
  auto all = new Countdown(static_cast<int>(runs.starts.size()), [op](ucs_status_t status) { op->finished(status); });
  for (std::size_t i = 0; i < runs.starts.size(); ++i) {
    try {
      far(all, {runs.window, runs.rank, runs.offsets[i], runs.bytes}, runs.starts[i]);
    } catch (const std::bad_alloc&) {  // UCX does not have the run yet.
      all->finished(UCS_ERR_NO_MEMORY);
    }
  }
}

void Windows::change_atomically(Operation* op, const Place& place, bool swap, std::uint64_t a, std::uint64_t b) {
  const Window::Part& part = part_of(op->group, place);
  op->answers = true;
  if (part.mapped) {
    auto change = [where = part.mapped + place.offset, bytes = place.bytes, swap, a, b](Operation* it) {
      it->details[0] = atomically(where, bytes, swap, a, b);
      it->finished(UCS_OK);
    };
    return copy(op, {}, change);
  }
  const Atomic what{place.offset, a, b, static_cast<std::uint32_t>(place.bytes), swap, ++last_question_};
  auto start = [=, this] { ask_atomic(op, place.rank, place.window, what); };
  enqueue(lane_to(op->group, place.rank), {Lane::kTell, place.window, op, start});
}

void Windows::ask_atomic(Operation* op, int rank, std::uint64_t window, const Atomic& what) {
  Lane& lane = lane_to(op->group, rank);
  auto counted = std::make_unique<Counted>(lane.atomics, op);
  questions_.emplace(what.number, Question{&op->group, rank, counted.get(), &op->details[0]});
  Pending* const waits = counted.release();
  Header header = op->group.header_to(rank, kAtomic, static_cast<std::int64_t>(window));
  header.bytes = sizeof what;
  const ucs_status_t status = op->group.tell(network_, rank, header, &what, sizeof what);
  if (status == UCS_OK || status == UCS_INPROGRESS) return;
  questions_.erase(what.number);
  waits->finished(status);
}

void Windows::signal(Operation* op, std::uint64_t window, int rank) {
  Group& group = op->group;
  const bool mapped = part_of(group, window, rank).mapped != nullptr || (rank == group.rank && !device_);
  auto send = [=, this](Operation* it) { send_signal(it->group, it, window, rank); };
  if (mapped) return copy(op, {}, send);
  enqueue(lane_to(group, rank), {Lane::kTell, window, op, [=] { send(op); }});
}

void Windows::send_signal(Group& group, Pending* pending, std::uint64_t window, int rank) {
  const Header header = group.header_to(rank, kSignal, static_cast<std::int64_t>(window));
  if (rank == group.rank) {
    accept_signal(group, header);
    return pending->finished(UCS_OK);
  }
  follow(pending, group.tell(network_, rank, header, nullptr, 0, pending));
}

void Windows::wait_signal(Operation* op, std::uint64_t window, int rank) {
  Window::Part& from = part_of(op->group, window, rank);
  if (from.signals > 0) {
    --from.signals;
    op->end(Status::kDone);
  } else if (op->group.left[rank]) {
    op->end(Status::kClosed, static_cast<std::uint64_t>(rank));
  } else {
    from.waits.push(op);
  }
}

Request* Windows::withdraw_wait(Group& group, std::uint64_t window, int rank, Ticket ticket) {
  if (!group.windows.contains(window)) return nullptr;  // The window is closed.
  return part_of(group, window, rank).waits.take([&](const Request& wait) { return wait.ticket == ticket; });
}

void Windows::flush(Operation* op, std::uint64_t window, int rank) {
  Group& group = op->group;
  std::vector<Lane*> lanes;
  for (int other = 0; other < static_cast<int>(group.peers.size()); ++other) {
    if ((rank < 0 || rank == other) && part_of(group, window, other).rkey) lanes.push_back(&lane_to(group, other));
  }
  auto flush_lanes = [this, window, lanes](Operation* it) {
    if (lanes.empty()) return it->finished(UCS_OK);
    auto all = new Countdown(static_cast<int>(lanes.size()), [it](ucs_status_t status) { it->finished(status); });
    for (Lane* lane : lanes) enqueue(*lane, {Lane::kTell, window, all, [all] { all->finished(UCS_OK); }});
  };
  copy(op, {}, flush_lanes);
}

// --------------------------------------------------------------------------------------------- messages of other ranks

void Windows::accept_signal(Group& group, const Header& header) {
  auto found = group.windows.find(static_cast<std::uint64_t>(header.tag));
  if (found == group.windows.end()) return;  // The window is closed, and no op waits for the signal.
  Window::Part& from = found->second.parts[header.source];
  if (from.waits.empty()) {
    ++from.signals;
  } else {
    from.waits.pop()->end(Status::kDone);
  }
}

// The owner of the window executes the atomic. A processor's atomics are atomic among themselves, but not with those of
// a network. UCX's own atomics over TCP do not work with its error handling (1.22: "cannot find remote protocol for
// amo").
void Windows::serve_atomic(Group& group, const Header& header, const void* payload) {
  Atomic what;
  auto found = group.windows.find(static_cast<std::uint64_t>(header.tag));
  if (header.bytes != sizeof what || payload == nullptr) return network_.refuse(group.peers[header.source]);
  if (found == group.windows.end()) return;  // The window is closed.
  std::memcpy(&what, payload, sizeof what);
  const Window::Part& mine = found->second.parts[group.rank];
  const bool fits = mine.mapped && (what.bytes == 4 || what.bytes == 8) && what.offset < mine.bytes &&
                    what.bytes <= mine.bytes - what.offset &&
                    (reinterpret_cast<std::uintptr_t>(mine.mapped) + what.offset) % what.bytes == 0;
  if (!fits) return network_.refuse(group.peers[header.source]);
  std::byte* where = mine.mapped + what.offset;
  const std::uint64_t before = atomically(where, what.bytes, what.swap, what.a, what.b);
  group.tell(network_, header.source, kAtomicAnswer, what.number, before);
}

void Windows::end_atomic(Group& group, const Header& answer) noexcept {
  auto found = questions_.find(static_cast<std::uint64_t>(answer.tag));
  if (found == questions_.end()) return;
  const Question question = found->second;
  if (question.group != &group || question.rank != answer.source) return;
  questions_.erase(found);
  *question.value = answer.value;
  question.pending->finished(UCS_OK);
}

void Windows::end_waits(Group& group, int rank) noexcept {
  for (auto& [number, window] : group.windows) {
    Queue<Request>& waits = window.parts[rank].waits;
    while (!waits.empty()) waits.pop()->end(Status::kClosed, static_cast<std::uint64_t>(rank));
  }
}

// ------------------------------------------------------------------------------------------------------------- the end

void Windows::release(Group& group) noexcept {
  std::erase_if(jobs_, [&](const Job& job) {
    const bool its = &job.op->group == &group;
    if (its) job.op->drop();
    return its;
  });
  for (auto& [rank, lane] : group.lanes) lane->end_ops(UCS_ERR_CANCELED, [](const Lane::Op&) { return true; });
  for (auto entry = questions_.begin(); entry != questions_.end();) {
    const Question question = entry->second;
    const bool its = question.group == &group;
    entry = its ? questions_.erase(entry) : std::next(entry);
    if (its) question.pending->finished(UCS_ERR_CANCELED);
  }
  for (auto& [number, window] : group.windows) {
    for (Window::Part& part : window.parts) {
      while (!part.waits.empty()) part.waits.pop()->drop();
    }
  }
}

// UCX may still have to report the flush of the group's peers.
void Windows::close_lanes(Group& group) noexcept {
  for (auto& [rank, lane] : group.lanes) lane->group = nullptr;
  std::erase_if(waiting_, [](Lane* lane) { return lane->group == nullptr; });
  lanes_.remove_if([](const Lane& lane) { return lane.group == nullptr && lane.clean(); });
}

void Windows::destroy_keys() noexcept {
  for (Lane& lane : lanes_) lane.destroy_keys();
}

}  // namespace aiocomms
