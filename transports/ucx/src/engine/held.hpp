// A lock that the caller of a post holds, and must not hold while the engine waits.
#pragma once

namespace aiocomms {

// The interpreter's lock of a caller from Python. Releasing and retaking it costs a tenth of a small op's time. So a
// post that does not wait keeps it.
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  // Releases the lock until the call returns. Idempotent.
  virtual void let_go() noexcept = 0;

 protected:
  ~Held() = default;
};

// For a caller that has already released the lock.
class NothingHeld final : public Held {
 public:
  void let_go() noexcept override {}
};

inline NothingHeld nothing_held;

}  // namespace aiocomms
