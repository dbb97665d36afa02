// The ops that native code starts: the arguments of their methods, and the role of each argument.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "bindings/method.hpp"

namespace aiocomms {

// The role of an argument. A rank may be the caller's own. A peer is another rank.
enum class Role : std::uint8_t { kNone, kWritten, kRead, kRank, kPeer, kTag, kOffset, kOperator };

enum class Of : std::uint8_t { kCollectives, kMessages, kWindows };

struct Argument {
  const char* name = nullptr;
  Role role = Role::kNone;
};

// A missing argument has a default, which is plain. Only tags, offsets and operators may be missing.
struct Signature {
  const char* name;
  Of of;
  std::array<Argument, kArguments> arguments{};

  // The position of the argument with a role. -1: there is none.
  constexpr int index_of(Role role) const {
    for (int i = 0; i < kArguments; ++i) {
      if (arguments[static_cast<std::size_t>(i)].role == role) return i;
    }
    return -1;
  }
  constexpr bool has(Role role) const { return index_of(role) >= 0; }
};

constexpr bool is_tensor(Role role) { return role == Role::kWritten || role == Role::kRead; }

// The ops, in the order of their signatures.
enum class Name : std::size_t {
  kAllGatherSingle,
  kAllReduce,
  kAllToAllSingle,
  kBarrier,
  kBroadcast,
  kReduceScatterSingle,
  kRecv,
  kSend,
  kGet,
  kPut,
  kPutSignal,
  kSignal,
  kWaitSignal
};

constexpr std::size_t kNames = static_cast<std::size_t>(Name::kWaitSignal) + 1;

constexpr Argument written(const char* name) { return {name, Role::kWritten}; }
constexpr Argument read(const char* name) { return {name, Role::kRead}; }

inline constexpr Argument kOp{"op", Role::kOperator}, kTagged{"tag", Role::kTag}, kFrom{"offset", Role::kOffset};

// A broadcast only reads the root's tensor.
inline constexpr std::array<Signature, kNames> kSignatures{{
    {"all_gather_single", Of::kCollectives, {written("output"), read("input")}},
    {"all_reduce", Of::kCollectives, {written("tensor"), kOp}},
    {"all_to_all_single", Of::kCollectives, {written("output"), read("input")}},
    {"barrier", Of::kCollectives},
    {"broadcast", Of::kCollectives, {written("tensor"), Argument{"root", Role::kRank}}},
    {"reduce_scatter_single", Of::kCollectives, {written("output"), read("input"), kOp}},
    {"recv", Of::kMessages, {written("tensor"), Argument{"src", Role::kPeer}, kTagged}},
    {"send", Of::kMessages, {read("tensor"), Argument{"dst", Role::kPeer}, kTagged}},
    {"get", Of::kWindows, {written("tensor"), Argument{"src", Role::kRank}, kFrom}},
    {"put", Of::kWindows, {read("tensor"), Argument{"dst", Role::kRank}, kFrom}},
    {"put_signal", Of::kWindows, {read("tensor"), Argument{"dst", Role::kRank}, kFrom}},
    {"signal", Of::kWindows, {Argument{"dst", Role::kRank}}},
    {"wait_signal", Of::kWindows, {Argument{"src", Role::kRank}}},
}};

constexpr const Signature& signature_of(Name name) { return kSignatures[static_cast<std::size_t>(name)]; }

}  // namespace aiocomms
