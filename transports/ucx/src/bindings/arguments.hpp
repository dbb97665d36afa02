// Arguments of Python's calls, as shortcuts look at them.
#pragma once

#include <Python.h>

#include <cstdint>
#include <optional>

namespace aiocomms {

using Arguments = PyObject* const*;

// A number that is exactly an int, and lies within; none: perhaps no number at all.
inline std::optional<std::int64_t> int_within(PyObject* given, std::int64_t least, std::int64_t most) {
  if (!PyLong_CheckExact(given)) return {};
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(given, &overflow);
  if (overflow != 0 || value < least || value > most) return {};
  return value;
}

}  // namespace aiocomms
