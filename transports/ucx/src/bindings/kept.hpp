// The memory of tensors that the engine uses, which stays there whatever a program does to their storages meanwhile.
//
// resize_ and share_memory_ give a storage other memory, and free what it had, whose address the engine has. So for as
// long as an op is pending its memory is lent: it belongs to a storage of ours, and the program's has the same address
// and owns nothing. Torch refuses to resize that; and to give it other memory frees nothing.
//
// All calls hold the interpreter's lock. A torch that cannot exchange the memory of two storages has nothing kept; 2.13
// can.
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

  // Shared memory stays anyway, and so does that of a device, which torch calls shared, too: nothing is done.
  void add(nanobind::handle tensor) noexcept;

 private:
  void lend(nanobind::handle tensor);

  std::vector<std::uintptr_t> places_;  // with memory of each
};

}  // namespace aiocomms
