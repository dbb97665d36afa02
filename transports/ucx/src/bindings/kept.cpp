#include "bindings/kept.hpp"

#include <cstddef>
#include <new>
#include <unordered_map>
#include <utility>

namespace nb = nanobind;

namespace aiocomms {
namespace {

// Objects of torch, which are looked up once. They are never released, because torch is not either.
struct Torch {
  PyObject *untyped_storage, *is_shared, *data_ptr, *nbytes;  // methods of classes
  PyObject* exchange = nullptr;                               // null: this torch does not have it
  PyObject *refer, *cpu;

  Torch() {
    const nb::module_ torch = nb::module_::import_("torch");
    const nb::object tensor = torch.attr("Tensor"), storage = torch.attr("UntypedStorage"), c = torch.attr("_C");
    const auto found = [](nb::handle of, const char* name) { return nb::object(of.attr(name)).release().ptr(); };
    untyped_storage = found(tensor, "untyped_storage");
    is_shared = found(storage, "is_shared");
    data_ptr = found(storage, "data_ptr");
    nbytes = found(storage, "nbytes");
    refer = found(c, "_construct_storage_from_data_pointer");
    cpu = torch.attr("device")("cpu").release().ptr();
    if (nb::hasattr(storage, "_swap_data_ptr_")) exchange = found(storage, "_swap_data_ptr_");
  }
};

const Torch& torch() {
  static const Torch* found = new Torch;
  return *found;
}

// Null: torch has raised an exception, which is cleared.
template <typename... Args>
nb::object call(PyObject* function, const Args&... args) {
  PyObject* given[] = {args.ptr()...};
  PyObject* result = PyObject_Vectorcall(function, given, sizeof...(args), nullptr);
  if (result == nullptr) PyErr_Clear();
  return nb::steal(result);
}

// 0: torch has raised an exception.
std::uintptr_t number(const nb::object& found) {
  return found ? reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(found.ptr())) : 0;
}
std::uintptr_t place_of(const nb::object& storage) { return number(call(torch().data_ptr, storage)); }

// An exchange: the program's storage, and the storage that has its memory meanwhile.
struct Lent {
  nb::object storage, memory;
  std::size_t uses = 0;
};

// By address. It stays until the process ends, and so does the memory that is still kept then.
std::unordered_map<std::uintptr_t, Lent>& lent() {
  static auto* all = new std::unordered_map<std::uintptr_t, Lent>;
  return *all;
}

// False: torch has refused.
bool exchange(const Lent& it) { return static_cast<bool>(call(torch().exchange, it.storage, it.memory)); }

}  // namespace

void Kept::add(nb::handle tensor) noexcept {
  // A finalizer could ask for the op's outcome before its caller has noted the op.
  const int collects = PyGC_Disable();
  try {
    lend(tensor);
  } catch (const std::bad_alloc&) {  // Nothing was exchanged yet.
  }
  if (collects != 0) PyGC_Enable();
}

void Kept::lend(nb::handle tensor) {
  if (torch().exchange == nullptr) return;
  const nb::object storage = call(torch().untyped_storage, tensor);
  if (!storage || !call(torch().is_shared, storage).is(nb::handle(Py_False))) return;
  const nb::object at = call(torch().data_ptr, storage), bytes = call(torch().nbytes, storage);
  const std::uintptr_t place = number(at);
  if (place == 0 || number(bytes) == 0) return;
  places_.reserve(places_.size() + 1);
  const auto [found, fresh] = lent().try_emplace(place);
  if (fresh) {
    Lent made = {storage, call(torch().refer, at, nb::handle(torch().cpu), bytes)};
    if (!made.memory || !exchange(made)) {
      lent().erase(found);
      return;
    }
    found->second = std::move(made);
  }
  ++found->second.uses;
  places_.push_back(place);
}

Kept::~Kept() {
  const nb::error_scope raised;  // A pending exception stays pending.
  for (const std::uintptr_t place : places_) {
    const auto found = lent().find(place);
    if (--found->second.uses > 0) continue;
    const Lent ended = std::move(found->second);  // This reference is released last, because that may run Python code.
    lent().erase(found);
    if (place_of(ended.storage) == place) exchange(ended);
  }
}

}  // namespace aiocomms
