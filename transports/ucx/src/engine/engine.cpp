// The progress of ops, and the start and the end of an engine.
#include "engine/engine.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "net/relax.hpp"
#include "net/sched_hint.hpp"

namespace aiocomms {
namespace {

// Whether this process may read the memory of another one. A permitted read of an invalid address fails with EFAULT.
bool may_read(pid_t pid) {
  std::byte byte;
  iovec here{&byte, 1}, nowhere{nullptr, 1};
  return pid != 0 && process_vm_readv(pid, &here, 1, &nowhere, 1, 0) < 0 && errno == EFAULT;
}

std::function<bool()> for_seconds(double seconds) {
  return [ends = now_ns() + static_cast<std::uint64_t>(seconds * 1e9)] { return now_ns() < ends; };
}

}  // namespace

Engine::Engine(int number, const std::vector<std::pair<std::string, std::string>>& options,
               std::optional<ucs_memory_type_t> device)
    : number_(number),
      worker_(std::make_unique<Worker>(
          options, device,
          [this](int peer, const Header& header, const void* payload, void* descriptor) {
            attempt([&] {
              inbox_.arrive(peer, header, payload, descriptor);
              if (farewells_.waiting(peer)) apply_farewells(peer);
            });
          },
          [this](int peer) {
            inbox_.forget_early(peer);
            attempt([&] { reports_.notify({Notice::kMisled, peer, 0, 0, {}}); });
          })),
      address_(worker_->address()),
      control_(std::make_unique<Control>(
          worker_->event_fd(),
          Control::Heard{[this](int peer, std::string frame) { handle_frame(peer, std::move(frame)); },
                         [this](int peer, bool parted) { handle_end(peer, parted); }})),
      schedules_(reports_, pacer_.slice_ends(), [this](int peer) { control_->ring(peer); }),
      offers_(*worker_),
      inbox_(peers_, worker_->device(), groups_, *worker_, *this),
      sender_(peers_, *worker_, offers_),
      windows_(*worker_, worker_->device()) {
  constexpr int kMost = 1 << 30;
  if (number < 0 || number > kMost) throw std::invalid_argument("engine " + std::to_string(number));
  if (device == UCS_MEMORY_TYPE_CUDA) cuda_.emplace();
}

Engine::~Engine() {
  close(false, 0);
  worker_.reset();  // This is for an engine that was never started. UCX's callbacks may still use the other members.
}

void Engine::start() { thread_ = std::thread(&Engine::run, this); }

void Engine::make_room(std::size_t peers) {
  worker_->make_room(peers);
  control_->make_room(peers);
  inbox_.make_room(peers);
  farewells_.make_room(peers);
  if (peers > peers_.size()) peers_.resize(peers);
}

// Asks each other process of this host for an echo.
//
// UCX has one queue for the messages of all processes of this host to this one. A process may die between taking an
// element and marking it as written. The queue then stops forever, and no process can remove that element. So each
// other process must show that its messages still arrive. Until then it counts as silent since the question.
void Engine::ask_the_others(int dead) {
  for (int number = 0; number < static_cast<int>(peers_.size()); ++number) {
    Peer& peer = peers_[number];
    if (number == dead || number == number_ || peer.pid == 0 || !control_->send(number, std::string(1, kQuestion))) {
      continue;
    }
    if (peer.owes++ == 0) peer.asked = now_ns();
  }
}

void Engine::introduce(int peer, Introduction introduction, int cores) {
  const auto [pid, cookies, name] = std::tuple(introduction.pid, introduction.cookies, introduction.name);
  std::lock_guard lock(lock_);
  if (stopping_) throw std::runtime_error("the engine is closed");
  make_room(static_cast<std::size_t>(peer) + 1);
  control_->connect(peer, std::move(introduction.socket));  // This call may throw while the peer is still unknown.
  worker_->introduce(peer, std::move(introduction.address), pid == 0, cookies, name);
  peers_[peer] = {pid, may_read(pid) ? pid : 0};
  // UCX 1.21 maps the memory of a peer on this host at the first message to or from it. It crashes if the peer has just
  // died. While two ranks introduce themselves, both are alive.
  if (peer != number_ && pid != 0) worker_->connect(peer);
  alone_ = alone_ && (peer == number_ || pid != getpid());
  if (peer != number_) cores_ = std::min(cores_, cores);
  abroad_ = abroad_ || pid == 0;
  // A GPU's copy takes longer than a post should take. A post that spun until the end of the copy would delay the next
  // post.
  pacer_.configure(alone_ && !cuda_);
  const auto here = std::ranges::count_if(peers_, [](const Peer& it) { return it.pid != 0; });
  offers_.allow_assistance(here <= cores_);
}

// ------------------------------------------------------------------------------ messages for other parts of the engine

void Engine::handle(Group& group, const Header& header, const void* payload) {
  switch (header.channel) {
    case kSignal:
      return windows_.accept_signal(group, header);
    case kAtomic:
      return windows_.serve_atomic(group, header, payload);
    case kAtomicAnswer:
      return windows_.end_atomic(group, header);
    case kAnswer:
      return offers_.end_offer(group, header);
    case kAssist:
      return offers_.begin_assistance(group, header);
  }
}

bool Engine::agrees(Group& group, const Header& header) {
  schedules_.check_fingerprint(group, header.source, static_cast<std::uint64_t>(header.tag), header.value);
  return group.disagrees < 0;
}

void Engine::pull(Request* receive, const Header& header, const Offer& offer) {
  offers_.pull(receive, header, offer, peers_[receive->group.peers[header.source]].readable);
}

// ------------------------------------------------------------------------------------------------------------ progress

// Looks once at everything. Each step catches its own exceptions, because it knows their communicator.
bool Engine::advance() noexcept {
  bool moved = windows_.advance_jobs();
  moved |= offers_.advance();
  moved |= schedules_.poll();
  moved |= worker_->progress();
  moved |= windows_.advance_lanes();
  moved |= schedules_.resume();
  groups_.reap();
  return moved;
}

// Whether something waits for room that no event announces. UCX announces arrivals, but not room in a peer's queue, and
// not always the progress of a device. No event announces that a receiver has emptied a slot, or that a slot's pages
// are due to be returned.
bool Engine::waits_for_room() const {
  return worker_->unfinished() > 0 || offers_.assists() || windows_.has_waiting_ops() || (pool_ && pool_->overflows());
}

// Whether each possible event is a message, which wakes a sleeping thread. A line in shared memory does not wake the
// thread for a schedule that began after it fell asleep.
bool Engine::is_quiet() const {
  return schedules_.idle() && !windows_.has_jobs() && !offers_.pulls() && !waits_for_room();
}

void Engine::progress(std::vector<Outcome>& outcomes, std::vector<Notice>& notices) {
  if (pacer_.bulk() && !ready()) return pacer_.loop_parks();  // the thread works
  pacer_.loop_comes(now_ns());
  std::lock_guard lock(lock_);
  bool moved = false;
  if (!pacer_.bulk() && !stopping_) {
    pacer_.begin_slice(now_ns());
    while (advance()) {
      moved = true;
      if (!pacer_.slice_is_over(now_ns())) continue;
      pacer_.hand_over();
      wake_thread();
      break;
    }
  }
  const Pacer::Visit visit = pacer_.end_visit(ready(), moved, reports_.pending() > 0, now_ns());
  if (!stopping_) {
    if (visit == Pacer::Visit::kParks && reports_.pending() > 0 && !pacer_.asleep()) wake_thread();
    hand_on();
  }
  if (visit == Pacer::Visit::kYields) sched_yield();
  reports_.tell_failures(groups_);
  reports_.collect(outcomes, notices);
}

void Engine::fail(const char* why) {
  std::lock_guard lock(lock_);
  reports_.fail(why);
}

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
      listen(0, false);
    } else {
      listen(rest.ms, rest.kind != Rest::kTick);
    }
    pacer_.has_listened(now_ns());
  }
}

void Engine::listen(int timeout_ms, bool worker) noexcept {
  try {
    control_->wait(timeout_ms, worker);
  } catch (...) {
    std::lock_guard lock(lock_);
    reports_.fail();
  }
}

Pacer::Rest Engine::take_turn() noexcept {
  const std::uint64_t began = now_ns();
  if (pool_ && pool_->overflows()) pool_->trim(began);
  if (pacer_.loop_is_about(began)) return pacer_.tick(reports_.pending() > 0 || !is_quiet());
  pacer_.begin_turn(began);
  bool moved = false;
  while (!lock_.is_wanted() && advance()) {
    moved = true;
    if (pacer_.slice_is_over(now_ns())) break;
  }
  tell_loop();
  const Pacer::Rest rest = pacer_.end_turn(moved, is_quiet(), began, now_ns());
  if (rest.kind != Pacer::Rest::kSleep) return rest;
  // Announce that this rank sleeps, then look once more. A rank that publishes later sees the announcement.
  schedules_.announce_sleep(true);
  const bool nothing = worker_->arm() && !advance();
  tell_loop();  // UCX may have ended a call although it reported no progress.
  if (nothing) return pacer_.fall_asleep(waits_for_room());
  schedules_.announce_sleep(false);
  return {Pacer::Rest::kYield};
}

void Engine::wake_thread() noexcept {
  pacer_.wake_thread();
  control_->wake();
}

// ------------------------------------------------------------------------------------------------------------- the end

void Engine::close(bool sound, double patience) noexcept {
  if (getpid() != process_) {  // a forked child: the thread, the connections and UCX's memory belong to the parent
    if (thread_.joinable()) thread_.detach();
    static_cast<void>(control_.release());
    static_cast<void>(worker_.release());
    return;
  }
  std::lock_guard closing(closing_);
  if (!thread_.joinable()) return;
  const auto patient = for_seconds(patience);
  if (sound) {
    std::vector<int> all(peers_.size());
    std::iota(all.begin(), all.end(), 0);
    await_arrival(all, patient);  // A peer that has not acknowledged by then receives no orderly end.
  }
  stop_thread();
  std::lock_guard lock(lock_);
  // After a failure, messages to the peers may be missing, so the end is not in order.
  tear_down(sound && !reports_.failed(), patient);
}

void Engine::halt() noexcept {
  closing_.lock();
  if (!thread_.joinable()) return closing_.unlock();
  stop_thread();
  lock_.lock();
  tear_down(false, [] { return false; });
}

void Engine::stop_thread() noexcept {
  {
    std::lock_guard lock(lock_);
    stopping_ = true;
    control_->wake();
  }
  thread_.join();
}

void Engine::tear_down(bool sound, const std::function<bool()>& patient) noexcept {
  groups_.each([this](Group& group) { lose(group); });
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) inbox_.forget_early(peer);
  if (sound) {
    worker_->disconnect(patient);
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
      if (farewells_.acknowledged(peer)) attempt([&] { control_->farewell(peer); });
    }
  }
  windows_.destroy_keys();
  control_->shut();
  worker_.reset();  // UCX's callbacks may still use the other members.
  groups_.drop_schedules();
  reports_.close();
  notes_.close();
  if (!groups_.forget_closed()) return;
  offers_.share(nullptr);
  pool_.reset();
}

// Waits until the peers' engines acknowledge that everything has arrived. Their loops are not needed.
bool Engine::await_arrival(const std::vector<int>& peers, const std::function<bool()>& patient) noexcept {
  bool told;
  {
    std::lock_guard lock(lock_);
    told = !stopping_ && attempt([&] {
      for (int peer : peers) {
        const Farewell farewell{Farewell::kEngine, worker_->sent(peer), 0, 0, 0};
        farewells_.expect_acknowledgement(peer, peer != number_ && control_->send(peer, farewell.pack()));
      }
    });
  }
  return told && advance_until([&](int peer) { return farewells_.acknowledged(peer); }, peers, patient);
}

// Makes progress until `is` holds for each of the peers, and returns whether it does. It works in slices, because other
// threads need the engine meanwhile.
template <typename Is>
bool Engine::advance_until(const Is& is, const std::vector<int>& peers, const std::function<bool()>& patient) noexcept {
  do {
    bool moved = false;
    {
      std::lock_guard lock(lock_);
      if (stopping_) return false;
      for (const std::uint64_t ends = now_ns() + Pacer::kLookSlice; advance() && now_ns() < ends;) moved = true;
      tell_loop();
      hand_on();
      if (std::ranges::all_of(peers, is)) return true;
    }
    if (!moved) usleep(50);
  } while (patient());
  return false;
}

bool Engine::part(const std::vector<int>& peers, bool sound, double patience) noexcept {
  const auto patient = for_seconds(patience);
  const bool in_order = sound && await_arrival(peers, patient);
  {
    std::lock_guard lock(lock_);
    if (stopping_) return false;
    for (int peer : peers) worker_->forget(peer, in_order);
  }
  advance_until([&](int peer) { return !worker_->closing(peer); }, peers, patient);
  std::lock_guard lock(lock_);
  if (stopping_) return false;
  bool clean = true;
  for (int peer : peers) {
    inbox_.forget_early(peer);
    worker_->write_off(peer);
    attempt([&] { control_->part(peer, in_order); });
    clean = clean && worker_->closed(peer);
  }
  return clean;
}

}  // namespace aiocomms
