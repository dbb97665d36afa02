// Releases the interpreter's lock around a call of the engine. bindings.cpp has the rule.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <optional>

#include "engine/held.hpp"

namespace aiocomms {

// Releases the interpreter's lock. After the interpreter's end, a thread that wants it back stops forever, as in Python
// 3.14 and later. Earlier versions of CPython unwind the thread's stack. C++ then ends the process if the stack has a
// destructor.
class Unlocked {
 public:
  Unlocked() = default;
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // Only that unwinding arrives here, and it must not continue.
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_ = PyEval_SaveThread();
};

// The same, but only when the caller must wait. Before the release it runs the caller's remaining work, which costs no
// time during the wait.
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
