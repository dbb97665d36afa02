#include "bindings/tensors.hpp"

#include <dlfcn.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "bindings/uncollected.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

using Tensor = nb::dlpack::dltensor;

// The used head of DLPackExchangeAPI (dlpack.h).
struct Exchange {
  std::uint32_t major, minor;
  void* earlier;
  void* unused[3];
  int (*tensor_of)(void* object, Tensor* out);
};

using Code = nb::dlpack::dtype_code;

// torch's name of a dtype, and DLPack's.
struct Naming {
  const char* name;
  Code code;
  std::uint8_t bits;
};

// In the order of DType.
constexpr std::array<Naming, kDTypes> kNamings = {{{"bool", Code::Bool, 8},
                                                   {"uint8", Code::UInt, 8},
                                                   {"int8", Code::Int, 8},
                                                   {"int16", Code::Int, 16},
                                                   {"int32", Code::Int, 32},
                                                   {"int64", Code::Int, 64},
                                                   {"float16", Code::Float, 16},
                                                   {"bfloat16", Code::Bfloat, 16},
                                                   {"float32", Code::Float, 32},
                                                   {"float64", Code::Float, 64},
                                                   {"complex64", Code::Complex, 64},
                                                   {"complex128", Code::Complex, 128},
                                                   {"uint16", Code::UInt, 16},
                                                   {"uint32", Code::UInt, 32},
                                                   {"uint64", Code::UInt, 64},
                                                   {"float8_e4m3fn", Code::Float8_E4M3FN, 8},
                                                   {"float8_e4m3fnuz", Code::Float8_E4M3FNUZ, 8},
                                                   {"float8_e5m2", Code::Float8_E5M2, 8},
                                                   {"float8_e5m2fnuz", Code::Float8_E5M2FNUZ, 8},
                                                   {"float8_e8m0fnu", Code::Float8_E8M0FNU, 8}}};

// The dtype by DLPack's code and the number of bytes. kDTypes: there is none.
constexpr auto kByCode = [] {
  std::array<std::array<std::uint8_t, 17>, 16> found{};
  for (auto& row : found) row.fill(kDTypes);
  for (std::size_t i = 0; i < kDTypes; ++i) {
    found[static_cast<std::size_t>(kNamings[i].code)][kNamings[i].bits / 8] = static_cast<std::uint8_t>(i);
  }
  return found;
}();

// Objects of torch, which are looked up once. They are never released, because torch is not either.
struct Torch {
  PyObject* tensor;
  const Exchange* exchange = nullptr;
  std::array<PyObject*, kDTypes> dtypes;
  PyObject *is_neg, *is_conj;  // methods of the class, called without a look-up in each tensor
  PyObject* increment_version;
  // torch::autograd::impl::bump_version(const at::Tensor&). A direct call takes 0.2 µs less than `increment_version`,
  // which calls it too. Null: this torch does not have it.
  void (*bump_version)(const void* tensor) = nullptr;
  PyObject* forward_ad;  // the names of the module. No level is entered while `current_level` is `no_level`.
  PyObject* current_level = PyUnicode_InternFromString("_current_level");
  PyObject* no_level = PyLong_FromLong(-1);
  PyObject* requires_grad;  // a descriptor of the class, also called without a look-up

  Torch() {
    nb::module_ torch = nb::module_::import_("torch");
    nb::object cls = torch.attr("Tensor");
    tensor = cls.ptr();
    is_neg = nb::object(cls.attr("is_neg")).release().ptr();
    is_conj = nb::object(cls.attr("is_conj")).release().ptr();
    requires_grad = nb::object(cls.attr("requires_grad")).release().ptr();
    forward_ad = nb::object(nb::module_::import_("torch.autograd.forward_ad").attr("__dict__")).release().ptr();
    increment_version = nb::object(torch.attr("_C").attr("_increment_version")).release().ptr();
    if (void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)) {
      void* const found = dlsym(library, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
      bump_version = reinterpret_cast<void (*)(const void*)>(found);
    }
    for (std::size_t i = 0; i < kDTypes; ++i) dtypes[i] = nb::object(torch.attr(kNamings[i].name)).release().ptr();
    if (nb::hasattr(cls, "__dlpack_c_exchange_api__")) {
      nb::object capsule = cls.attr("__dlpack_c_exchange_api__");
      auto found = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (found == nullptr) nb::raise_python_error();
      if (found->major == 1) exchange = found;
    }
  }
};

const Torch& torch() {
  static const Torch* found = new Torch;
  return *found;
}

std::optional<DType> dtype_of(nb::dlpack::dtype dtype) {
  const std::size_t bytes = dtype.bits / 8;
  if (dtype.lanes != 1 || dtype.bits % 8 != 0 || dtype.code >= kByCode.size() || bytes >= kByCode[0].size()) return {};
  const std::uint8_t found = kByCode[dtype.code][bytes];
  return found < kDTypes ? std::optional(static_cast<DType>(found)) : std::nullopt;
}

std::size_t count_of(const Tensor& tensor) {
  std::size_t count = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) count *= static_cast<std::size_t>(tensor.shape[i]);
  return count;
}

bool is_contiguous(const Tensor& tensor, std::size_t count) {
  if (tensor.strides == nullptr || count <= 1) return true;
  std::int64_t stride = 1;
  for (std::int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

// The truth of the result of a method or an attribute. -1: an error, which is cleared.
int truth(PyObject* answer) {
  int value = answer == nullptr ? -1 : PyObject_IsTrue(answer);
  if (value < 0) PyErr_Clear();
  Py_XDECREF(answer);
  return value;
}

// The words in a Python tensor and in its C++ object.
struct Words {
  std::size_t impl = 0, keys = 0, autograd = 0;  // offsets
  std::uint64_t plain = 0;                       // The dispatch keys of a plain tensor. 0: the offsets are not known.
} words;

template <typename T>
T word_at(const void* object, std::size_t offset) {
  T word;
  std::memcpy(&word, static_cast<const std::byte*>(object) + offset, sizeof word);
  return word;
}

// The C++ object of a tensor. Null: the offsets are not known.
const void* impl_of(PyObject* tensor) { return words.plain != 0 ? word_at<void*>(tensor, words.impl) : nullptr; }

bool has_plain_keys(const void* impl) {
  return impl != nullptr && word_at<std::uint64_t>(impl, words.keys) == words.plain;
}

// Whether a tensor has no lazy state and, if it is written, no tracking by autograd.
bool is_settled(PyObject* tensor, DType dtype, bool written) {
  const Torch& torch_ = torch();
  const void* impl = impl_of(tensor);
  if (!has_plain_keys(impl)) {
    const bool complex = dtype == DType::Complex64 || dtype == DType::Complex128;
    if (truth(PyObject_Vectorcall(torch_.is_neg, &tensor, 1, nullptr)) != 0) return false;
    if (complex && truth(PyObject_Vectorcall(torch_.is_conj, &tensor, 1, nullptr)) != 0) return false;
  }
  if (!written || (impl != nullptr && word_at<void*>(impl, words.autograd) == nullptr)) return true;
  const descrgetfunc get = Py_TYPE(torch_.requires_grad)->tp_descr_get;
  return truth(get(torch_.requires_grad, tensor, torch_.tensor)) == 0;
}

void* pointer(const Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// This serves a torch without the table.
View asked(nb::handle tensor) {
  const nb::object dtype = tensor.attr("dtype");
  for (int i = 0; i < kDTypes; ++i) {
    if (torch().dtypes[i] == dtype.ptr()) {
      auto address = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());
      return {reinterpret_cast<void*>(address), nb::cast<std::size_t>(tensor.attr("numel")()), static_cast<DType>(i)};
    }
  }
  throw std::invalid_argument("a tensor of an unknown dtype");
}

}  // namespace

View view_of(nb::handle tensor) {
  if (torch().exchange == nullptr) return asked(tensor);
  Tensor it{};
  if (torch().exchange->tensor_of(tensor.ptr(), &it) != 0) nb::raise_python_error();
  std::optional<DType> dtype = dtype_of(it.dtype);
  if (!dtype) throw std::invalid_argument("a tensor of an unknown dtype");
  return {pointer(it), count_of(it), *dtype};
}

nb::tuple dtype_names() {
  nb::list names;
  for (const Naming& it : kNamings) names.append(it.name);
  return nb::tuple(names);
}

void read_words_at(std::size_t impl, std::size_t keys, std::size_t autograd, std::uint64_t plain) {
  words = {impl, keys, autograd, plain};
}

std::optional<View> plain_view(nb::handle tensor, bool written) {
  const Torch& torch_ = torch();
  if (torch_.exchange == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())) != torch_.tensor) return {};
  // The tensor may have a tangent.
  if (PyDict_GetItem(torch_.forward_ad, torch_.current_level) != torch_.no_level) return {};
  Tensor it{};
  // The call fails for sparse, nested, meta and wrapped tensors.
  if (torch_.exchange->tensor_of(tensor.ptr(), &it) != 0) {
    PyErr_Clear();
    return {};
  }
  const std::optional<DType> dtype = dtype_of(it.dtype);
  const std::size_t count = count_of(it);
  if (!dtype || it.device.device_type != nb::device::cpu::value) return {};
  if (!is_contiguous(it, count) || (pointer(it) == nullptr && count > 0)) return {};
  if (!is_settled(tensor.ptr(), *dtype, written)) return {};
  return View{pointer(it), count, *dtype, {it.shape, static_cast<std::size_t>(it.ndim)}};
}

void note_write(nb::handle tensor) {
  // A plain tensor has a version, so nothing is thrown. The pointer to the C++ object is the whole at::Tensor.
  if (torch().bump_version != nullptr && has_plain_keys(impl_of(tensor.ptr()))) {
    return torch().bump_version(reinterpret_cast<const std::byte*>(tensor.ptr()) + words.impl);
  }
  const Uncollected uncollected;
  const nb::object written = nb::steal(PyTuple_Pack(1, tensor.ptr()));
  PyObject* given = written.ptr();
  if (given == nullptr || !nb::steal(PyObject_Vectorcall(torch().increment_version, &given, 1, nullptr))) PyErr_Clear();
}

}  // namespace aiocomms
