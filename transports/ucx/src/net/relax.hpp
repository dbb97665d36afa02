// The pause between two reads of a value that another thread is about to change.
#pragma once

namespace aiocomms {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // `yield` only helps cores with several threads, and does nothing on others. `isb` refills the pipeline, which takes
  // about as long as x86's `pause`. Rust's spin_loop() and WiredTiger do the same.
  asm volatile("isb");
#endif
}

}  // namespace aiocomms
