// The number of collectives that a transport has posted. Native code and Python both count, with the interpreter's
// lock.
#pragma once

#include <cstdint>

namespace aiocomms {

struct Count {
  std::uint64_t value = 0;

  std::uint64_t next() { return value++; }  // the number of the next collective
};

}  // namespace aiocomms
