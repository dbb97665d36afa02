// One-sided operations. Memory of a rank on this host is mapped into this process and used directly; for any other UCX
// reads and writes it. A signal is a message behind all that was put before it.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "engine/engine.hpp"
#include "net/copy.hpp"

namespace aiocomms {
namespace {

template <typename T>
std::uint64_t atomically(std::byte* where, bool swap, std::uint64_t a, std::uint64_t b) {
  std::atomic_ref<T> element(*reinterpret_cast<T*>(where));
  if (!swap) return element.fetch_add(static_cast<T>(a));
  T expected = static_cast<T>(a);
  element.compare_exchange_strong(expected, static_cast<T>(b));
  return expected;  // what was there: what was expected, if it was replaced
}

std::uint64_t atomically(std::byte* where, std::size_t bytes, bool swap, std::uint64_t a, std::uint64_t b) {
  return bytes == 4 ? atomically<std::uint32_t>(where, swap, a, b) : atomically<std::uint64_t>(where, swap, a, b);
}

// Calls `then` when as many calls of UCX as announced have finished well.
struct Countdown final : Pending {
  Countdown(int the_count, std::function<void(ucs_status_t)> the_then) : count(the_count), then(std::move(the_then)) {}
  void finished(ucs_status_t status) override {
    if (status != UCS_OK) worst = status;
    if (--count > 0) return;
    then(worst);
    delete this;
  }
  int count;
  std::function<void(ucs_status_t)> then;
  ucs_status_t worst = UCS_OK;
};

// An atomic or a get, which its lane counts while it is under way.
struct Question final : Pending {
  Question(int& the_count, Request* the_request) : count(the_count), request(the_request) { ++count; }
  void finished(ucs_status_t status) override {
    --count;
    request->finished(status);
    delete this;
  }
  int& count;
  Request* request;
};

}  // namespace

Window::Part& Engine::part(std::uint32_t id, std::uint64_t window, int rank) {
  return group(id).windows.at(window).parts.at(static_cast<std::size_t>(rank));
}

// The same, for an op on some of its bytes, which must lie within.
Window::Part& Engine::part(std::uint32_t id, std::uint64_t window, int rank, std::uint64_t offset, std::size_t bytes) {
  Window::Part& it = part(id, window, rank);
  if (offset > it.bytes || bytes > it.bytes - offset) throw std::out_of_range("beyond the end of a window");
  return it;
}

std::string Engine::map_window(std::uint32_t id, std::uint64_t number, void* data, std::size_t bytes, bool remote) {
  std::lock_guard lock(lock_);
  Group& owner = group(id);
  Window& window = owner.windows[number];
  window.parts.resize(owner.peers.size());
  if (!worker_->device()) window.parts[owner.rank].mapped = static_cast<std::byte*>(data);
  window.parts[owner.rank].bytes = bytes;
  if (!(remote || worker_->device()) || bytes == 0) return {};
  window.memory = worker_->map(data, bytes);
  return worker_->pack(window.memory);
}

void Engine::open_window(std::uint32_t id, std::uint64_t number, int rank, void* mapped, const std::string& rkey,
                         std::uint64_t address, std::size_t bytes) {
  std::lock_guard lock(lock_);
  Window::Part& it = part(id, number, rank);
  it.bytes = bytes;
  if (mapped && !worker_->device()) it.mapped = static_cast<std::byte*>(mapped);
  it.address = address;
  if (!rkey.empty()) it.rkey = worker_->unpack(group(id).peers[rank], rkey);
}

void Engine::close_window(std::uint32_t id, std::uint64_t number) {
  std::lock_guard lock(lock_);
  Group& owner = group(id);
  auto found = owner.windows.find(number);
  if (found == owner.windows.end()) return;
  for (int rank = 0; rank < static_cast<int>(owner.peers.size()); ++rank) {
    const ucp_rkey_h rkey = found->second.parts[rank].rkey;
    if (rkey == nullptr) continue;
    Lane& its = lane(owner, rank);
    its.end(UCS_ERR_CANCELED, [&](const Lane::Op& op) { return op.window == number; });
    its.keys.push_back(rkey);
    if (its.clean()) {
      its.forget();
    } else if (!its.flushing) {
      flush_lane(its);
    }
  }
  if (found->second.memory) worker_->unmap(found->second.memory);
  owner.windows.erase(found);
}

// Do it now, or after the copies that are under way.
bool Engine::act(Request* request, Job job) {
  job.request = request;
  jobs_.push_back(std::move(job));
  advance_jobs(jobs_);
  return settle(request);
}

// False: it cannot be read any more.
bool Engine::copy_next(Job& job, std::size_t most) {
  const std::size_t bytes = std::min(job.bytes, most);
  if (bytes && !copy_from(job.pid, job.to, job.from, bytes)) return false;
  job.to += bytes;
  job.from += bytes;
  job.bytes -= bytes;
  return true;
}

bool Engine::advance_jobs(std::deque<Job>& jobs) {
  if (jobs.empty()) return false;
  Job& job = jobs.front();
  if (!(job.helper >= 0 ? share(job) : copy_next(job, kCopyAtOnce))) {
    Request* request = job.request;
    jobs.pop_front();
    complete(request, Status::kBroken, -UCS_ERR_CONNECTION_RESET);
    return true;
  }
  if (job.bytes > 0) return true;
  Job done = std::move(job);
  jobs.pop_front();
  if (done.then) {
    done.then(done.request);
  } else {
    done.request->finished(UCS_OK);
  }
  return true;
}

Lane& Engine::lane(Group& group, int rank) {
  Lane*& found = group.lanes[rank];
  if (found == nullptr) found = &lanes_.emplace_back(&group, group.peers[rank]);
  return *found;
}

// Begin an op, when it is its turn.
void Engine::line_up(Lane& lane, Lane::Op op) {
  if (lane.group->lost) return op.pending->finished(UCS_ERR_CANCELED);
  lane.ops.push_back(std::move(op));
  advance_lane(lane);
  if (!lane.ops.empty() && std::find(lined_up_.begin(), lined_up_.end(), &lane) == lined_up_.end()) {
    lined_up_.push_back(&lane);
  }
}

bool Engine::advance_lane(Lane& lane) {
  bool moved = false;
  while (!lane.ops.empty() && !lane.flushing) {
    if (lane.needs_flush(lane.ops.front())) {
      flush_lane(lane);
      continue;
    }
    if (lane.needs_answer(lane.ops.front())) break;
    const Lane::Op op = std::move(lane.ops.front());
    lane.ops.pop_front();
    if (op.kind == Lane::kPut) lane.put.emplace(op.begin, op.end);
    op.start();
    moved = true;
  }
  return moved;
}

void Engine::flush_lane(Lane& lane) {
  lane.flushing = true;
  const ucs_status_t status = worker_->flush(lane.peer, &lane);
  if (status != UCS_INPROGRESS) lane.finished(status);
}

bool Engine::advance_lanes() {
  bool moved = false;
  for (Lane* lane : lined_up_) moved |= advance_lane(*lane);
  std::erase_if(lined_up_, [](Lane* lane) { return lane->ops.empty(); });
  return moved;
}

// A communicator is closed. UCX may still have to tell that its peers have been flushed.
void Engine::close_lanes(Group& group) {
  for (auto& [rank, lane] : group.lanes) lane->group = nullptr;
  std::erase_if(lined_up_, [](Lane* lane) { return lane->group == nullptr; });
  lanes_.remove_if([](const Lane& lane) { return lane.group == nullptr && lane.clean(); });
}

bool Engine::put(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, std::uint64_t offset,
                 const void* data, std::size_t bytes) {
  std::lock_guard lock(lock_);
  Window::Part& to = part(id, window, rank, offset, bytes);
  auto request = new Request(*this, group(id), ticket);
  if (to.mapped || bytes == 0) {
    return act(request, {to.mapped + offset, static_cast<const std::byte*>(data), bytes, nullptr, {}});
  }
  const std::uint64_t there = to.address + offset;
  Lane& its = lane(request->group, rank);
  line_up(its, {Lane::kPut, window, request, there, there + bytes, [=, this, peer = its.peer, rkey = to.rkey] {
                  follow(request, worker_->put(peer, rkey, there, data, bytes, request));
                }});
  return settle(request);
}

bool Engine::get(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, std::uint64_t offset, void* data,
                 std::size_t bytes) {
  std::lock_guard lock(lock_);
  Window::Part& from = part(id, window, rank, offset, bytes);
  auto request = new Request(*this, group(id), ticket);
  if (from.mapped || bytes == 0) {
    return act(request, {static_cast<std::byte*>(data), from.mapped + offset, bytes, nullptr, {}});
  }
  const std::uint64_t there = from.address + offset;
  Lane& its = lane(request->group, rank);
  line_up(its, {Lane::kGet, window, request, there, there + bytes, [=, this, &its, rkey = from.rkey] {
                  auto question = new Question(its.got, request);
                  follow(request, worker_->get(its.peer, rkey, there, data, bytes, question), question);
                }});
  return settle(request);
}

bool Engine::atomic(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, std::uint64_t offset, bool swap,
                    std::size_t bytes, std::uint64_t a, std::uint64_t b) {
  std::lock_guard lock(lock_);
  Window::Part& at = part(id, window, rank, offset, bytes);
  Group& owner = group(id);
  auto request = new Request(*this, owner, ticket);
  request->answers = true;
  if (at.mapped) {
    std::byte* where = at.mapped + offset;
    return act(request, {nullptr, nullptr, 0, nullptr, [=](Request* it) {
                           it->details[0] = atomically(where, bytes, swap, a, b);
                           it->finished(UCS_OK);
                         }});
  }
  const Atomic what{offset, a, b, static_cast<std::uint32_t>(bytes), swap, ++next_question_};
  const Header header{owner.their_ids[rank],
                      0,
                      static_cast<std::uint16_t>(owner.rank),
                      kAtomic,
                      0,
                      static_cast<std::uint32_t>(rank_),
                      static_cast<std::int64_t>(window),
                      sizeof what,
                      0};
  Lane& its = lane(owner, rank);
  line_up(its, {Lane::kTell, window, request, 0, 0, [=, this, &owner, &its] {
                  auto question = new Question(its.asked, request);
                  ucs_status_t status = worker_->tell(its.peer, header, &what, sizeof what, nullptr);
                  if (status != UCS_OK && status != UCS_INPROGRESS) return question->finished(status);
                  asked_.emplace(what.number, Asked{&owner, question, &request->details[0]});
                }});
  return settle(request);
}

// The owner does it: one processor's atomics are atomic among themselves, a network's and a processor's are not. UCX's
// own across TCP do not work with its error handling (1.22: "cannot find remote protocol for amo").
void Engine::asked(Group& owner, const Header& header, const void* payload) {
  Atomic what;
  auto found = owner.windows.find(static_cast<std::uint64_t>(header.tag));
  if (header.bytes != sizeof what || payload == nullptr) return worker_->refuse(owner.peers[header.source]);
  if (found == owner.windows.end()) return;  // closed
  std::memcpy(&what, payload, sizeof what);
  const Window::Part& mine = found->second.parts[owner.rank];
  const bool fits = mine.mapped && (what.bytes == 4 || what.bytes == 8) && what.offset < mine.bytes &&
                    what.bytes <= mine.bytes - what.offset &&
                    (reinterpret_cast<std::uintptr_t>(mine.mapped) + what.offset) % what.bytes == 0;
  if (!fits) return worker_->refuse(owner.peers[header.source]);
  std::byte* where = mine.mapped + what.offset;
  tell(owner, header.source, kAnswer, what.number, atomically(where, what.bytes, what.swap, what.a, what.b));
}

bool Engine::signal(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank) {
  std::lock_guard lock(lock_);
  Group& owner = group(id);
  auto request = new Request(*this, owner, ticket);
  Header header{owner.their_ids[rank],
                0,
                static_cast<std::uint16_t>(owner.rank),
                kSignal,
                0,
                static_cast<std::uint32_t>(rank_),
                static_cast<std::int64_t>(window),
                0,
                0};
  const int peer = owner.peers[rank];
  const bool own = rank == owner.rank;
  const bool mapped = part(id, window, rank).mapped != nullptr || (own && !worker_->device());
  auto send = [=, this, &owner](Request* it) {
    if (own) signalled(owner, header);
    ucs_status_t status = own ? UCS_OK : worker_->tell(peer, header, nullptr, 0, it);
    if (status != UCS_INPROGRESS) it->finished(status);
  };
  if (mapped) return act(request, {nullptr, nullptr, 0, nullptr, send});
  line_up(lane(owner, rank), {Lane::kTell, window, request, 0, 0, [=] { send(request); }});
  return settle(request);
}

bool Engine::wait_signal(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank) {
  std::lock_guard lock(lock_);
  Window::Part& from = part(id, window, rank);
  auto request = new Request(*this, group(id), ticket);
  if (from.signals > 0) {
    --from.signals;
    complete(request, Status::kDone);
  } else if (group(id).left[rank]) {
    complete(request, Status::kClosed, static_cast<std::uint64_t>(rank));
  } else {
    from.waits.push(request);
  }
  return settle(request);
}

bool Engine::cancel_wait(std::uint32_t id, std::uint64_t window, int rank, Ticket ticket) {
  std::lock_guard lock(lock_);
  Request* request = part(id, window, rank).waits.take([&](const Request& it) { return it.ticket == ticket; });
  if (request == nullptr) return false;
  reports_.withdraw();
  delete request;
  return true;
}

void Engine::signalled(Group& owner, const Header& header) {
  auto found = owner.windows.find(static_cast<std::uint64_t>(header.tag));
  if (found == owner.windows.end()) return;  // closed: a signal that nobody waited for
  Window::Part& from = found->second.parts[header.source];
  if (from.waits.empty()) {
    ++from.signals;
  } else {
    complete(from.waits.pop(), Status::kDone);
  }
}

bool Engine::flush(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank) {
  std::lock_guard lock(lock_);
  Group& owner = group(id);
  std::vector<int> ranks;
  for (int other = 0; other < static_cast<int>(owner.peers.size()); ++other) {
    if ((rank < 0 || rank == other) && part(id, window, other).rkey) ranks.push_back(other);
  }
  auto request = new Request(*this, owner, ticket);
  return act(request,
             {nullptr, nullptr, 0, nullptr, [=, this, &owner](Request* it) {
                if (ranks.empty()) return it->finished(UCS_OK);
                auto all =
                    new Countdown(static_cast<int>(ranks.size()), [it](ucs_status_t worst) { it->finished(worst); });
                for (int other : ranks) {
                  line_up(lane(owner, other), {Lane::kTell, window, all, 0, 0, [all] { all->finished(UCS_OK); }});
                }
              }});
}

}  // namespace aiocomms
