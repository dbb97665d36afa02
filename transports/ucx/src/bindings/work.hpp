// The fields of a work that native code has started. A class of Python's inherits them, and has all the methods. The
// record of the op is made when somebody asks for it.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <utility>

namespace aiocomms {

// All references are owned, but to the type of the record, which is a module's.
struct WorkObject {
  static constexpr int kArguments = 4;
  // The fields that native code uses; Python alone uses those behind them. From kCalled on null stands for None.
  enum Field { kOp, kOwner, kState, kValue, kLane, kNumber, kCalled, kError, kFields = 17 };

  PyObject ob_base;
  PyObject* weak;
  PyObject* kind;                               // the type of the record
  std::array<PyObject*, kArguments> arguments;  // of the record; null: there are no more of them
  std::array<PyObject*, kFields> fields;        // null of kOp: the record was not made yet
  long long seq;
  unsigned long long place;

  PyObject* object() { return &ob_base; }
  PyObject*& at(Field field) { return fields[field]; }
  bool is_done() const { return fields[kState] != pending; }
  void set(Field field, PyObject* to) { Py_XDECREF(std::exchange(at(field), Py_NewRef(to))); }
  // It has ended, and well.
  void complete(PyObject* with) {
    set(kValue, with);
    set(kState, done);
  }

  static PyObject *pending, *done;  // the states
  static PyObject* op_result;       // the value of a work whose result is its op's
};

// The type that has these fields; native code alone makes its instances. An await of one that has ended well takes no
// generator of Python's. One await in some asks the class's own method, which may let the loop have its turn.
nanobind::object work_fields();

// A pending work of a class that inherits the type. Null: no memory.
WorkObject* new_work(PyTypeObject* cls, PyObject* owner, long long seq);

}  // namespace aiocomms
