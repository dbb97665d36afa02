// A post by another thread than the loop's. It keeps other threads from posting for at most one look at the engine. The
// loop receives the outcome only after the posting thread has noted what is pending. A post has three steps:
//
// 1. A collective takes its place in its communicator or lane. It only tries the engine's lock, so the thread may hold
//    the interpreter's lock. It starts with the next step. A message is started here, which may take longer.
// 2. finish(): the thread looks until the op is done, for as long as the loop would. It holds the engine's lock for one
//    look at a time, and the loop goes first.
// 3. leave(): the loop gets the outcome, unless it has withdrawn the op.
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

  // These are the posting methods of Engine. Each returns that the op is not done, because no look has followed yet.
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

  // Whether the engine has the op. If not, another thread holds the lock, and nothing has changed.
  bool placed() const { return op_ != nullptr; }
  // Returns when the op was done, in seconds. 0: the op is not done, or has not succeeded.
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
    begin(op.get());  // This call may throw before the engine knows the op.
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
  bool waits_ = false;                 // the op is a collective that has its place and has not begun
  std::optional<std::uint64_t> lane_;  // the collective's lane
  std::uint64_t began_ = 0;            // the start of the post
};

}  // namespace aiocomms
