// What the parts of the engine ask of UCX. Worker does it; a test may stand in for it.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "net/header.hpp"

namespace aiocomms {

// A call that has not finished, and whoever waits for it. The memory it names must stay until `finished`, which UCX
// calls: no exception may leave it.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void finished(ucs_status_t status) noexcept = 0;
};

// Whose memory a call is about: the engine's own, or a user's tensor, which may lie on a device.
enum class Memory { kOwn, kUsers };

// The beginning of a message that is longer than the buffer.
struct Beginning {
  void* data;
  std::size_t room;   // of the buffer
  std::size_t bytes;  // of the message
};

// Each call that takes a Pending returns UCS_OK: done; UCS_INPROGRESS: `pending` will hear of it; or an error.
class Network {
 public:
  virtual ~Network() = default;

  // Send an offer or the like, of which a copy is taken.
  virtual ucs_status_t tell(int peer, Header header, const void* what, std::size_t bytes, Pending* pending) = 0;
  // A message that came with a descriptor is either fetched or released.
  virtual ucs_status_t fetch(void* descriptor, void* data, std::size_t bytes, Memory memory, Pending* pending) = 0;
  // `beginning` must stay as long as `pending`; its memory is no device's.
  virtual ucs_status_t fetch_beginning(void* descriptor, Beginning* beginning, Pending* pending) = 0;
  virtual void release(void* descriptor) = 0;
  // A peer has sent what makes no sense; nothing is taken from it any more. Idempotent.
  virtual void refuse(int peer) = 0;

  // One-sided, on users' memory.
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

// What has been said of a call's end reaches whoever waits for it, now or later.
inline void follow(Pending* pending, ucs_status_t status) noexcept {
  if (status != UCS_INPROGRESS) pending->finished(status);
}

}  // namespace aiocomms
