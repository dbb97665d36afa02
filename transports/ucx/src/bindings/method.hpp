// A callable that replaces a method of a class. It passes plain calls to native code, and all other calls to the
// method.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <span>

#include "bindings/arguments.hpp"

namespace aiocomms {

constexpr int kArguments = 3;  // the most arguments of a method that native code takes

// Takes a call on self. held: the object in the slot `_shortcuts` of self. cls: the class that has the method. Returns
// a work or null. Null without an exception means that the call is not taken.
using Start = PyObject* (*)(PyObject* held, PyObject* self, PyTypeObject* cls, Arguments args, Py_ssize_t count);

// A method that native code takes. An empty name ends its arguments.
struct Taken {
  const char* name;
  std::array<const char*, kArguments> arguments;
  Start start;
  nanobind::handle held;  // the type of the slot's object for native calls
};

// Returns the replacement of a method, or the method itself if native code does not take it.
nanobind::object method_of(nanobind::handle cls, nanobind::handle function, std::span<const Taken> taken);

}  // namespace aiocomms
