// The header of each message, and the control messages between engines.
#pragma once

#include <cstdint>

namespace aiocomms {

struct Header {
  std::uint32_t group = 0;   // the receiver's number of the communicator
  std::uint32_t order = 0;   // Counts the messages from this peer to that one, from 0. Worker sets it.
  std::uint16_t source = 0;  // rank in the communicator
  std::uint8_t channel = 0;  // a channel of aiocomms.ops, or one of the engine's own channels below
  std::uint8_t dtype = 0;    // the dtype and the flags below
  std::uint32_t peer = 0;    // The receiver's number of the sender. Worker sets it.
  std::int64_t tag = 0;      // the user's tag, or the number of a collective, lane, window, offer or atomic
  std::uint64_t bytes = 0;   // of the payload
  std::uint64_t value = 0;   // a collective's fingerprint, or the old value of an atomic's element
  // A secret of this pair of ranks. Worker sets it and drops each message without it, because UCX accepts messages from
  // any process with the worker's address.
  std::uint64_t cookie = 0;
};

// Users' channels are below kUserChannels. The others are the engine's own.
enum Channel : std::uint8_t {
  kUserChannels = 16,
  kSchedule = 16,  // a message of a collective between hosts
  kLane,           // a message of a lane's collective, with the lane's number as the tag
  kSignal,         // a signal of a window
  kAtomic,         // an Atomic on an element of a window
  kAnswer,         // answers an offer: the receiver has the message
  kAssist,         // answers an offer: the sender may assist
  kVouch,          // vouches for an earlier message
  kAtomicAnswer,
  kChannels
};

// A flag in Header::dtype: the payload is an Offer instead of the data.
constexpr std::uint8_t kOffered = 0x80;
// A flag in Header::dtype: the payload counts only after its sender vouches for it. The vouch is a message on kVouch,
// with the order of the vouched message as its tag.
constexpr std::uint8_t kVouched = 0x40;

// The place of a large message. A receiver on the same host copies it from there and answers.
struct Offer {
  std::uint64_t address;
  std::uint64_t number;  // the sender's number, for the answer
};

// A request to the owner of a window to change one element. The answer carries the old value.
struct Atomic {
  std::uint64_t offset, a, b;
  std::uint32_t bytes, swap;
  std::uint64_t number;  // the sender's number, for the answer
};

// The secret in each message to a peer, and the secret that each message from the peer must carry.
struct Cookies {
  std::uint64_t ours = 0, theirs = 0;
};

}  // namespace aiocomms
