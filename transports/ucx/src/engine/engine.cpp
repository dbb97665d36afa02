// The engine's life: who moves things on, and when.

#include "engine/engine.hpp"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "net/sched_hint.hpp"

namespace aiocomms {
namespace {

// How long a post looks on in vain before it returns: some times what a small op takes between two running ranks, and
// below what anybody notices on an event loop.
constexpr std::uint64_t kSpin = 30'000;
// With more ranks than cores a peer may have to be given the core first.
constexpr std::uint64_t kCrowdedSpin = 200'000;
// How long a post may work on a large collective, ns; then the thread goes on with it.
constexpr std::uint64_t kSlice = 400'000;
// The same where ranks outnumber cores: most of it is then the others' time.
constexpr std::uint64_t kCrowdedSlice = 2'000'000;
// After so long without a visit the loop is taken to be busy or parked, ns.
constexpr std::uint64_t kLoopAway = 500'000;
// How often the thread looks whether it is, at most: with nothing pending, and nobody who waits for it, ever less
// often. A thousand times a second it would get in the way of ranks that share a core, and the scheduler would move
// them about.
constexpr int kShortestTickMs = 1;
constexpr int kLongestTickMs = 8;
// The thread looks at the control connections at least this often, however much it has to do, ns.
constexpr std::uint64_t kListen = 10'000'000;
constexpr int kLongestDozeMs = 8;
// The thread looks on that long before it sleeps, when a collective is under way: the peers are about to answer.
constexpr std::uint64_t kLinger = 50'000;

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
            notify({Notice::kMisled, peer, 0, 0, {}});
          })),
      rank_(rank),
      size_(size),
      received_(size),
      farewells_(size),
      early_(size),
      awaited_(size) {
  completions_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (completions_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  if (device == UCS_MEMORY_TYPE_CUDA) cuda_.emplace();
}

Engine::~Engine() {
  close(false, 0);
  if (completions_fd_ >= 0) ::close(completions_fd_);  // it was never started
}

void Engine::start(const std::vector<std::string>& addresses, std::vector<int> sockets, const std::vector<int>& pids,
                   bool crowded, const std::vector<Cookies>& cookies) {
  crowded_ = crowded;
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
                                                 Turn turn(*this);
                                                 awaited_[peer] = false;
                                                 if (!parted) notify({Notice::kLost, peer, 0, 0, {}});
                                               }});
  // A rank of this very process may be waiting for this thread: there is no use in looking on then.
  spin_now_ = spin_most_ = !alone ? 0 : crowded ? kCrowdedSpin : kSpin;
  spin_least_ = alone && crowded ? kCrowdedSpin / 4 : 0;
  thread_ = std::thread(&Engine::run, this);
}

// ------------------------------------------------------------ the loop's side

std::uint64_t Engine::settle(Request* request, std::uint64_t began) {
  std::uint64_t ended = began;
  if (!request->done && !bulk_) ended = spin(*request, began);  // else the thread is at it
  // Not if other outcomes came first: they are heard of first.
  if (request->done && request->status == Status::kDone && !request->answers && !ready()) {
    delete request;
    return ended;
  }
  ++pending_;
  request->posted = true;
  if (request->done) {
    request->done = false;
    complete(request, request->status, request->details[0], request->details[1]);
  } else if (bulk_ || (asleep_ && !quiet()) || tick_ms_ > kShortestTickMs) {
    wake_thread();
  }
  return 0;
}

std::uint64_t Engine::spin(const Request& request, std::uint64_t began) {
  slice_ends_ = began + (crowded_ ? kCrowdedSlice : kSlice);
  loop_seen_.store(began, std::memory_order_relaxed);
  last_post_ = began;
  turns_in_vain_ = 0;
  std::uint64_t now = began, idle_since = 0;  // 0: it has moved since
  while (!request.done) {
    const bool moved = advance();
    now = now_ns();
    if (moved) {
      idle_since = 0;
      if (now >= slice_ends_) break;
      continue;
    }
    if (idle_since == 0) idle_since = now;
    // It may wait for as long as it has worked: the peers have as much to copy. (Karlin, Li, Manasse, Owicki:
    // "Empirical Studies of Competitive Spinning for a Shared-Memory Multiprocessor", SOSP 1991.)
    if (now - idle_since >= std::max(spin_now_, idle_since - began) || now >= slice_ends_) break;
    if (crowded_) {
      sched_yield();  // at once: who is waited for may be waiting for this core
    } else {
      relax();
    }
  }
  if (request.done) {
    spin_now_ = spin_most_;
  } else if (idle_since == 0) {
    bulk_ = true;
  } else {
    spin_now_ = std::max(spin_now_ / 2, spin_least_);  // where it has been in vain lately it probably is again
  }
  return now;
}

void Engine::complete(Request* request, Status status, std::uint64_t a, std::uint64_t b) {
  if (request->done) return;
  request->done = true;
  request->status = status;
  request->details[0] = a;
  request->details[1] = b;
  if (!request->posted) return;  // its post is still looking on
  --pending_;
  if (now_ns() - last_post_ < spin_most_) spin_now_ = std::min(spin_most_, 2 * spin_now_ + 1000);
  outcomes_.push_back({request->ticket, status, {a, b}});
  ready_.store(true, std::memory_order_relaxed);
  delete request;
}

void Engine::notify(Notice notice) {
  notices_.push_back(std::move(notice));
  ready_.store(true, std::memory_order_relaxed);
  wake_loop();
}

void Engine::wake_loop() {
  if (loop_told_ || completions_fd_ < 0) return;
  loop_told_ = true;
  std::uint64_t one = 1;
  [[maybe_unused]] ssize_t written = write(completions_fd_, &one, sizeof one);
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
  asleep_ = false;
  tick_ms_ = kShortestTickMs;
  control_->wake();
}

void Engine::progress(std::vector<Outcome>& outcomes, std::vector<Notice>& notices) {
  if (bulk_ && !ready()) {  // the thread is at it, and the loop parks
    loop_seen_.store(0, std::memory_order_relaxed);
    return;
  }
  loop_seen_.store(now_ns(), std::memory_order_relaxed);
  Turn turn(*this);
  bool moved = false;
  if (!bulk_) {
    slice_ends_ = now_ns() + kSlice;
    while (advance()) {
      moved = true;
      if (now_ns() < slice_ends_) continue;
      bulk_ = true;
      wake_thread();
      break;
    }
  }
  if (ready()) {
    turns_in_vain_ = 0;
  } else if (++turns_in_vain_ >= kTurns) {
    loop_seen_.store(0, std::memory_order_relaxed);  // it parks now
    if (pending_ > 0 && !(asleep_ && quiet())) wake_thread();
  } else if (crowded_ && !moved) {
    sched_yield();
  }
  outcomes.swap(outcomes_);
  notices.swap(notices_);
  ready_.store(false, std::memory_order_relaxed);
  if (loop_told_) {
    loop_told_ = false;
    std::uint64_t told;
    [[maybe_unused]] ssize_t got = read(completions_fd_, &told, sizeof told);
  }
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
  give_way();
  if (cuda_) cuda_->enter();
  for (;;) {
    Rest rest;
    int tick;
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      rest = take_turn();
      tick = tick_ms_;
    }
    while (wanting_.load(std::memory_order_relaxed) > 0) sched_yield();
    if (rest == Rest::kYield) sched_yield();
    if (rest == Rest::kNone || rest == Rest::kYield) {
      if (now_ns() - listened_ < kListen) continue;
      control_->wait(0, false);
    }
    if (rest == Rest::kTick) control_->wait(tick, false);
    if (rest == Rest::kDoze) control_->wait(doze_ms_, true);
    if (rest == Rest::kSleep) control_->wait(-1, true);
    listened_ = now_ns();
  }
}

Engine::Rest Engine::take_turn() {
  const std::uint64_t now = now_ns();
  asleep_ = false;
  if (!bulk_ && now - loop_seen_.load(std::memory_order_relaxed) < kLoopAway) {
    tick_ms_ = pending_ > 0 || !quiet() ? kShortestTickMs : std::min(2 * tick_ms_, kLongestTickMs);
    return Rest::kTick;
  }
  tick_ms_ = kShortestTickMs;
  slice_ends_ = now + kSlice;
  bool moved = false;
  while (wanting_.load(std::memory_order_relaxed) == 0 && advance()) {
    moved = true;
    if (now_ns() >= slice_ends_) break;
  }
  if (ready()) wake_loop();
  if (quiet()) bulk_ = false;  // the next post is the loop's again
  if (moved) {
    doze_ms_ = 1;
    busy_until_ = now_ns() + kLinger;
    return Rest::kNone;
  }
  if (now < busy_until_ && !quiet()) return crowded_ ? Rest::kYield : Rest::kNone;
  bulk_ = false;
  // Say that this rank sleeps, then look once more: who publishes later sees it.
  for (Group* group : active_) {
    if (group->shared) group->shared->segment.sleep(true);
  }
  if (!worker_->arm() || advance()) {
    for (Group* group : active_) {
      if (group->shared) group->shared->segment.sleep(false);
    }
    if (ready()) wake_loop();
    return Rest::kYield;
  }
  asleep_ = true;
  if (!waits_for_room()) {
    doze_ms_ = 1;
    return Rest::kSleep;
  }
  doze_ms_ = std::min(2 * doze_ms_, kLongestDozeMs);
  return Rest::kDoze;
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
    Turn turn(*this);
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
  ::close(std::exchange(completions_fd_, -1));
}

// Stay until everybody has got all that was sent to them: their engines acknowledge it without their loops.
void Engine::part_from_peers(const std::function<bool()>& patient) {
  {
    Turn turn(*this);
    for (int peer = 0; peer < size_; ++peer) {
      awaited_[peer] = peer != rank_ && control_->send(peer, Farewell{'E', worker_->sent(peer), 0, 0, 0}.pack());
    }
  }
  for (bool waiting = true; waiting && patient();) {
    {
      Turn turn(*this);
      while (advance()) {
      }
      waiting = std::find(awaited_.begin(), awaited_.end(), true) != awaited_.end();
    }
    if (waiting) usleep(50);
  }
}

}  // namespace aiocomms
