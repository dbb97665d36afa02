// What a thread does between two looks at what another one is about to change.
#pragma once

namespace aiocomms {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace aiocomms
