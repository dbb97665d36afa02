// A copy that yields. A thread of the lowest priority makes it, and runs when a core is idle.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace aiocomms {

// A dimension of a copy: the number of elements, and the bytes between them on either side.
struct Dim {
  std::size_t count;
  std::ptrdiff_t to, from;
};

// Bytes between two yields, about 40 µs. A thread that yields, as the engine's users do while they wait, has no
// wake-up. So only a yield of the copying thread returns the core to that thread before the next tick, in 4 ms.
constexpr std::size_t kBetweenYields = 256 * 1024;

// Copies parts of tensors until it is stopped.
class YieldingCopy {
 public:
  // Any thread may call it. The present piece ends, and nothing more is copied.
  void stop() { stopped_.store(true, std::memory_order_relaxed); }

  // Copies the elements of all dimensions. The last dimension is the innermost.
  void copy(std::byte* to, const std::byte* from, std::vector<Dim> dims, std::size_t element) {
    std::size_t run = element;
    while (!dims.empty() && dims.back().to == dims.back().from && dims.back().to == static_cast<std::ptrdiff_t>(run)) {
      run *= dims.back().count;
      dims.pop_back();
    }
    copy_dims(to, from, dims.data(), dims.data() + dims.size(), run);
  }

 private:
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  void copy_dims(std::byte* to, const std::byte* from, const Dim* dim, const Dim* end, std::size_t run) {
    if (dim == end) return copy_run(to, from, run);
    for (std::size_t i = 0; i < dim->count && !stopped(); ++i) {
      copy_dims(to + static_cast<std::ptrdiff_t>(i) * dim->to, from + static_cast<std::ptrdiff_t>(i) * dim->from,
                dim + 1, end, run);
    }
  }

  void copy_run(std::byte* to, const std::byte* from, std::size_t bytes) {
    while (bytes > 0 && !stopped()) {
      const std::size_t now = std::min(bytes, kBetweenYields - copied_);
      std::memcpy(to, from, now);
      to += now;
      from += now;
      bytes -= now;
      copied_ += now;
      if (copied_ < kBetweenYields) continue;
      copied_ = 0;
      sched_yield();
    }
  }

  std::atomic<bool> stopped_{false};
  std::size_t copied_ = 0;  // since the last yield
};

// Runs a call in a new thread, and waits for its end.
//
// Any other thread that wants the core gets it at once (SCHED_IDLE), if both have the same scheduling group. Beside a
// program that never rests, the new thread gets about 0.3 % of a core. No other thread may need a lock that this one
// holds. std::system_error: the thread cannot be started.
template <typename Call>
void give_way(const Call& call) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // A signal handler would have to wait until the thread ends.
  std::thread thread;
  try {
    thread = std::thread([&call] {
      const sched_param lowest{};
      pthread_setschedparam(pthread_self(), SCHED_IDLE, &lowest);
      call();
    });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  thread.join();
}

}  // namespace aiocomms
