// What an engine knows of the other ranks of its family.
#pragma once

#include <sys/types.h>

namespace aiocomms {

struct Peer {
  pid_t pid = 0;       // its process, if that is on this host
  pid_t readable = 0;  // the same, if this process may read its memory
};

}  // namespace aiocomms
