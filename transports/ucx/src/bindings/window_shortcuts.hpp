// The shortcuts of a window.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "bindings/lanes.hpp"
#include "bindings/slots.hpp"
#include "bindings/tensors.hpp"

namespace aiocomms {

namespace nb = nanobind;

// The object in a window's slot `_shortcuts`: the shortcuts of its communicator, and the data for the window's ops.
//
// The engine checks whether the bytes lie within a rank's part, and refuses the op before anything changes. Python then
// makes the error.
struct WindowShortcuts {
  nb::object shortcuts;
  Caller caller;    // The communicator. Windows follow no lane.
  nb::object info;  // the window in the records of its ops
  PySlot closed;
  std::uint64_t number;
  DType dtype;

  WindowShortcuts(nb::object of, nb::object comm, nb::object window)
      : shortcuts(std::move(of)),
        caller{std::move(comm), {}},
        info(std::move(window)),
        closed(info.type(), "closed"),
        number(nb::cast<std::uint64_t>(info.attr("handle").attr("number"))),
        dtype(view_of(info.attr("tensor")).dtype) {}

  bool open() const { return closed.of(info.ptr()) == Py_False; }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(shortcuts.ptr());
    Py_VISIT(caller.self.ptr());
    Py_VISIT(info.ptr());
    return 0;
  }
  // No caller uses it any more. All references are released together, as in Shortcuts::clear.
  void clear() { const nb::object of = std::move(shortcuts), comm = std::move(caller.self), window = std::move(info); }
};

}  // namespace aiocomms
