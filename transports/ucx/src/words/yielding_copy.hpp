// A copy that gives way: a thread of the lowest priority makes it, which runs where a core has nothing else to do.
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

// A dimension of what is copied: how many there are, and how many bytes further the next one is on either side.
struct Dim {
  std::size_t count;
  std::ptrdiff_t to, from;
};

// Bytes that are copied before the core is offered to others: some 40 µs. A thread that yields, as the engine's users
// do while they wait, does not wake later, and so only a yield gives the core back to it before the next tick, in 4 ms.
constexpr std::size_t kBetweenYields = 256 * 1024;

// Copies parts of tensors, until it is stopped.
class YieldingCopy {
 public:
  // Any thread may call it. What is under way ends within one piece, and nothing is copied from then on.
  void stop() { stopped_.store(true, std::memory_order_relaxed); }

  // Elements that lie at these places, in dimensions of which the last one is the innermost.
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

// Calls something in a new thread, and waits for its end. Whatever else wants the thread's core has it at once
// (SCHED_IDLE), as long as the two are of one scheduling group; beside a program that never rests, the thread gets some
// 0.3 % of a core. Nobody may need a lock that the thread has.
// std::system_error: no thread can be started.
template <typename Call>
void give_way(const Call& call) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // a signal would wait for the thread to run
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
