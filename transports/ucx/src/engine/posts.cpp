// The posting of ops: messages and ops of windows. A post looks for the op's end for a moment before it returns.
#include <sched.h>
#include <sys/resource.h>

#include <utility>

#include "engine/engine.hpp"
#include "net/relax.hpp"

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

}  // namespace

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

}  // namespace aiocomms
