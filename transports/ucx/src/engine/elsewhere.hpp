// A post by another thread than the loop's. It keeps nobody else from posting for longer than a look at the engine
// takes, and nobody hears of the outcome before the thread has noted what is pending. So it is made in steps:
//
// 1. A collective gets its place among those of its communicator, or of its lane. That waits for nothing but, for a
//    moment, the engine's lock, and so the thread may have the interpreter's; it starts with the next step. A message
//    is started, which may take longer.
// 2. finish(): the thread looks on until the op is done, for as long as the loop would, but that it holds the lock for
//    one look at a time. The loop goes first.
// 3. leave(): the outcome goes to the loop, unless the loop has withdrawn the op meanwhile, of which it then hears no
//    more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/engine.hpp"

namespace aiocomms {

class Elsewhere {
 public:
  Elsewhere(Engine& engine, std::uint32_t group) : engine_(engine), group_(group) {}
  Elsewhere(const Elsewhere&) = delete;
  Elsewhere& operator=(const Elsewhere&) = delete;
  ~Elsewhere() { leave(); }

  // As the methods of Engine; each returns that the op is not done: nobody has looked yet.
  template <typename Make>
  double collective(Ticket ticket, std::uint32_t group, std::uint64_t fingerprint, const Make& make) {
    place([&] {
      auto op = engine_.expected(ticket, engine_.opened(group));
      Task task = make(op->group, op->unequal);
      engine_.schedules_.enqueue(op->group, {std::move(task), fingerprint, op.get()});
      return op;
    });
    return 0;
  }
  template <typename Make>
  double collective(Ticket ticket, std::uint64_t lane, std::uint64_t fingerprint, const Make& make) {
    place([&] {
      auto op = engine_.expected(ticket, engine_.opened(group_));
      engine_.add_to_lane<&Lanes::enqueue>(*op, lane, fingerprint, make);
      return op;
    });
    lane_ = lane;
    return 0;
  }
  template <typename... Args>
  bool send(Ticket ticket, std::uint32_t, Args... args) {
    start(ticket, [&](Operation* op) { engine_.start_send(op, args...); });
    return false;
  }
  template <typename... Args>
  bool recv(Ticket ticket, std::uint32_t, Args... args) {
    start(ticket, [&](Operation* op) { engine_.start_recv(op, args...); });
    return false;
  }

  // Whether the engine has the op. If not nothing has happened: others have kept the lock.
  bool placed() const { return op_ != nullptr; }
  // When the op was done, in seconds; 0: it is not, or has not ended well.
  double finish() noexcept;
  // Idempotent.
  void leave() noexcept;

 private:
  template <typename Place>
  void place(const Place& make) {
    const std::unique_lock lock(engine_.lock_, std::try_to_lock);
    if (!lock) return;
    accept(make());
    waits_ = true;
  }
  template <typename Start>
  void start(Ticket ticket, const Start& begin) {
    const std::lock_guard lock(engine_.lock_);
    auto op = engine_.expected(ticket, engine_.opened(group_));
    begin(op.get());  // may throw before the op is known to anybody else
    accept(std::move(op));
  }
  void accept(std::unique_ptr<Operation> op) noexcept {
    op_ = op.release();
    op_->expect_outcome();
  }
  Pacer::Spin begin() noexcept;
  Pacer::Next look(Pacer::Spin& spin) noexcept;
  double end() noexcept;

  Engine& engine_;
  const std::uint32_t group_;
  Operation* op_ = nullptr;
  bool waits_ = false;                 // it is a collective that has its place, and has not begun
  std::optional<std::uint64_t> lane_;  // whose it is
  std::uint64_t began_ = 0;            // the post
};

}  // namespace aiocomms
