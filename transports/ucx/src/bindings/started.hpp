// An op that native code has started: its work, and the entries that the recorder and the pending ops have of it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <new>
#include <utility>

#include "bindings/kept.hpp"
#include "bindings/plain.hpp"
#include "bindings/work.hpp"

namespace aiocomms {

namespace nb = nanobind;

struct Kind {
  nb::object record;
  int form = -1;  // -1: it is not a collective
};

// A work that no other code knows yet, and its number. For a lane's message also the object by which the engine knows
// it.
struct Started {
  const Plain& call;
  const Kind& kind;
  nb::object work{}, part{};
  nb::object numbers{};  // the recorder's numbers, or null
  PyObject* result = nullptr;

  bool collective() const { return kind.form >= 0; }
  WorkObject& fields() const { return *reinterpret_cast<WorkObject*>(work.ptr()); }
  PyObject* known_by() const { return part ? part.ptr() : work.ptr(); }

  // The recorder's entry for an op that has ended. Null: no memory.
  nb::object row(double at) const {
    const nb::object seq = nb::steal(PyLong_FromLongLong(fields().seq)), when = nb::steal(PyFloat_FromDouble(at));
    if (!seq || !when) return {};
    PyObject* noted = numbers ? numbers.ptr() : Py_None;
    return nb::steal(PyTuple_Pack(6, seq.ptr(), kind.record.ptr(), when.ptr(), noted, Py_None, Py_None));
  }

  // The entry among the pending ops. told: the object that receives the outcome. Null: no memory.
  nb::object entry(const nb::object& owner, const nb::object& told, const nb::object& index) const {
    const nb::object kept = keep();
    return nb::steal(index && kept ? PyTuple_Pack(4, owner.ptr(), told.ptr(), index.ptr(), kept.ptr()) : nullptr);
  }

 private:
  // Null: no memory.
  nb::object keep() const {
    if (call.uses[0] == nullptr) return nb::none();
    try {
      auto kept = std::make_unique<Kept>();
      for (PyObject* tensor : call.uses) {
        if (tensor != nullptr) kept->add(tensor);
      }
      return nb::cast(std::move(kept));
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
      return {};
    }
  }
};

}  // namespace aiocomms
