// Lanes in the bindings: calls of collectives on lanes, and the slots of a Python Lane that a shortcut reads.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "bindings/slots.hpp"
#include "engine/engine.hpp"

namespace aiocomms {

// A communicator's lanes. Collectives are called on it by the lane's number, as on an engine by the communicator's.
struct InLanes {
  Engine& engine;
  std::uint32_t group;

  template <typename Make>
  double collective(Ticket ticket, std::uint64_t lane, std::uint64_t fingerprint, const Make& make,
                    Held& held = nothing_held) {
    return engine.lane_collective(ticket, group, lane, fingerprint, make, held);
  }
};

// An engine or a communicator's lanes, for callers that hold a lock.
template <typename Place>
struct Holding {
  Place& place;
  Held& held;

  template <typename... Args>
  double collective(Args&&... args) {
    return place.collective(std::forward<Args>(args)..., held);
  }
  template <typename... Args>
  bool send(Args&&... args) {
    return place.send(std::forward<Args>(args)..., held);
  }
  template <typename... Args>
  bool recv(Args&&... args) {
    return place.recv(std::forward<Args>(args)..., held);
  }
  template <typename Method, typename... Args>
  bool call(Method method, Args&&... args) {
    return (place.*method)(std::forward<Args>(args)..., held);
  }
};

// The tag of a lane's message in place of the user's, like tag_of of aiocomms/lowering/tags.py.
inline std::int64_t tag_in_lane(std::uint64_t lane, std::int64_t tag) {
  constexpr std::uint64_t kAbove = std::uint64_t{1} << 62, kSpread = 0x9E3779B97F4A7C15u;
  return static_cast<std::int64_t>(kAbove | ((lane + static_cast<std::uint64_t>(tag) * kSpread) & (kAbove - 1)));
}

// The slots of a Python Lane.
struct LaneSlots {
  PyTypeObject* cls;  // borrowed, because a module owns it
  PySlot shortcuts, known, closed;

  explicit LaneSlots(nanobind::handle of)
      : cls(reinterpret_cast<PyTypeObject*>(of.ptr())),
        shortcuts(of, "_shortcuts"),
        known(of, "_known"),
        closed(of, "_closed") {}
};

// The owner of a shortcut's op: a communicator or a lane.
struct Caller {
  nanobind::object self;   // it continues with a pending op
  nanobind::object known;  // the lane's number and its key in words, or null for a communicator
  std::uint64_t lane = 0;  // the number
  // For a call by another thread than the loop's: the op's record, and the object that notes the pending op.
  PyObject* record = nullptr;
  PyObject* keeper = nullptr;
  mutable bool busy = false;  // the engine was busy, and nothing has happened

  explicit operator bool() const { return static_cast<bool>(self); }
  bool in_lane() const { return static_cast<bool>(known); }
  bool elsewhere() const { return record != nullptr; }
  PyObject* number() const { return PyTuple_GET_ITEM(known.ptr(), 0); }
  PyObject* words() const { return PyTuple_GET_ITEM(known.ptr(), 1); }
};

}  // namespace aiocomms
