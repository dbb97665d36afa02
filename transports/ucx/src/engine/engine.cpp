// The engine's life: who moves things on, and when.

#include "engine/engine.hpp"

#include <sched.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "net/sched_hint.hpp"

namespace aiocomms {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether this process may read another's memory: reading where nothing is fails in another way if it may not.
bool may_read(pid_t pid) {
  std::byte byte;
  iovec here{&byte, 1}, nowhere{nullptr, 1};
  return pid != 0 && process_vm_readv(pid, &here, 1, &nowhere, 1, 0) < 0 && errno == EFAULT;
}

}  // namespace

Engine::Engine(int rank, int size, const std::vector<std::pair<std::string, std::string>>& options,
               std::optional<ucs_memory_type_t> device)
    : worker_(std::make_unique<Worker>(
          size, options, device,
          [this](int peer, const Header& header, const void* payload, void* descriptor) {
            arrived(peer, header, payload, descriptor);
          },
          [this](int peer) {
            forget_early(peer);
            reports_.notify({Notice::kMisled, peer, 0, 0, {}});
          })),
      rank_(rank),
      size_(size),
      received_(size),
      farewells_(size),
      early_(size),
      awaited_(size) {
  if (device == UCS_MEMORY_TYPE_CUDA) cuda_.emplace();
}

Engine::~Engine() { close(false, 0); }

void Engine::start(const std::vector<std::string>& addresses, std::vector<int> sockets, const std::vector<int>& pids,
                   bool crowded, const std::vector<Cookies>& cookies) {
  bool alone = true;
  for (int peer = 0; peer < size_; ++peer) {
    worker_->introduce(peer, addresses[peer], pids[peer] == 0, cookies.at(peer));
    peers_.push_back({pids[peer], may_read(pids[peer]) ? pids[peer] : 0});
    alone = alone && (peer == rank_ || pids[peer] != getpid());
    // UCX 1.21 maps the memory of a peer on this host at the first word to or from it, and does not survive that the
    // peer has just died: while a family forms all are there.
    if (peer != rank_ && pids[peer] != 0) worker_->connect(peer);
  }
  control_ =
      std::make_unique<Control>(std::move(sockets), worker_->event_fd(),
                                Control::Heard{[this](int peer, std::string frame) { heard(peer, std::move(frame)); },
                                               [this](int peer, bool parted) {
                                                 std::lock_guard lock(lock_);
                                                 awaited_[peer] = false;
                                                 if (!parted) reports_.notify({Notice::kLost, peer, 0, 0, {}});
                                               }});
  pacer_.configure(alone, crowded);
  thread_ = std::thread(&Engine::run, this);
}

// ------------------------------------------------------------ the loop's side

std::uint64_t Engine::settle(Request* request, std::uint64_t began) {
  std::uint64_t ended = began;
  if (!request->done && !pacer_.bulk()) ended = spin(*request, began);  // else the thread is at it
  // Not if other outcomes came first: the loop hears of those first.
  if (request->done && request->status == Status::kDone && !request->answers && !ready()) {
    delete request;
    return ended;
  }
  reports_.expect_outcome();
  request->posted = true;
  if (request->done) {
    request->done = false;
    complete(request, request->status, request->details[0], request->details[1]);
  } else if (pacer_.thread_is_late(quiet())) {
    wake_thread();
  }
  return 0;
}

std::uint64_t Engine::spin(const Request& request, std::uint64_t began) {
  Pacer::Spin spin = pacer_.begin_post(began);
  while (!request.done) {
    const bool moved = advance();
    const Pacer::Next next = pacer_.after_look(spin, moved, now_ns());
    if (next == Pacer::Next::kStop) break;
    if (next == Pacer::Next::kRelax) relax();
    if (next == Pacer::Next::kYield) sched_yield();
  }
  pacer_.end_post(spin, request.done);
  return spin.now;
}

void Engine::complete(Request* request, Status status, std::uint64_t a, std::uint64_t b) {
  if (request->done) return;
  request->done = true;
  request->status = status;
  request->details[0] = a;
  request->details[1] = b;
  if (!request->posted) return;  // its post still spins
  reports_.add({request->ticket, status, {a, b}});
  delete request;
}

// Whether something waits for room, of which nobody tells: UCX tells of what comes in, but not of room in a peer's
// queue for what is to go out, nor, always, of a device; and nobody of a slot that a receiver has emptied.
bool Engine::waits_for_room() const {
  return worker_->sending() > 0 || moving_ > 0 || !pours_.empty() || !lined_up_.empty();
}

// Whether all that can happen comes as a message, which a sleeping thread hears of. Of what appears in shared memory it
// does not hear, for a schedule that it has not seen.
bool Engine::quiet() const { return active_.empty() && jobs_.empty() && pulls_.empty() && !waits_for_room(); }

void Engine::wake_thread() {
  pacer_.wake_thread();
  control_->wake();
}

void Engine::progress(std::vector<Outcome>& outcomes, std::vector<Notice>& notices) {
  if (pacer_.bulk() && !ready()) return pacer_.loop_parks();  // the thread is at it
  pacer_.loop_comes(now_ns());
  std::lock_guard lock(lock_);
  bool moved = false;
  if (!pacer_.bulk()) {
    pacer_.begin_slice(now_ns());
    while (advance()) {
      moved = true;
      if (!pacer_.slice_is_over(now_ns())) continue;
      pacer_.hand_over();
      wake_thread();
      break;
    }
  }
  const Pacer::Visit visit = pacer_.end_visit(ready(), moved);
  if (visit == Pacer::Visit::kParks && reports_.pending() > 0 && !pacer_.sleeps_well(quiet())) wake_thread();
  if (visit == Pacer::Visit::kYields) sched_yield();
  reports_.collect(outcomes, notices);
}

// ---------------------------------------------------------------------------------------------------- moving things on

bool Engine::advance() {
  bool moved = advance_jobs(jobs_) | advance_jobs(pulls_) | pour();
  for (std::size_t i = 0; i < active_.size(); ++i) moved |= advance_group(*active_[i]);
  moved |= worker_->progress();
  moved |= advance_lanes();
  while (!events_.empty()) {
    std::vector<std::pair<Group*, Event*>> events;
    events.swap(events_);
    moved = true;
    for (auto& [group, event] : events) {
      event->complete();
      rouse(*group);
      end_finished(*group);
    }
  }
  std::erase_if(active_, [](Group* group) { return !group->running; });
  if (!lost_.empty()) bury();
  return moved;
}

bool Engine::advance_group(Group& group) {
  if (!group.running || !group.shared) return false;
  bool moved = group.shared->poll();
  if (moved) {
    rouse(group);
    end_finished(group);
  }
  if (group.shared->disagrees >= 0) {
    disagree(group, group.local[std::exchange(group.shared->disagrees, -1)], group.collectives);
  }
  return moved;
}

// Others may sleep until this rank publishes something.
void Engine::rouse(Group& group) {
  if (!group.shared || !group.shared->published_any) return;
  group.shared->published_any = false;
  for (int rank = 0; rank < group.shared->ranks(); ++rank) {
    if (rank != group.shared->rank() && group.shared->segment.rouse(rank)) {
      control_->ring(group.peers[group.local[rank]]);
    }
  }
}

// ------------------------------------------------------------------------------------------------- the engine's thread

void Engine::run() {
  using Rest = Pacer::Rest;
  request_long_slice();
  if (cuda_) cuda_->enter();
  for (;;) {
    Rest rest;
    {
      PriorityLock::Background lock(lock_);
      if (stopping_) return;
      rest = take_turn();
    }
    lock_.give_way();
    if (rest.kind == Rest::kYield) sched_yield();
    if (rest.kind == Rest::kNone || rest.kind == Rest::kYield) {
      if (!pacer_.has_to_listen(now_ns())) continue;
      control_->wait(0, false);
    } else {
      control_->wait(rest.ms, rest.kind != Rest::kTick);
    }
    pacer_.has_listened(now_ns());
  }
}

Pacer::Rest Engine::take_turn() {
  const std::uint64_t began = now_ns();
  if (pacer_.loop_is_about(began)) return pacer_.tick(reports_.pending() > 0 || !quiet());
  pacer_.begin_turn(began);
  bool moved = false;
  while (!lock_.is_wanted() && advance()) {
    moved = true;
    if (pacer_.slice_is_over(now_ns())) break;
  }
  if (ready()) reports_.wake_loop();
  const Pacer::Rest rest = pacer_.end_turn(moved, quiet(), began, now_ns());
  if (rest.kind != Pacer::Rest::kSleep) return rest;
  // Announce that this rank sleeps, then look once more: whoever publishes later sees the announcement.
  announce_sleep(true);
  if (worker_->arm() && !advance()) return pacer_.fall_asleep(waits_for_room());
  announce_sleep(false);
  if (ready()) reports_.wake_loop();
  return {Pacer::Rest::kYield};
}

void Engine::announce_sleep(bool asleep) {
  for (Group* group : active_) {
    if (group->shared) group->shared->segment.sleep(asleep);
  }
}

// ------------------------------------------------------------------------------------------------------------- the end

void Engine::close(bool sound, double patience) {
  if (!thread_.joinable()) return;
  if (getpid() != process_) {  // a forked child: the thread, the connections and UCX's memory are its parent's
    thread_.detach();
    control_.release();
    worker_.release();
    return;
  }
  const std::uint64_t ends = now_ns() + static_cast<std::uint64_t>(patience * 1e9);
  auto patient = [&] { return now_ns() < ends; };
  if (sound) part_from_peers(patient);
  {
    std::lock_guard lock(lock_);
    stopping_ = true;
    control_->wake();
  }
  thread_.join();
  for (auto& [id, group] : groups_) lose(*group);
  for (int peer = 0; peer < static_cast<int>(early_.size()); ++peer) forget_early(peer);
  if (sound) {
    worker_->disconnect(patient);
    control_->farewell();
  }
  for (Lane& lane : lanes_) lane.forget();
  control_.reset();
  worker_.reset();  // before what its callbacks may still want to touch
  for (auto& [id, group] : groups_) drop_schedules(*group);
  for (auto& group : lost_) drop_schedules(*group);
  reports_.close();
}

// Stay until everybody has got all that was sent to them: their engines acknowledge it without their loops.
void Engine::part_from_peers(const std::function<bool()>& patient) {
  {
    std::lock_guard lock(lock_);
    for (int peer = 0; peer < size_; ++peer) {
      awaited_[peer] = peer != rank_ && control_->send(peer, Farewell{'E', worker_->sent(peer), 0, 0, 0}.pack());
    }
  }
  for (bool waiting = true; waiting && patient();) {
    {
      std::lock_guard lock(lock_);
      while (advance()) {
      }
      waiting = std::find(awaited_.begin(), awaited_.end(), true) != awaited_.end();
    }
    if (waiting) usleep(50);
  }
}

}  // namespace aiocomms
