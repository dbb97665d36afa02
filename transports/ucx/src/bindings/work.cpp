#include "bindings/work.hpp"

#include <structmember.h>

#include <algorithm>
#include <cstdint>

#include "bindings/slots.hpp"

namespace nb = nanobind;

namespace aiocomms {

PyObject* WorkObject::pending = nullptr;
PyObject* WorkObject::done = nullptr;
PyObject* WorkObject::op_result = nullptr;

namespace {

constexpr std::uint32_t kAwaits = 32;

PyTypeObject* work_type = nullptr;
PyTypeObject* ended_type = nullptr;
PyObject* await_name = nullptr;
std::uint32_t awaits = 0;

WorkObject* work_of(PyObject* self) { return reinterpret_cast<WorkObject*>(self); }

// -------------------------------------------------------------------------------------------- awaits of finished works

// The result of `__await__` of a finished work: an iterator that does not wait.
struct Ended {
  PyObject_HEAD PyObject* value;  // null: the value was taken
};

PyObject* ended_of(PyObject* value) {
  auto ended = PyObject_New(Ended, ended_type);
  if (ended != nullptr) ended->value = Py_NewRef(value);
  return reinterpret_cast<PyObject*>(ended);
}

void ended_dealloc(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Ended*>(self)->value);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PySendResult ended_am_send(PyObject* self, PyObject*, PyObject** result) {
  PyObject* value = std::exchange(reinterpret_cast<Ended*>(self)->value, nullptr);
  *result = value != nullptr ? value : Py_NewRef(Py_None);
  return PYGEN_RETURN;
}

// The value is a tensor or None. PyErr_SetObject would take a tuple for the arguments of the exception.
PyObject* ended_next(PyObject* self) {
  const nb::object value = nb::steal(std::exchange(reinterpret_cast<Ended*>(self)->value, nullptr));
  PyErr_SetObject(PyExc_StopIteration, value ? value.ptr() : Py_None);
  return nullptr;
}

PyObject* ended_send(PyObject* self, PyObject*) { return ended_next(self); }

PyMethodDef ended_methods[] = {{"send", ended_send, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyTypeObject* make_ended_type() {
  PyType_Slot slots[] = {type_slot(Py_tp_dealloc, ended_dealloc),  type_slot(Py_am_send, ended_am_send),
                         type_slot(Py_tp_iter, PyObject_SelfIter), type_slot(Py_tp_iternext, ended_next),
                         type_slot(Py_tp_methods, ended_methods),  {0, nullptr}};
  PyType_Spec spec = {"aiocomms_ucx._engine.Ended", sizeof(Ended), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// --------------------------------------------------------------------------------------------------------------- works

template <typename Each>
void each_field(WorkObject& work, const Each& each) {
  for (PyObject*& it : work.arguments) each(it);
  for (PyObject*& it : work.fields) each(it);
}

int work_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  int stopped = 0;
  each_field(*work_of(self), [&](PyObject*& field) {
    if (field != nullptr && stopped == 0) stopped = visit(field, arg);
  });
  return stopped;
}

int work_clear(PyObject* self) {
  each_field(*work_of(self), [](PyObject*& field) { Py_CLEAR(field); });
  return 0;
}

void work_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (work_of(self)->weak != nullptr) PyObject_ClearWeakRefs(self);
  work_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* work_op(PyObject* self, void*) {
  WorkObject* work = work_of(self);
  PyObject*& op = work->at(WorkObject::kOp);
  if (op == nullptr) {
    const auto count = std::find(work->arguments.begin(), work->arguments.end(), nullptr) - work->arguments.begin();
    PyObject* made = PyObject_Vectorcall(work->kind, work->arguments.data(), static_cast<std::size_t>(count), nullptr);
    if (made == nullptr) return nullptr;
    if (op == nullptr) {
      op = made;
    } else {
      Py_DECREF(made);  // Another thread has made it meanwhile.
    }
  }
  return Py_NewRef(op);
}

bool is_none(PyObject* field) { return field == nullptr || field == Py_None; }

PyObject* work_await(PyObject* self) {
  WorkObject* work = work_of(self);
  PyObject* value = work->at(WorkObject::kValue);
  const bool ended = work->at(WorkObject::kState) == WorkObject::done && is_none(work->at(WorkObject::kError));
  if (ended && value != WorkObject::op_result && ++awaits % kAwaits != 0) return ended_of(value);
  return PyObject_CallMethodNoArgs(self, await_name);
}

// The names of the fields after kOp, in their order.
constexpr std::array<const char*, WorkObject::kFields - 1> kNames = {
    "_owner",     "_state",  "_value", "lane",  "number", "called", "_error", "_waiters",
    "_callbacks", "_unseen", "_steps", "fault", "hints",  "queue",  "memory", "context"};

constexpr PyMemberDef member(const char* name, std::size_t offset, int type, int flags = 0) {
  return {name, type, static_cast<Py_ssize_t>(offset), flags, nullptr};
}

constexpr std::array<PyMemberDef, kNames.size() + 4> make_members() {
  std::array<PyMemberDef, kNames.size() + 4> members{};
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    const std::size_t offset = offsetof(WorkObject, fields) + (i + 1) * sizeof(PyObject*);
    members[i] = member(kNames[i], offset, i + 1 < WorkObject::kCalled ? T_OBJECT_EX : T_OBJECT);
  }
  members[kNames.size()] = member("seq", offsetof(WorkObject, seq), T_LONGLONG);
  members[kNames.size() + 1] = member("_place", offsetof(WorkObject, place), T_ULONGLONG);
  members[kNames.size() + 2] = member("__weaklistoffset__", offsetof(WorkObject, weak), T_PYSSIZET, READONLY);
  return members;
}

std::array<PyMemberDef, kNames.size() + 4> work_members = make_members();

PyGetSetDef work_getters[] = {{"op", work_op, nullptr, nullptr, nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject* make_work_type() {
  PyType_Slot slots[] = {type_slot(Py_tp_dealloc, work_dealloc),
                         type_slot(Py_tp_traverse, work_traverse),
                         type_slot(Py_tp_clear, work_clear),
                         type_slot(Py_am_await, work_await),
                         type_slot(Py_tp_members, work_members.data()),
                         type_slot(Py_tp_getset, work_getters),
                         {0, nullptr}};
  PyType_Spec spec = {"aiocomms_ucx._engine.WorkFields", sizeof(WorkObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                      slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace

WorkObject* new_work(PyTypeObject* cls, PyObject* owner, long long seq) {
  PyObject* self = cls->tp_alloc(cls, 0);
  if (self == nullptr) return nullptr;
  WorkObject* work = work_of(self);
  work->at(WorkObject::kOwner) = Py_NewRef(owner);
  work->at(WorkObject::kState) = Py_NewRef(WorkObject::pending);
  work->at(WorkObject::kValue) = Py_NewRef(WorkObject::op_result);
  work->seq = seq;
  return work;
}

nb::object work_fields() {
  if (work_type == nullptr) {
    WorkObject::pending = PyLong_FromLong(0);
    WorkObject::done = PyLong_FromLong(1);
    await_name = PyUnicode_InternFromString("_await");
    ended_type = make_ended_type();
    work_type = make_work_type();
  }
  if (ended_type == nullptr || work_type == nullptr) nb::raise_python_error();
  return nb::borrow(reinterpret_cast<PyObject*>(work_type));
}

}  // namespace aiocomms
