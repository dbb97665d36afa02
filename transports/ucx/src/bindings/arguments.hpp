// Arguments of Python's calls, as the shortcuts read them.
#pragma once

#include <Python.h>

#include <cstdint>
#include <optional>

namespace aiocomms {

using Arguments = PyObject* const*;

// Returns the value of an exact int within bounds. None: the argument may not even be a number.
inline std::optional<std::int64_t> int_within(PyObject* given, std::int64_t least, std::int64_t most) {
  if (!PyLong_CheckExact(given)) return {};
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(given, &overflow);
  if (overflow != 0 || value < least || value > most) return {};
  return value;
}

}  // namespace aiocomms
