// The names of Python attributes, interned.
#pragma once

#include <Python.h>

namespace aiocomms {

struct Names {
  PyObject* posted = PyUnicode_InternFromString("_posted");
  PyObject* look_after = PyUnicode_InternFromString("look_after");
  PyObject* ended_at_once = PyUnicode_InternFromString("ended_at_once");
  PyObject* begin = PyUnicode_InternFromString("_begin");
  PyObject* adopted = PyUnicode_InternFromString("_adopted");
  PyObject* kept = PyUnicode_InternFromString("_kept");
  PyObject* posted_as = PyUnicode_InternFromString("_posted_as");
};

inline const Names& names() {
  static const Names* made = new Names;
  return *made;
}

}  // namespace aiocomms
