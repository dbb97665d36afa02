// How plain one-sided ops are started without a frame of Python's: what one window adds to the shortcuts of its
// communicator (shortcuts.cpp), whose rules are these ones'.
//
// Whether the bytes lie within a rank's part is the engine's to say, which refuses an op before anything has happened;
// then Python looks, and makes the error.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "bindings/arguments.hpp"
#include "bindings/lanes.hpp"
#include "bindings/slots.hpp"
#include "bindings/tensors.hpp"
#include "engine/engine.hpp"

namespace aiocomms {

// Shortcuts: the communicator's.
template <typename Shortcuts>
class WindowShortcuts {
 public:
  // comm: the communicator; info: the window, as the records of ops on it see it.
  WindowShortcuts(nanobind::object shortcuts, nanobind::object comm, nanobind::object info)
      : shortcuts_(std::move(shortcuts)),
        caller_{std::move(comm), {}},
        info_(std::move(info)),
        closed_(info_.type(), "closed"),
        number_(nanobind::cast<std::uint64_t>(info_.attr("handle").attr("number"))),
        dtype_(view_of(info_.attr("tensor")).dtype) {}

  // Each returns a work; or null, perhaps with an exception: without one it was not taken.
  PyObject* put(Arguments args, Py_ssize_t count) {
    auto call = [](Engine& engine, auto&&... where) { return engine.put(where...); };
    return copy(it().put_, args, count, false, call);
  }
  PyObject* put_signal(Arguments args, Py_ssize_t count) {
    auto call = [](Engine& engine, auto&&... where) { return engine.put_signal(where...); };
    return copy(it().put_signal_, args, count, false, call);
  }
  PyObject* get(Arguments args, Py_ssize_t count) {
    auto call = [](Engine& engine, auto&&... where) { return engine.get(where...); };
    return copy(it().get_, args, count, true, call);
  }
  PyObject* signal(Arguments args, Py_ssize_t count) {
    auto call = [](Engine& engine, auto&&... where) { return engine.signal(where...); };
    return tell(it().signal_, args, count, call);
  }
  PyObject* wait_signal(Arguments args, Py_ssize_t count) {
    auto call = [](Engine& engine, auto&&... where) { return engine.wait_signal(where...); };
    return tell(it().wait_signal_, args, count, call);
  }

  bool takes() const { return shortcuts_ && it().takes(); }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(shortcuts_.ptr());
    Py_VISIT(caller_.self.ptr());
    Py_VISIT(info_.ptr());
    return 0;
  }
  // Nobody calls it any more. All is let go of at once, as by the communicator's.
  void clear() {
    const nanobind::object shortcuts = std::move(shortcuts_), comm = std::move(caller_.self), info = std::move(info_);
  }

 private:
  static constexpr std::int64_t kMostElements = std::int64_t{1} << 58;  // their bytes are a number, too

  Shortcuts& it() const { return *nanobind::inst_ptr<Shortcuts>(shortcuts_); }
  bool open() const { return closed_.of(info_.ptr()) == Py_False; }

  // call: bool (Engine&, Ticket, group, window, rank, offset, data, bytes, Held&).
  template <typename Kind, typename Call>
  PyObject* copy(const Kind& kind, Arguments args, Py_ssize_t count, bool written, const Call& call) {
    const auto rank = count < 2 ? std::nullopt : int_within(args[1], 0, it().size_ - 1);
    nanobind::object first = count < 3 ? nanobind::steal(PyLong_FromLong(0)) : nanobind::borrow(args[2]);
    const auto offset = int_within(first.ptr(), 0, kMostElements);
    if (!rank || !offset) return nullptr;
    const auto started = it().make(caller_, kind, {info_.ptr(), args[0], args[1], first.ptr()});
    const std::optional<View> data = started.view(args[0], written);
    if (!data || data->dtype != dtype_ || !open()) return nullptr;
    const std::uint64_t begin = static_cast<std::uint64_t>(*offset) * size_of(dtype_);
    return it().start_single(caller_, kind, started, args[0], args[1], data->bytes(), [&](Ticket ticket, Held& held) {
      return call(it().engine_, ticket, it().group_, number_, static_cast<int>(*rank), begin, data->data, data->bytes(),
                  held);
    });
  }

  // call: bool (Engine&, Ticket, group, window, rank, Held&).
  template <typename Kind, typename Call>
  PyObject* tell(const Kind& kind, Arguments args, Py_ssize_t count, const Call& call) {
    const auto rank = count < 1 ? std::nullopt : int_within(args[0], 0, it().size_ - 1);
    if (!rank) return nullptr;
    const auto started = it().make(caller_, kind, {info_.ptr(), args[0]});
    if (!started.work || !open()) return nullptr;
    return it().start_single(caller_, kind, started, Py_None, args[0], 0, [&](Ticket ticket, Held& held) {
      return call(it().engine_, ticket, it().group_, number_, static_cast<int>(*rank), held);
    });
  }

  nanobind::object shortcuts_;
  Caller caller_;  // the communicator: windows follow no lane
  nanobind::object info_;
  const PySlot closed_;
  const std::uint64_t number_;
  const DType dtype_;
};

}  // namespace aiocomms
