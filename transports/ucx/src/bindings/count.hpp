// How many collectives a transport has posted; native code and Python count them together, with the interpreter's lock.
#pragma once

#include <cstdint>

namespace aiocomms {

struct Count {
  std::uint64_t value = 0;

  std::uint64_t next() { return value++; }  // the number of one more
};

}  // namespace aiocomms
