// The interpreter's lock, let go of around a call of the engine; the rule of it stands in bindings.cpp.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <optional>

#include "engine/held.hpp"

namespace aiocomms {

// Lets go of the interpreter's lock. Whoever wants it back once the interpreter has ended stands still for ever, as in
// Python from 3.14 on: before, CPython unwinds that thread's stack, and C++ ends the process where a destructor is in
// it.
class Unlocked {
 public:
  Unlocked() = default;
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // nothing but that unwinding, which must not end here
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_ = PyEval_SaveThread();
};

// The same, once that is asked for: when the caller is to wait. What it has still to do it does then, for it costs
// nothing.
template <typename Meanwhile>
class Unlockable final : public Held {
 public:
  explicit Unlockable(const Meanwhile& meanwhile) : meanwhile_(meanwhile) {}

  void let_go() noexcept override {
    if (unlocked_) return;
    meanwhile_();
    unlocked_.emplace();
  }

 private:
  const Meanwhile& meanwhile_;
  std::optional<Unlocked> unlocked_;
};

}  // namespace aiocomms
