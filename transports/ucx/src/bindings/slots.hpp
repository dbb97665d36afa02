// Attributes of Python's objects that stand in slots, and are read in place. That takes 1 ns; to ask for one takes 20.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

namespace aiocomms {

// Not Slot: the collectives have a class of that name, and the linker takes either for both.
class PySlot {
 public:
  // The slot of all instances of a class, and of its subclasses; nb::type_error: that attribute is none.
  PySlot(nanobind::handle cls, const char* name) {
    const nanobind::object found = cls.attr(name);
    auto member = reinterpret_cast<PyMemberDescrObject*>(found.ptr());
    if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type || member->d_member->type != T_OBJECT_EX) {
      throw nanobind::type_error("an attribute that is no slot");
    }
    offset_ = member->d_member->offset;
  }

  // Borrowed; null: it was never set.
  PyObject* of(PyObject* owner) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner) + offset_);
  }

 private:
  Py_ssize_t offset_ = 0;
};

}  // namespace aiocomms
