#include "bindings/method.hpp"

#include <nanobind/stl/string.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <string>

#include "bindings/slots.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

// A Method is never freed, like its class, which a module owns.
struct Method {
  PyObject_HEAD vectorcallfunc call;
  PyObject* function;
  Start start;
  Py_ssize_t arguments;
  std::array<PyObject*, kArguments> names;  // interned
  PyTypeObject* cls;                        // its instances and those of its subclasses have the slot
  PySlot slot;
  PyTypeObject* held;  // The expected type. The objects of other plug-ins, or None, are not used.
};

Method& method_at(PyObject* self) { return *reinterpret_cast<Method*>(self); }

// Puts the arguments in their order. Returns their number. -1: there are unknown names, too many arguments, or a gap.
Py_ssize_t fill(const Method& it, Arguments args, Py_ssize_t count, PyObject* keywords, PyObject** filled) {
  if (count > it.arguments) return -1;
  std::copy(args, args + count, filled);
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const auto end = it.names.begin() + it.arguments;
    const auto found = std::find(it.names.begin(), end, PyTuple_GET_ITEM(keywords, i));
    if (found == end || filled[found - it.names.begin()] != nullptr) return -1;
    filled[found - it.names.begin()] = args[count + i];
  }
  return std::find(filled, filled + count + named, nullptr) == filled + count + named ? count + named : -1;
}

PyObject* method_call(PyObject* self, Arguments args, size_t flagged, PyObject* keywords) {
  const Method& it = method_at(self);
  const Py_ssize_t count = PyVectorcall_NARGS(flagged);
  PyObject* held = count > 0 && PyObject_TypeCheck(args[0], it.cls) ? it.slot.of(args[0]) : nullptr;
  if (held != nullptr && Py_IS_TYPE(held, it.held)) {
    PyObject* filled[kArguments] = {};
    const Py_ssize_t given = fill(it, args + 1, count - 1, keywords, filled);
    PyObject* work = nullptr;
    try {
      if (given >= 0) work = it.start(held, args[0], it.cls, filled, given);
    } catch (const std::bad_alloc&) {  // The engine does not have the op yet.
    }
    if (work != nullptr || PyErr_Occurred()) return work;
  }
  return PyObject_Vectorcall(it.function, args, flagged, keywords);
}

PyObject* method_bind(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

// Its name, documentation and annotations are the function's, which `inspect` reads.
PyObject* method_attribute(PyObject* self, PyObject* name) {
  PyObject* function = method_at(self).function;
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(function);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return PyObject_GenericGetAttr(self, name);
  return PyObject_GetAttr(function, name);
}

PyTypeObject* make_type() {
  static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, nullptr},
                                  {nullptr, 0, 0, 0, nullptr}};
  PyType_Slot slots[] = {type_slot(Py_tp_call, PyVectorcall_Call),
                         type_slot(Py_tp_descr_get, method_bind),
                         type_slot(Py_tp_getattro, method_attribute),
                         {Py_tp_members, members},
                         {0, nullptr}};
  constexpr unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR |
                             Py_TPFLAGS_DISALLOW_INSTANTIATION;
  PyType_Spec spec = {"aiocomms_ucx._engine.Method", sizeof(Method), 0, flags, slots};
  PyObject* made = PyType_FromSpec(&spec);
  if (made == nullptr) nb::raise_python_error();
  return reinterpret_cast<PyTypeObject*>(made);
}

}  // namespace

nb::object method_of(nb::handle cls, nb::handle function, std::span<const Taken> taken) {
  static PyTypeObject* const type = make_type();
  const auto name = nb::cast<std::string>(function.attr("__name__"));
  const auto found = std::find_if(taken.begin(), taken.end(), [&](const Taken& it) { return name == it.name; });
  if (found == taken.end()) return nb::borrow(function);
  const PySlot slot(cls, "_shortcuts");
  auto method = PyObject_New(Method, type);
  if (method == nullptr) nb::raise_python_error();
  method->call = method_call;
  method->function = function.inc_ref().ptr();
  method->start = found->start;
  method->arguments = 0;
  for (const char* argument : found->arguments) {
    if (argument != nullptr) method->names[method->arguments++] = PyUnicode_InternFromString(argument);
  }
  method->cls = reinterpret_cast<PyTypeObject*>(cls.ptr());
  method->slot = slot;
  method->held = reinterpret_cast<PyTypeObject*>(found->held.ptr());
  return nb::steal(reinterpret_cast<PyObject*>(method));
}

}  // namespace aiocomms
