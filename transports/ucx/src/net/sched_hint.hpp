// A scheduling hint for the case that the engine's thread and the event loop share a core.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace aiocomms {

// Gives the core to the loop as soon as the loop wakes.
//
// Since Linux 6.12 a waking thread goes first if its slice is shorter than the running thread's slice. Otherwise it may
// wait for the next tick, 4 ms. So this thread requests a longer slice.
//
// Twice the length is enough. With a slice of 20 ms this thread itself waited 20 ms for a message beside a busy
// program. The request has no effect on older kernels, or on a thread with another policy than SCHED_OTHER.
inline void request_long_slice() {
  struct {  // the first version of sched_attr, see sched_setattr(2)
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
