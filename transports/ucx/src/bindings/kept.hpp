// Keeps the memory of tensors that the engine uses in place, even if a program changes their storages.
//
// resize_ and share_memory_ give a storage other memory and free the old memory, which the engine still uses. So a
// pending op lends the memory to a storage of the engine. The program's storage keeps the same address and owns
// nothing. Torch refuses to resize such a storage, and giving it other memory frees nothing.
//
// All calls hold the interpreter's lock. With a torch that cannot exchange the memory of two storages, nothing is kept.
// torch 2.13 can.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace aiocomms {

class Kept {
 public:
  Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept();

  // Shared memory stays in place anyway, and so does a device's memory, which torch also calls shared. Nothing is done
  // for either.
  void add(nanobind::handle tensor) noexcept;

 private:
  void lend(nanobind::handle tensor);

  std::vector<std::uintptr_t> places_;  // the addresses of the kept memory
};

}  // namespace aiocomms
