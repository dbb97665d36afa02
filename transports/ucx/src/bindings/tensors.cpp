#include "bindings/tensors.hpp"

#include <nanobind/ndarray.h>

#include <array>
#include <optional>
#include <stdexcept>

namespace nb = nanobind;

namespace aiocomms {
namespace {

using Tensor = nb::dlpack::dltensor;

// The head of DLPackExchangeAPI (dlpack.h), as far as it is used here.
struct Exchange {
  std::uint32_t major, minor;
  void* earlier;
  void* unused[3];
  int (*tensor_of)(void* object, Tensor* out);
};

// As torch calls it.
constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::Bool:
      return "bool";
    case DType::UInt8:
      return "uint8";
    case DType::Int8:
      return "int8";
    case DType::Int16:
      return "int16";
    case DType::Int32:
      return "int32";
    case DType::Int64:
      return "int64";
    case DType::Float16:
      return "float16";
    case DType::BFloat16:
      return "bfloat16";
    case DType::Float32:
      return "float32";
    case DType::Float64:
      return "float64";
    case DType::Complex64:
      return "complex64";
    case DType::Complex128:
      return "complex128";
    case DType::UInt16:
      return "uint16";
    case DType::UInt32:
      return "uint32";
    case DType::UInt64:
      return "uint64";
    case DType::Float8E4M3FN:
      return "float8_e4m3fn";
    case DType::Float8E4M3FNUZ:
      return "float8_e4m3fnuz";
    case DType::Float8E5M2:
      return "float8_e5m2";
    case DType::Float8E5M2FNUZ:
      return "float8_e5m2fnuz";
    case DType::Float8E8M0FNU:
      return "float8_e8m0fnu";
  }
  return "";
}

// What is looked up in torch once; never released, for torch is not either.
struct Torch {
  PyObject* tensor;
  const Exchange* exchange = nullptr;
  std::array<PyObject*, kDTypes> dtypes;
  PyObject *is_neg, *is_conj;  // methods of the class, called without a look-up in each tensor
  PyObject* increment_version;
  PyObject* forward_ad;  // names of the module; none of its levels is entered while the current one is this:
  PyObject* current_level = PyUnicode_InternFromString("_current_level");
  PyObject* no_level = PyLong_FromLong(-1);
  PyObject* requires_grad;  // a descriptor of the class, asked without a look-up, too

  Torch() {
    nb::module_ torch = nb::module_::import_("torch");
    nb::object cls = torch.attr("Tensor");
    tensor = cls.ptr();
    is_neg = nb::object(cls.attr("is_neg")).release().ptr();
    is_conj = nb::object(cls.attr("is_conj")).release().ptr();
    requires_grad = nb::object(cls.attr("requires_grad")).release().ptr();
    forward_ad = nb::object(nb::module_::import_("torch.autograd.forward_ad").attr("__dict__")).release().ptr();
    increment_version = nb::object(torch.attr("_C").attr("_increment_version")).release().ptr();
    for (int i = 0; i < kDTypes; ++i)
      dtypes[i] = nb::object(torch.attr(name_of(static_cast<DType>(i)))).release().ptr();
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
  using Code = nb::dlpack::dtype_code;
  if (dtype.lanes != 1) return {};
  switch (dtype.code << 8 | dtype.bits) {
    case static_cast<int>(Code::Bool) << 8 | 8:
      return DType::Bool;
    case static_cast<int>(Code::UInt) << 8 | 8:
      return DType::UInt8;
    case static_cast<int>(Code::Int) << 8 | 8:
      return DType::Int8;
    case static_cast<int>(Code::Int) << 8 | 16:
      return DType::Int16;
    case static_cast<int>(Code::Int) << 8 | 32:
      return DType::Int32;
    case static_cast<int>(Code::Int) << 8 | 64:
      return DType::Int64;
    case static_cast<int>(Code::Float) << 8 | 16:
      return DType::Float16;
    case static_cast<int>(Code::Bfloat) << 8 | 16:
      return DType::BFloat16;
    case static_cast<int>(Code::Float) << 8 | 32:
      return DType::Float32;
    case static_cast<int>(Code::Float) << 8 | 64:
      return DType::Float64;
    case static_cast<int>(Code::Complex) << 8 | 64:
      return DType::Complex64;
    case static_cast<int>(Code::Complex) << 8 | 128:
      return DType::Complex128;
    case static_cast<int>(Code::UInt) << 8 | 16:
      return DType::UInt16;
    case static_cast<int>(Code::UInt) << 8 | 32:
      return DType::UInt32;
    case static_cast<int>(Code::UInt) << 8 | 64:
      return DType::UInt64;
    case static_cast<int>(Code::Float8_E4M3FN) << 8 | 8:
      return DType::Float8E4M3FN;
    case static_cast<int>(Code::Float8_E4M3FNUZ) << 8 | 8:
      return DType::Float8E4M3FNUZ;
    case static_cast<int>(Code::Float8_E5M2) << 8 | 8:
      return DType::Float8E5M2;
    case static_cast<int>(Code::Float8_E5M2FNUZ) << 8 | 8:
      return DType::Float8E5M2FNUZ;
    case static_cast<int>(Code::Float8_E8M0FNU) << 8 | 8:
      return DType::Float8E8M0FNU;
    default:
      return {};
  }
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

// The answer of a method without arguments, or of an attribute: -1 is an error, which is cleared.
int truth(PyObject* answer) {
  int value = answer == nullptr ? -1 : PyObject_IsTrue(answer);
  if (value < 0) PyErr_Clear();
  Py_XDECREF(answer);
  return value;
}

void* pointer(const Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// For a torch without the table.
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
  for (int i = 0; i < kDTypes; ++i) names.append(name_of(static_cast<DType>(i)));
  return nb::tuple(names);
}

std::optional<View> plain_view(nb::handle tensor, bool written) {
  const Torch& torch_ = torch();
  if (torch_.exchange == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())) != torch_.tensor) return {};
  if (PyDict_GetItem(torch_.forward_ad, torch_.current_level) != torch_.no_level) return {};  // it may have a tangent
  Tensor it{};
  if (torch_.exchange->tensor_of(tensor.ptr(), &it) != 0) {  // sparse, nested, meta and wrapped ones end here
    PyErr_Clear();
    return {};
  }
  const std::optional<DType> dtype = dtype_of(it.dtype);
  const std::size_t count = count_of(it);
  if (!dtype || it.device.device_type != nb::device::cpu::value) return {};
  if (!is_contiguous(it, count) || (pointer(it) == nullptr && count > 0)) return {};
  PyObject* self = tensor.ptr();
  if (truth(PyObject_Vectorcall(torch_.is_neg, &self, 1, nullptr)) != 0) return {};
  const bool is_complex = *dtype == DType::Complex64 || *dtype == DType::Complex128;
  if (is_complex && truth(PyObject_Vectorcall(torch_.is_conj, &self, 1, nullptr)) != 0) return {};
  const descrgetfunc get = Py_TYPE(torch_.requires_grad)->tp_descr_get;
  if (written && truth(get(torch_.requires_grad, self, torch_.tensor)) != 0) return {};
  return View{pointer(it), count, *dtype, {it.shape, static_cast<std::size_t>(it.ndim)}};
}

void note_write(nb::handle tensor) {
  const int collects = PyGC_Disable();
  const nb::object written = nb::steal(PyTuple_Pack(1, tensor.ptr()));
  PyObject* given = written.ptr();
  if (given == nullptr || !nb::steal(PyObject_Vectorcall(torch().increment_version, &given, 1, nullptr))) PyErr_Clear();
  if (collects != 0) PyGC_Enable();
}

}  // namespace aiocomms
