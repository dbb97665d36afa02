// Other engines, as one knows them, by numbers that whoever introduces them chooses.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "net/header.hpp"
#include "net/socket.hpp"

namespace aiocomms {

// What an engine is told of another one.
struct Introduction {
  std::string address;     // of its worker
  Socket socket{-1};       // the control connection with it
  pid_t pid = 0;           // its process, if that is on this host
  Cookies cookies;         // what tells its messages from strangers'
  std::uint32_t name = 0;  // what it calls this engine
};

struct Peer {
  pid_t pid = 0;            // its process, if that is on this host
  pid_t readable = 0;       // the same, if this process may read its memory
  std::uint64_t asked = 0;  // since when it owes an echo, ns; 0: it owes none
  int owes = 0;             // echoes
};

}  // namespace aiocomms
