// What travels in front of each payload, and what the engines tell each other beside users' data.
#pragma once

#include <cstdint>

namespace aiocomms {

struct Header {
  std::uint32_t group = 0;   // the receiver's number of the communicator
  std::uint32_t order = 0;   // counts the messages from this peer to that, from 0; Worker sets it
  std::uint16_t source = 0;  // rank in the communicator
  std::uint8_t channel = 0;  // whose message: a channel of aiocomms.ops, or one of the engine's own, below
  std::uint8_t dtype = 0;    // and flags, below
  std::uint32_t peer = 0;    // what the receiver calls the sender; Worker sets it
  std::int64_t tag = 0;  // the user's, or the number of a collective, of a lane, of a window, of an offer or an atomic
  std::uint64_t bytes = 0;  // of the payload
  std::uint64_t value = 0;  // a collective's fingerprint; what an atomic has found
  // What only this pair of ranks knows; Worker sets it, and takes no message without it. UCX lets anybody send who has
  // the worker's address.
  std::uint64_t cookie = 0;
};

// Users' channels are those below kUserChannels; the others are the engine's own.
enum Channel : std::uint8_t {
  kUserChannels = 16,
  kSchedule = 16,  // a message of a collective between hosts
  kLane,           // the same of a lane, whose number is the tag
  kSignal,         // of a window
  kAtomic,         // on an element of a window; an Atomic
  kAnswer,         // to an offer: the receiver has the message
  kAssist,         // to an offer: the sender may help
  kVouch,          // for a message that has been sent before
  kAtomicAnswer,
  kChannels
};

// In Header::dtype: the payload is an Offer in place of the data.
constexpr std::uint8_t kOffered = 0x80;
// There, too: the payload counts once its sender has vouched for it, by a message on kVouch with its order as the tag.
constexpr std::uint8_t kVouched = 0x40;

// Where a large message lies, for a receiver on the same host, which copies it from there and answers.
struct Offer {
  std::uint64_t address;
  std::uint64_t number;  // the sender's, for the answer
};

// What the owner of a window is asked to do with an element of it; the answer is what was there before.
struct Atomic {
  std::uint64_t offset, a, b;
  std::uint32_t bytes, swap;
  std::uint64_t number;  // the sender's, for the answer
};

// What stands in each message to a peer, and what has to stand in each message from it.
struct Cookies {
  std::uint64_t ours = 0, theirs = 0;
};

}  // namespace aiocomms
