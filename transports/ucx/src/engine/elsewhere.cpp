#include "engine/elsewhere.hpp"

#include <sched.h>

#include "net/relax.hpp"

namespace aiocomms {

double Elsewhere::finish() noexcept {
  Pacer::Spin spin = begin();
  for (;;) {
    const Pacer::Next next = look(spin);
    if (next == Pacer::Next::kStop) return end();
    if (next == Pacer::Next::kYield) {
      sched_yield();
    } else {
      relax();  // Another thread may want the lock.
    }
  }
}

// Looks once, with the lock, for results that may already exist.
Pacer::Spin Elsewhere::begin() noexcept {
  began_ = now_ns();
  const std::lock_guard lock(engine_.lock_);
  Group& group = op_->group;
  if (!engine_.stopping_) {
    engine_.pacer_.begin_look_elsewhere(now_ns());
    if (waits_) lane_ ? lanes_of(group).start_next(*lane_) : engine_.schedules_.start_next(group);
    if (!op_->done() && !engine_.pacer_.bulk()) engine_.advance();
    engine_.tell_loop();
  }
  static_cast<void>(engine_.shares_core(*op_));  // The call notes the core of this rank.
  return engine_.pacer_.begin_post_elsewhere(began_, group.crowded);
}

Pacer::Next Elsewhere::look(Pacer::Spin& spin) noexcept {
  const auto later = [&](Pacer::Next next) { return now_ns() - began_ < spin.budget ? next : Pacer::Next::kStop; };
  if (engine_.lock_.is_wanted()) return later(Pacer::Next::kYield);
  const PriorityLock::Background lock(engine_.lock_, std::try_to_lock);
  if (!lock) return later(Pacer::Next::kRelax);  // The thread that holds the lock makes progress too.
  Pacer& pacer = engine_.pacer_;
  if (op_->done() || engine_.stopping_ || pacer.bulk()) return Pacer::Next::kStop;
  pacer.begin_look_elsewhere(now_ns());
  const bool moved = engine_.advance();
  engine_.tell_loop();
  const Pacer::Next next = op_->done()
                               ? Pacer::Next::kStop
                               : pacer.after_look(spin, moved, now_ns(), [&] { return engine_.shares_core(*op_); });
  if (next == Pacer::Next::kStop) pacer.end_post(spin, op_->done());
  return next;
}

double Elsewhere::end() noexcept {
  const std::lock_guard lock(engine_.lock_);
  if (!op_->is_plain_success()) return 0;
  std::exchange(op_, nullptr)->forget();
  if (!engine_.stopping_) engine_.hand_on();
  return static_cast<double>(now_ns()) * 1e-9;
}

void Elsewhere::leave() noexcept {
  if (op_ == nullptr) return;
  const std::lock_guard lock(engine_.lock_);
  Operation* op = std::exchange(op_, nullptr);
  const bool done = op->done();
  op->leave_post(began_);
  if (engine_.stopping_) return;
  engine_.tell_loop();
  if (done) {
    engine_.hand_on();
  } else if (engine_.pacer_.thread_is_late(engine_.is_quiet())) {
    engine_.wake_thread();
  }
}

}  // namespace aiocomms
