// What the caller of a post holds while it calls, and must not keep while the engine waits.
#pragma once

namespace aiocomms {

// The interpreter's lock, for whoever calls from Python. To let go of it and to get it back takes a tenth of a small
// op's time, so a post that need not wait leaves it alone.
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  // Idempotent. The caller has it again once the call has returned.
  virtual void let_go() noexcept = 0;

 protected:
  ~Held() = default;
};

// Of a caller that has let go of it already.
class NothingHeld final : public Held {
 public:
  void let_go() noexcept override {}
};

inline NothingHeld nothing_held;

}  // namespace aiocomms
