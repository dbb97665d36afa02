// Order where C++'s own ends: of memory that kernels, UCX and programs read and write, and of none of which a
// std::atomic says when. docs/memory-model.md has each fence's reason.
#pragma once

#include <atomic>

namespace aiocomms {

// release: before what this thread writes from now on it has read and written all so far. acquire: after what it has
// read so far it reads and writes all from now on. Neither is an instruction on x86-64, but both bind the compiler; on
// aarch64 they are `dmb ish` and `dmb ishld`.
inline void fence([[maybe_unused]] std::memory_order order) {
#ifndef __SANITIZE_THREAD__  // which does not know fences
  std::atomic_thread_fence(order);
#endif
}

}  // namespace aiocomms
