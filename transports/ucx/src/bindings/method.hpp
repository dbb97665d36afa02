// A callable that stands in a class for one of its methods. It gives plain calls to native code, and all others to the
// method itself.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <span>

#include "bindings/arguments.hpp"

namespace aiocomms {

constexpr int kArguments = 3;  // of a method that native code takes, at most

// Takes a call on self. held: what the slot `_shortcuts` of self has. cls: the class that has the method. Returns a
// work; or null, perhaps with an exception: without one it has not taken the call.
using Start = PyObject* (*)(PyObject* held, PyObject* self, PyTypeObject* cls, Arguments args, Py_ssize_t count);

// A method that native code takes. An argument without a name: there are no more of them.
struct Taken {
  const char* name;
  std::array<const char*, kArguments> arguments;
  Start start;
};

// Returns what stands in the place of a method; of one that is not taken, the method itself.
// held: the type of what the slot has where native code is to be asked.
nanobind::object method_of(nanobind::handle cls, nanobind::handle function, std::span<const Taken> taken,
                           nanobind::handle held);

}  // namespace aiocomms
