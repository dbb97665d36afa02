// The arguments of a plain call, and the conditions for a plain call.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/calls.hpp"
#include "bindings/signatures.hpp"
#include "bindings/tensors.hpp"

namespace aiocomms {

// An operator without a factor.
struct Defined {
  nanobind::object op;
  int number;
  std::uint32_t dtypes;  // a bit for each DType that it supports

  bool takes(DType dtype) const { return dtypes >> static_cast<int>(dtype) & 1; }
};

// References are borrowed.
struct Plain {
  std::array<PyObject*, kArguments> given{};  // in the order of the record, null at the end
  std::array<View, 2> tensors{};
  const Defined* op = nullptr;
  int rank = 0;
  std::int64_t number = 0;  // the tag, or the offset in elements
  // The tensor that the op writes on this rank. Null: there is none, or its write is noted.
  mutable PyObject* written = nullptr;
  std::array<PyObject*, 2> uses{};  // the tensors

  std::size_t bytes() const { return std::max(tensors[0].bytes(), tensors[1].bytes()); }
  // Idempotent.
  void note_written() const {
    if (PyObject* tensor = std::exchange(written, nullptr)) note_write(tensor);
  }
};

// The arguments that the calls of one communicator may have.
class PlainCalls {
 public:
  // operators: each with its number and its supported dtypes. The default comes first.
  PlainCalls(int rank, int size, const nanobind::list& operators) : rank_(rank), size_(size) {
    for (nanobind::handle it : operators) {
      operators_.push_back({nanobind::object(it[0]), nanobind::cast<int>(it[1]), nanobind::cast<std::uint32_t>(it[2])});
    }
  }

  int size() const { return size_; }

  // Checks all arguments except the tensors. It runs no Python code.
  template <Name name>
  bool fill(Arguments args, Py_ssize_t count, Plain& call) const {
    for (int i = 0; i < kArguments; ++i) {
      const Role role = signature_of(name).arguments[i].role;
      if (role == Role::kNone) break;
      call.given[i] = i < count ? args[i] : default_of(role);
      if (call.given[i] == nullptr || !take(role, call.given[i], call)) return false;
    }
    return true;
  }

  // Checks the tensors.
  template <Name name>
  bool look(Plain& call) const {
    std::size_t found = 0;
    for (int i = 0; i < kArguments; ++i) {
      const Role role = signature_of(name).arguments[i].role;
      if (!is_tensor(role)) continue;
      const bool writes = role == Role::kWritten;
      const std::optional<View> view = plain_view(call.given[i], writes);
      if (!view) return false;
      if (writes) call.written = call.given[i];
      call.uses[found] = call.given[i];
      call.tensors[found++] = *view;
    }
    if (name == Name::kBroadcast && call.rank == rank_) call.written = nullptr;
    return fit<name>(call);
  }

 private:
  static constexpr std::int64_t kMostTag = INT32_MAX, kLeastTag = INT32_MIN;
  static constexpr std::int64_t kMostElements = std::int64_t{1} << 58;  // the number of their bytes fits too

  // Null: there is no default.
  PyObject* default_of(Role role) const {
    static PyObject* const zero = PyLong_FromLong(0);
    if (role == Role::kOperator) return operators_.front().op.ptr();
    return role == Role::kTag || role == Role::kOffset ? zero : nullptr;
  }

  bool take(Role role, PyObject* given, Plain& call) const {
    if (is_tensor(role)) return true;
    if (role == Role::kOperator) {
      const auto found =
          std::find_if(operators_.begin(), operators_.end(), [&](const Defined& it) { return it.op.ptr() == given; });
      if (found == operators_.end()) return false;
      call.op = &*found;
      return true;
    }
    const bool ranks = role == Role::kRank || role == Role::kPeer;
    const auto number = ranks                ? int_within(given, 0, size_ - 1)
                        : role == Role::kTag ? int_within(given, kLeastTag, kMostTag)
                                             : int_within(given, 0, kMostElements);
    if (!number || (role == Role::kPeer && *number == rank_)) return false;
    if (ranks) {
      call.rank = static_cast<int>(*number);
    } else {
      call.number = *number;
    }
    return true;
  }

  // Whether the tensors fit each other and the operator.
  template <Name name>
  bool fit(const Plain& call) const {
    const auto& [first, second] = call.tensors;
    if (call.op != nullptr && !call.op->takes(first.dtype)) return false;
    if constexpr (name == Name::kAllGatherSingle) return is_part(second, first);
    if constexpr (name == Name::kReduceScatterSingle) return is_part(first, second);
    if constexpr (name == Name::kAllToAllSingle) {
      const bool alike = first.dtype == second.dtype &&
                         std::equal(first.shape.begin(), first.shape.end(), second.shape.begin(), second.shape.end());
      return alike && !overlap(first, second) && !first.shape.empty() && first.shape[0] % size_ == 0;
    }
    return true;
  }

  // Whether `whole` has room for a part of each rank, and `part` is this rank's part of it or does not overlap it.
  bool is_part(const View& part, const View& whole) const {
    if (part.dtype != whole.dtype || whole.count != part.count * static_cast<std::size_t>(size_)) return false;
    auto place = static_cast<std::byte*>(whole.data) + static_cast<std::size_t>(rank_) * part.bytes();
    return part.data == place || !overlap(part, whole);
  }
  static bool overlap(const View& a, const View& b) {
    auto from = [](const View& it) { return reinterpret_cast<std::uintptr_t>(it.data); };
    return from(a) < from(b) + b.bytes() && from(b) < from(a) + a.bytes();
  }

  const int rank_, size_;
  std::vector<Defined> operators_;
};

}  // namespace aiocomms
