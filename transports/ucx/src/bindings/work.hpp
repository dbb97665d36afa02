// The fields of a work that native code has started. A Python class inherits them and has all the methods. The record
// of the op is made on demand.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <utility>

namespace aiocomms {

// All references are owned, except the one to the record's type, which a module owns.
struct WorkObject {
  static constexpr int kArguments = 4;
  // The fields that native code uses. Python alone uses those behind them. From kCalled on, null stands for None.
  enum Field { kOp, kOwner, kState, kValue, kLane, kNumber, kCalled, kError, kFields = 17 };

  PyObject ob_base;
  PyObject* weak;
  PyObject* kind;                               // the type of the record
  std::array<PyObject*, kArguments> arguments;  // arguments of the record, null at the end
  std::array<PyObject*, kFields> fields;        // null in kOp: the record is not made yet
  long long seq;
  unsigned long long place;

  PyObject* object() { return &ob_base; }
  PyObject*& at(Field field) { return fields[field]; }
  bool is_done() const { return fields[kState] != pending; }
  void set(Field field, PyObject* to) { Py_XDECREF(std::exchange(at(field), Py_NewRef(to))); }
  // The work has ended successfully.
  void complete(PyObject* with) {
    set(kValue, with);
    set(kState, done);
  }

  static PyObject *pending, *done;  // the states
  static PyObject* op_result;       // the value of a work whose result is that of its op
};

// The type with these fields. Only native code makes its instances. An await of a successful work needs no Python
// generator. One await in some calls the class's own method, which may give the loop a turn.
nanobind::object work_fields();

// Makes a pending work of a class that inherits the type. Null: no memory.
WorkObject* new_work(PyTypeObject* cls, PyObject* owner, long long seq);

}  // namespace aiocomms
