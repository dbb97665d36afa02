// A copy that gives way: a thread of the lowest priority makes it, which runs where a core has nothing else to do.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
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

// Bytes that are copied before the core is offered to others: some 10 µs. A thread that yields, as the engine's users
// do while they wait, does not wake later, and so only a yield gives the core back to it before the next tick, in 4 ms.
constexpr std::size_t kBetweenYields = 64 * 1024;

inline void copy_run(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t& copied) {
  while (bytes > 0) {
    const std::size_t now = std::min(bytes, kBetweenYields - copied);
    std::memcpy(to, from, now);
    to += now;
    from += now;
    bytes -= now;
    copied += now;
    if (copied < kBetweenYields) continue;
    copied = 0;
    sched_yield();
  }
}

inline void copy_dims(std::byte* to, const std::byte* from, const Dim* dim, const Dim* end, std::size_t run,
                      std::size_t& copied) {
  if (dim == end) return copy_run(to, from, run, copied);
  for (std::size_t i = 0; i < dim->count; ++i) {
    copy_dims(to + static_cast<std::ptrdiff_t>(i) * dim->to, from + static_cast<std::ptrdiff_t>(i) * dim->from, dim + 1,
              end, run, copied);
  }
}

// Elements that lie at these places, in dimensions of which the last one is the innermost.
inline void copy_strided(std::byte* to, const std::byte* from, std::vector<Dim> dims, std::size_t element) {
  std::size_t run = element;
  while (!dims.empty() && dims.back().to == dims.back().from && dims.back().to == static_cast<std::ptrdiff_t>(run)) {
    run *= dims.back().count;
    dims.pop_back();
  }
  std::size_t copied = 0;
  copy_dims(to, from, dims.data(), dims.data() + dims.size(), run, copied);
}

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
