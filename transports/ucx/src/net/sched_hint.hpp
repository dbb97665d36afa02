// Whose turn it is where the engine's thread and the event loop share a core.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace aiocomms {

// Let the loop have the core as soon as it wakes. Since Linux 6.12 a thread that wakes goes first if its slice is
// shorter than that of the thread that runs; else it may have to wait for the next tick, 4 ms. So this thread's is
// longer. Twice as long is enough; with much more it would come last itself: one of 20 ms took 20 ms for a message
// beside a busy program. Without effect on older kernels, and on a thread that is not scheduled as usual.
inline void request_long_slice() {
  struct {  // sched_attr of sched_setattr(2), as it first was
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t slice, deadline, period;  // ns
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER || attributes.slice == 0) return;
  attributes.slice *= 2;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace aiocomms
