// Fences for memory that kernels, UCX and programs access without C++ atomics. docs/memory-model.md gives the reason
// for each fence. No std::atomic orders these accesses.
#pragma once

#include <atomic>

namespace aiocomms {

// release: this thread's earlier reads and writes come before its later writes. acquire: its earlier reads come before
// its later reads and writes. On x86-64 neither is an instruction, but both bind the compiler. On aarch64 they are `dmb
// ish` and `dmb ishld`.
inline void fence([[maybe_unused]] std::memory_order order) {
#ifndef __SANITIZE_THREAD__  // ThreadSanitizer does not know fences.
  std::atomic_thread_fence(order);
#endif
}

}  // namespace aiocomms
