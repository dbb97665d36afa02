// The parts of the engine use UCX through this interface. Worker implements it, and tests can replace it.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "net/header.hpp"

namespace aiocomms {

// A call that has not finished, and its waiter. The memory that the call names must stay valid until `finished`. UCX
// calls `finished`, so no exception may leave it.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void finished(ucs_status_t status) noexcept = 0;
};

// The owner of a call's memory: the engine, or the user. A user's tensor may lie on a device.
enum class Memory { kOwn, kUsers };

// The destination of a message that is longer than the buffer.
struct Beginning {
  void* data;
  std::size_t room;   // bytes of the buffer
  std::size_t bytes;  // bytes of the message
};

// Each call with a Pending returns UCS_OK when it is done, UCS_INPROGRESS when it calls `pending` later, or an error.
class Network {
 public:
  virtual ~Network() = default;

  // Sends a short control message, and copies `what`.
  virtual ucs_status_t tell(int peer, Header header, const void* what, std::size_t bytes, Pending* pending) = 0;
  // A message that came with a descriptor is either fetched or released.
  virtual ucs_status_t fetch(void* descriptor, void* data, std::size_t bytes, Memory memory, Pending* pending) = 0;
  // `beginning` must stay as long as `pending`. Its memory is host memory.
  virtual ucs_status_t fetch_beginning(void* descriptor, Beginning* beginning, Pending* pending) = 0;
  virtual void release(void* descriptor) = 0;
  // A peer has sent an invalid message, and this rank takes nothing more from it. Idempotent.
  virtual void refuse(int peer) = 0;

  // One-sided operations on users' memory.
  virtual ucs_status_t put(int peer, ucp_rkey_h rkey, std::uint64_t address, const void* data, std::size_t bytes,
                           Pending* pending) = 0;
  virtual ucs_status_t get(int peer, ucp_rkey_h rkey, std::uint64_t address, void* data, std::size_t bytes,
                           Pending* pending) = 0;
  virtual ucs_status_t flush(int peer, Pending* pending) = 0;
  virtual ucp_mem_h map(void* data, std::size_t bytes) = 0;
  virtual void unmap(ucp_mem_h memory) = 0;
  virtual std::string pack(ucp_mem_h memory) = 0;
  virtual ucp_rkey_h unpack(int peer, const std::string& rkey) = 0;
  virtual void destroy(ucp_rkey_h rkey) = 0;
};

// Passes a call's status to its waiter, unless the waiter is called later.
inline void follow(Pending* pending, ucs_status_t status) noexcept {
  if (status != UCS_INPROGRESS) pending->finished(status);
}

}  // namespace aiocomms
