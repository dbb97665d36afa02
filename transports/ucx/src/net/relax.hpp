// What a thread does between two looks at what another one is about to change.
#pragma once

namespace aiocomms {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // `yield` is for cores with several threads, and nothing on others. Refilling the pipeline takes about as long as
  // x86's `pause`: so do Rust's spin_loop() and WiredTiger.
  asm volatile("isb");
#endif
}

}  // namespace aiocomms
