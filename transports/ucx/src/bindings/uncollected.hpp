// Keeps Python's garbage collector off while it lives. The caller holds the interpreter's lock.
#pragma once

#include <Python.h>

namespace aiocomms {

// Up to Python 3.11, making an object may collect garbage, which runs any code of the program.
class Uncollected {
 public:
  Uncollected() = default;
  Uncollected(const Uncollected&) = delete;
  Uncollected& operator=(const Uncollected&) = delete;
  ~Uncollected() {
    if (collects_) PyGC_Enable();
  }

 private:
  const bool collects_ = PyGC_Disable() != 0;
};

}  // namespace aiocomms
