// The native methods of communicators, lanes and windows, and the Python types of the ledger.
#include "bindings/shortcuts.hpp"

#include <nanobind/stl/optional.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "bindings/ledger.hpp"
#include "bindings/method.hpp"

namespace nb = nanobind;

namespace aiocomms {

PyObject* Shortcuts::post(PyObject* own, PyObject* target, PyObject* record, PyObject* keeper) {
  const auto found = std::find_if(records_.begin(), records_.end(), [&](const Record& it) {
    return it.type == reinterpret_cast<PyObject*>(Py_TYPE(record));
  });
  if (found == records_.end() || !takes_elsewhere()) return nullptr;
  PyTypeObject* lane = lane_ && PyObject_TypeCheck(target, lane_->cls) ? lane_->cls : nullptr;
  Caller of = caller(own, target, lane);
  // Python makes the object that receives a lane's message.
  if (!of || (found->channel && of.in_lane())) return nullptr;
  of.record = record;
  of.keeper = keeper;
  PyObject* args[kArguments] = {};
  for (std::size_t i = 0; i < found->fields.size(); ++i) {
    args[i] = found->fields[i].of(record);
    if (args[i] == nullptr) return nullptr;
  }
  if (found->channel && int_within(found->channel->of(record), kUser, kUser) != kUser) return nullptr;
  const auto count = std::ssize(found->fields);
  for (int tries = 0; tries < kTries; ++tries) {
    if (PyObject* work = (this->*found->start)(of, nullptr, args, count); work != nullptr || PyErr_Occurred())
      return work;
    if (!std::exchange(of.busy, false)) break;
    Unlocked unlocked;  // The owner of the engine's lock may lack a core, which this thread has.
    engine_.wait_for_turn();
  }
  return nullptr;
}

namespace {

template <Name name>
PyObject* start_on_line(PyObject* held, PyObject* self, PyTypeObject* cls, Arguments args, Py_ssize_t count) {
  Shortcuts& it = *nb::inst_ptr<Shortcuts>(held);
  if (!it.takes()) return nullptr;
  const Caller caller = it.caller(held, self, cls);
  return caller ? it.start<name>(caller, nullptr, args, count) : nullptr;
}

template <Name name>
PyObject* start_on_window(PyObject* held, PyObject*, PyTypeObject*, Arguments args, Py_ssize_t count) {
  const WindowShortcuts& window = *nb::inst_ptr<WindowShortcuts>(held);
  if (!window.shortcuts) return nullptr;
  Shortcuts& it = *nb::inst_ptr<Shortcuts>(window.shortcuts);
  return it.takes() ? it.start<name>(window.caller, &window, args, count) : nullptr;
}

template <std::size_t... all>
std::array<Taken, kNames> taken_of(std::index_sequence<all...>) {
  const auto one = []<std::size_t i>() -> Taken {
    constexpr const Signature& it = kSignatures[i];
    const auto& [first, second, third] = it.arguments;
    constexpr bool windows = it.of == Of::kWindows;
    constexpr Start start = windows ? start_on_window<Name{i}> : start_on_line<Name{i}>;
    const nb::handle held = windows ? nb::type<WindowShortcuts>() : nb::type<Shortcuts>();
    return {it.name, {first.name, second.name, third.name}, start, held};
  };
  return {one.template operator()<all>()...};
}

nb::object method(nb::handle cls, nb::handle function) {
  static const std::array<Taken, kNames> taken = taken_of(std::make_index_sequence<kNames>());
  return method_of(cls, function, taken);
}

template <typename T>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<T>(self)->traverse(visit, arg) : 0;
}

template <typename T>
int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<T>(self)->clear();
  return 0;
}

template <typename T>
std::array<PyType_Slot, 3> collected() {
  return {type_slot(Py_tp_traverse, traverse<T>), type_slot(Py_tp_clear, clear<T>), {0, nullptr}};
}

}  // namespace

void define_shortcuts(nb::module_& module) {
  static auto of_ring = collected<Ring>(), of_shortcuts = collected<Shortcuts>(),
              of_window = collected<WindowShortcuts>();
  static auto of_queues = collected<LaneQueues>();

  nb::class_<Ring>(module, "Ring", nb::type_slots(of_ring.data()))
      .def(nb::init<std::size_t>(), nb::arg("capacity"))
      .def(
          "append", [](Ring& ring, nb::handle entry) { ring.append(entry.ptr()); }, nb::arg("entry").none(),
          nb::sig("def append(self, entry: object, /) -> None"))
      .def("__len__", &Ring::size)
      .def(
          "__iter__", [](Ring& ring) { return nb::iter(ring.copy()); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[object]"));
  nb::class_<Count>(module, "Count").def(nb::init<>()).def_ro("value", &Count::value).def("next", &Count::next);
  nb::class_<LaneQueues>(module, "LaneQueues", nb::type_slots(of_queues.data()))
      .def(nb::init<>())
      .def("add", &LaneQueues::add, nb::sig("def add(self, lane: int, work: object, /) -> None"))
      .def("remove", &LaneQueues::remove, nb::sig("def remove(self, lane: int, work: object, /) -> bool"))
      .def("__contains__", &LaneQueues::contains, nb::sig("def __contains__(self, lane: int, /) -> bool"))
      .def("__len__", &LaneQueues::size);
  nb::class_<WindowShortcuts>(module, "WindowShortcuts", nb::type_slots(of_window.data()));
  nb::class_<Shortcuts>(module, "Shortcuts", nb::type_slots(of_shortcuts.data()))
      .def(nb::init<Engine&, std::uint32_t, int, int, const nb::dict&, const nb::list&, nb::object, nb::object,
                    std::size_t>(),
           nb::sig("def __init__(self, engine: Engine, group: int, rank: int, size: int, "
                   "kinds: dict[str, tuple[type, int]], operators: list[tuple[object, int, int]], "
                   "transport: object, line: object, entries: int, /) -> None"))
      .def_static("fields", &work_fields, nb::sig("def fields() -> type"))
      .def_ro("issued", &Shortcuts::issued)
      .def_ro("laned", &Shortcuts::laned)
      .def_rw("calls", &Shortcuts::calls)
      .def_rw("refusing", &Shortcuts::refusing)
      .def_rw("posting", &Shortcuts::posting)
      .def_rw("held", &Shortcuts::held)
      .def_rw("recording", &Shortcuts::recording)
      .def("begin", &Shortcuts::begin, nb::arg("kind"), nb::arg("counted"), nb::arg("lane").none(),
           nb::sig("def begin(self, kind: type, counted: bool, lane: str | None, /) -> int"))
      .def("end", &Shortcuts::note_end, nb::sig("def end(self, entry: object, /) -> None"))
      .def_prop_ro("ring", &Shortcuts::rings, nb::sig("def ring(self) -> Ring"))
      .def_prop_ro("lanes", &Shortcuts::lanes, nb::sig("def lanes(self) -> Ring"))
      .def("elsewhere", &Shortcuts::elsewhere, nb::arg("lane").none())
      .def_static("method", &method,
                  nb::sig("def method(of: type, function: collections.abc.Callable[..., object], /) -> "
                          "collections.abc.Callable[..., object]"))
      .def("use", &Shortcuts::use,
           nb::sig("def use(self, work: type, lane_work: type, part: type, op_result: object, /) -> None"))
      .def("know", &Shortcuts::know, nb::sig("def know(self, lane: type, /) -> None"))
      .def("follow", &Shortcuts::follow, nb::sig("def follow(self, current: object, /) -> None"))
      .def(
          "post",
          [](Shortcuts& of, nb::handle target, nb::handle record, nb::handle keeper) {
            PyObject* work = of.post(nb::find(of).ptr(), target.ptr(), record.ptr(), keeper.ptr());
            if (work == nullptr && PyErr_Occurred()) nb::raise_python_error();
            return work != nullptr ? nb::steal(work) : nb::none();
          },
          nb::sig("def post(self, target: object, record: object, keeper: object, /) -> typing.Any"))
      .def(
          "window",
          [](Shortcuts& of, nb::object comm, nb::object info) {
            return WindowShortcuts(nb::find(of), std::move(comm), std::move(info));
          },
          nb::sig("def window(self, comm: object, info: object, /) -> WindowShortcuts"));
}

}  // namespace aiocomms
