// The posting of ops, the progress of ops, and the start and the end of an engine.
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

// Returns the core of this thread. glibc reads it from the thread's own memory (rseq).
std::uint64_t core() { return static_cast<std::uint64_t>(sched_getcpu()); }

// Returns how often the kernel has given this thread's core to another thread.
long switches() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

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

// --------------------------------------------------------------------------------------------------------------- posts

std::unique_ptr<Operation> Engine::begin_post(Ticket ticket, std::uint32_t id) {
  Group& group = opened(id);
  if (group.shared) group.shared->segment.note_core(core());
  return expected(ticket, group);
}

template <typename Start>
bool Engine::post(Ticket ticket, std::uint32_t id, Held& held, const Start& start) {
  const auto lock = lock_for_post(held);
  auto op = begin_post(ticket, id);
  start(op.get());  // This call may throw before the engine knows the op.
  return finish_post(op.release(), now_ns(), held) != 0;
}

std::uint64_t Engine::finish_post(Operation* op, std::uint64_t began, Held& held) noexcept {
  std::uint64_t ended = began;
  const bool copies = !op->done() && windows_.has_jobs();
  if (copies && !pacer_.bulk() && pacer_.has_copied_enough(began)) pacer_.hand_over();
  if (!op->done() && !pacer_.bulk()) {  // otherwise the thread works
    held.let_go();
    ended = spin(*op, began);
    if (copies) pacer_.note_copy(began, ended);
  }
  const bool done = op->done();
  if (done) pacer_.note_done_at_once(op->group.crowded);
  // If other outcomes came first, the loop must receive those first.
  if (op->is_plain_success() && !ready()) {
    delete op;
  } else {
    op->leave_post(began);
    ended = 0;
  }
  if (done) {
    hand_on();  // The thread may have to retry, for example, an answer that found no room in UCX.
  } else if (pacer_.thread_is_late(is_quiet())) {
    wake_thread();
  }
  return ended;
}

std::uint64_t Engine::spin(const Operation& op, std::uint64_t began) noexcept {
  Pacer::Spin spin = pacer_.begin_post(began, op.group.crowded);
  const auto over = [&] { return op.done() || (op.any_will_do && ready()); };
  while (!over()) {
    const bool moved = advance();
    const Pacer::Next next = pacer_.after_look(spin, moved, now_ns(), [&] { return shares_core(op); });
    if (next == Pacer::Next::kStop) break;
    if (next == Pacer::Next::kRelax) relax();
    if (next == Pacer::Next::kYield) give_core(op, spin);
  }
  pacer_.end_post(spin, over());
  return spin.now;
}

bool Engine::shares_core(const Operation& op) const noexcept {
  if (!op.group.shared) return false;
  const std::uint64_t here = core();
  op.group.shared->segment.note_core(here);  // The scheduler may have moved this rank.
  return op.group.shared->segment.shares_core(here);
}

// Gives the core to another thread.
//
// A yield gives the core to threads of the same scheduling group, which is this session or this container. Some kernels
// give it to other groups too, at one of the next tries.
//
// A yield may have no effect for a while, although another rank was last seen on this core. This thread then blocks
// until the awaited line is published.
void Engine::give_core(const Operation& op, const Pacer::Spin& spin) noexcept {
  sched_yield();
  const long before = std::exchange(switches_, switches());
  if (switches_ != before) return pacer_.note_yield();
  if (!op.group.shared) return;
  const bool wanted = shares_core(op);
  if (!wanted && !spin.crowded) return;
  const bool sole = is_sole(op);
  const std::uint64_t most = pacer_.may_block(spin, sole, wanted);
  if (most == 0) return;
  Segment& segment = op.group.shared->segment;
  if (segment.begin_block(sole ? op.group.shared->awaited() : Segment::Awaited{})) wake_thread();
  if (!advance() && !op.done()) segment.block(most);
  segment.end_block();
  segment.note_core(core());
}

// Whether an op, whose post has not returned, only waits for lines of this host's ranks, and this engine has nothing
// else to do. Peers on other hosts exclude that, because nothing would wake this thread for their messages.
bool Engine::is_sole(const Operation& op) const noexcept {
  const Group& group = op.group;
  return !abroad_ && group.running && group.schedules.front().op == &op && !group.shared->waits_for_nothing() &&
         schedules_.count() == 1 && group.lane_calls == 0 && reports_.pending() == 0 && !windows_.has_jobs() &&
         !offers_.pulls() && !waits_for_room();
}

// Null: the request is matched, or has already ended.
bool Engine::withdraw(Request* request) {
  if (request == nullptr) return false;
  static_cast<Operation*>(request)->withdraw();  // A request with a ticket is an Operation.
  return true;
}

bool Engine::send(Ticket ticket, std::uint32_t id, const void* data, std::size_t bytes, int dst, int channel,
                  std::int64_t tag, int dtype, Held& held) {
  return post(ticket, id, held, [&](Operation* op) { start_send(op, data, bytes, dst, channel, tag, dtype); });
}

void Engine::start_send(Operation* op, const void* data, std::size_t bytes, int dst, int channel, std::int64_t tag,
                        int dtype) {
  Group& group = op->group;
  if (group.left.at(static_cast<std::size_t>(dst))) return op->end(Status::kClosed, static_cast<std::uint64_t>(dst));
  Header header = group.header_to(dst, static_cast<std::uint8_t>(channel), tag);
  header.dtype = static_cast<std::uint8_t>(dtype);
  header.bytes = bytes;
  const ucs_status_t status = sender_.send(group, dst, header, data, op);
  if (status != UCS_INPROGRESS) op->finished(status);
}

bool Engine::recv(Ticket ticket, std::uint32_t id, void* data, std::size_t bytes, int src, int channel,
                  std::int64_t tag, int dtype, Held& held) {
  return post(ticket, id, held, [&](Operation* op) { start_recv(op, data, bytes, src, channel, tag, dtype); });
}

void Engine::start_recv(Operation* op, void* data, std::size_t bytes, int src, int channel, std::int64_t tag,
                        int dtype) {
  op->data = data;
  op->bytes = bytes;
  op->dtype = static_cast<std::uint8_t>(dtype);
  static_cast<void>(op->group.left.at(static_cast<std::size_t>(src)));
  inbox_.post(op, Key(static_cast<std::uint16_t>(src), static_cast<std::uint8_t>(channel), tag));
}

std::optional<Engine::Found> Engine::probe(Ticket ticket, std::uint32_t id, int src, int channel, std::int64_t tag,
                                           bool look_on) {
  std::lock_guard lock(lock_);
  auto op = begin_post(ticket, id);
  static_cast<void>(op->group.left.at(static_cast<std::size_t>(src)));
  const Key key(static_cast<std::uint16_t>(src), static_cast<std::uint8_t>(channel), tag);
  const std::uint64_t began = now_ns();
  if (!op->group.mail.look(key)) advance();  // The message may have arrived unseen.
  inbox_.probe(op.get(), key);
  op->any_will_do = true;
  if (look_on && !op->done() && !pacer_.bulk()) spin(*op, began);
  std::optional<Found> found;
  if (op->done() && op->status == Status::kDone) {
    found = {op->details[0], op->details[1]};
  } else {
    op.release()->leave_post(began);
  }
  tell_loop();  // Other ops may have ended meanwhile.
  if (pacer_.thread_is_late(is_quiet())) wake_thread();
  return found;
}

std::optional<bool> Engine::take(Ticket ticket, std::uint32_t id, void* data, std::size_t bytes, int src, int channel,
                                 std::int64_t tag, int dtype) {
  std::lock_guard lock(lock_);
  auto op = begin_post(ticket, id);
  const Key key(static_cast<std::uint16_t>(src), static_cast<std::uint8_t>(channel), tag);
  if (!op->group.mail.look(key)) return std::nullopt;
  start_recv(op.get(), data, bytes, src, channel, tag, dtype);
  return finish_post(op.release(), now_ns(), nothing_held) != 0;
}

bool Engine::cancel(std::uint32_t id, int src, int channel, std::int64_t tag, Ticket ticket) {
  std::lock_guard lock(lock_);
  const Key key(static_cast<std::uint16_t>(src), static_cast<std::uint8_t>(channel), tag);
  return withdraw(inbox_.withdraw(present(id), key, ticket));
}

std::string Engine::head(Ticket ticket) {
  std::lock_guard lock(lock_);
  return reports_.take_beginning(ticket);
}

// ------------------------------------------------------------------------------------------------------------- windows

std::string Engine::map_window(std::uint32_t id, std::uint64_t window, void* data, std::size_t bytes, bool remote) {
  std::lock_guard lock(lock_);
  return windows_.map(opened(id), window, data, bytes, remote);
}

void Engine::open_window(std::uint32_t id, std::uint64_t window, int rank, void* mapped, const std::string& rkey,
                         std::uint64_t address, std::size_t bytes) {
  std::lock_guard lock(lock_);
  windows_.open(opened(id), window, rank, mapped, rkey, address, bytes);
}

void Engine::close_window(std::uint32_t id, std::uint64_t window) {
  std::lock_guard lock(lock_);
  windows_.close(present(id), window);
}

bool Engine::put(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, std::uint64_t offset,
                 const void* data, std::size_t bytes, Held& held) {
  return post(ticket, id, held, [&](Operation* op) { windows_.put(op, {window, rank, offset, bytes}, data); });
}

bool Engine::put_signal(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, std::uint64_t offset,
                        const void* data, std::size_t bytes, Held& held) {
  return post(ticket, id, held, [&](Operation* op) { windows_.put_signal(op, {window, rank, offset, bytes}, data); });
}

bool Engine::get(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, std::uint64_t offset, void* data,
                 std::size_t bytes, Held& held) {
  return post(ticket, id, held, [&](Operation* op) { windows_.get(op, {window, rank, offset, bytes}, data); });
}

bool Engine::put_v(Ticket ticket, std::uint32_t id, const Windows::Runs& runs, const std::byte* data) {
  return post(ticket, id, nothing_held, [&](Operation* op) { windows_.put_v(op, runs, data); });
}

bool Engine::get_v(Ticket ticket, std::uint32_t id, const Windows::Runs& runs, std::byte* data) {
  return post(ticket, id, nothing_held, [&](Operation* op) { windows_.get_v(op, runs, data); });
}

bool Engine::atomic(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, std::uint64_t offset, bool swap,
                    std::size_t bytes, std::uint64_t a, std::uint64_t b) {
  return post(ticket, id, nothing_held,
              [&](Operation* op) { windows_.change_atomically(op, {window, rank, offset, bytes}, swap, a, b); });
}

bool Engine::signal(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, Held& held) {
  return post(ticket, id, held, [&](Operation* op) { windows_.signal(op, window, rank); });
}

bool Engine::wait_signal(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank, Held& held) {
  return post(ticket, id, held, [&](Operation* op) { windows_.wait_signal(op, window, rank); });
}

bool Engine::cancel_wait(std::uint32_t id, std::uint64_t window, int rank, Ticket ticket) {
  std::lock_guard lock(lock_);
  return withdraw(windows_.withdraw_wait(present(id), window, rank, ticket));
}

bool Engine::flush(Ticket ticket, std::uint32_t id, std::uint64_t window, int rank) {
  return post(ticket, id, nothing_held, [&](Operation* op) { windows_.flush(op, window, rank); });
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
