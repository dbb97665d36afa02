// This engine's records of other engines. The caller of introduce() chooses their numbers.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "net/header.hpp"
#include "net/socket.hpp"

namespace aiocomms {

// The data about another engine.
struct Introduction {
  std::string address;     // of its worker
  Socket socket{-1};       // the control connection to it
  pid_t pid = 0;           // its process, if it is on this host
  Cookies cookies;         // the secrets that distinguish its messages from foreign ones
  std::uint32_t name = 0;  // its number of this engine
};

struct Peer {
  pid_t pid = 0;            // its process, if it is on this host
  pid_t readable = 0;       // the same, if this process may read its memory
  std::uint64_t asked = 0;  // Since when it owes an echo, in ns. 0: it owes none.
  int owes = 0;             // the number of owed echoes
};

}  // namespace aiocomms
