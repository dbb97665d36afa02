// The contributions of ranks to a reduction, and the expected results.
#pragma once

#include <cmath>
#include <complex>
#include <cstdlib>

#include "collectives/half.hpp"
#include "collectives/reduce.hpp"
#include "fake_network.hpp"

namespace aiocomms {

using std::size_t;
using Value = std::complex<double>;

// Conversion of a value to an element of a dtype and back.

template <class T>
void put(Byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

template <class T>
T get(const Byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void put_narrow(Byte* to, double value) {
  T narrowed;
  narrow(static_cast<float>(value), narrowed);
  put(to, narrowed);
}

inline void encode(DType dtype, Byte* to, Value value) {
  const auto integer = [&] { return static_cast<std::int64_t>(value.real()); };
  switch (dtype) {
    case DType::Int8:
      return put(to, static_cast<std::int8_t>(integer()));
    case DType::Int32:
      return put(to, static_cast<std::int32_t>(integer()));
    case DType::Float16:
      return put_narrow<Half>(to, value.real());
    case DType::BFloat16:
      return put_narrow<BFloat>(to, value.real());
    case DType::Float32:
      return put(to, static_cast<float>(value.real()));
    case DType::Float64:
      return put(to, value.real());
    case DType::Complex64:
      return put(to, std::complex<float>(value));
    default:
      std::abort();
  }
}

inline Value decode(DType dtype, const Byte* from) {
  switch (dtype) {
    case DType::Int8:
      return get<std::int8_t>(from);
    case DType::Int32:
      return get<std::int32_t>(from);
    case DType::Float16:
      return widen(get<Half>(from));
    case DType::BFloat16:
      return widen(get<BFloat>(from));
    case DType::Float32:
      return get<float>(from);
    case DType::Float64:
      return get<double>(from);
    case DType::Complex64:
      return get<std::complex<float>>(from);
    default:
      std::abort();
  }
}

// A rank's contribution. Each dtype holds these numbers exactly, and float32 holds their results, so the expected
// values do not depend on the order. float16 and bfloat16 do not hold the results, so rounding in the wrong place
// shows.
inline Value contribution(const Reduction& reduction, int rank, size_t i) {
  const size_t mixed = i * 7 + i / 5 + static_cast<size_t>(rank) * 29;
  const bool is_complex = reduction.dtype == DType::Complex64;
  if (reduction.op == Operator::Product) {
    static constexpr double factors[] = {1, -1, 2, 1, -1, 3};
    const double factor = factors[mixed % 6];
    return is_complex && mixed % 4 < 2 ? Value(0, factor) : Value(factor);
  }
  const double part = static_cast<double>(mixed % 251) - 125;
  return is_complex ? Value(part, static_cast<double>(mixed % 13)) : Value(part);
}

inline Value fold(const Reduction& reduction, Value a, Value b) {
  const auto integer = [](Value value) { return static_cast<std::int64_t>(value.real()); };
  switch (reduction.op) {
    case Operator::Product:
      return a * b;
    case Operator::Min:
      return std::min(a.real(), b.real());
    case Operator::Max:
      return std::max(a.real(), b.real());
    case Operator::Band:
      return static_cast<double>(integer(a) & integer(b));
    case Operator::Bor:
      return static_cast<double>(integer(a) | integer(b));
    case Operator::Bxor:
      return static_cast<double>(integer(a) ^ integer(b));
    default:
      return a + b;
  }
}

struct Case {
  Reduction reduction;
  int size;
  size_t count, element;
  std::vector<Buffer> inputs;
  Buffer expected;
  std::string name;

  Case(const Reduction& r, int ranks, size_t elements)
      : reduction(r), size(ranks), count(elements), element(size_of(r.dtype)), expected(elements * element) {
    name = text("op %d dtype %d ranks %d count %zu", static_cast<int>(r.op), static_cast<int>(r.dtype), size, count);
    std::vector<Value> results(count);
    const double factor = r.op == Operator::PremulSum ? r.factor : 1;
    for (int rank = 0; rank < size; ++rank) {
      Buffer& input = inputs.emplace_back(count * element);
      for (size_t i = 0; i < count; ++i) {
        const Value value = contribution(r, rank, i);
        encode(r.dtype, input.data() + i * element, value);
        results[i] = rank == 0 ? value * factor : fold(r, results[i], value * factor);
      }
    }
    const bool single = lifted(r.dtype) != DType::Float64;
    for (size_t i = 0; i < count; ++i) {
      if (r.op == Operator::Avg) results[i] /= size;
      if (r.op == Operator::Avg && single) results[i] = Value(std::complex<float>(results[i]));
      encode(r.dtype, expected.data() + i * element, results[i]);
    }
  }

  // Whether `length` elements from `first` on are as expected. They must be exact, except complex means, which torch
  // and the engine divide by multiplying with the reciprocal.
  bool matches(const Byte* result, size_t first, size_t length) const {
    if (std::equal(result, result + length * element, expected.data() + first * element)) return true;
    const bool rounded = reduction.op == Operator::Avg && reduction.dtype == DType::Complex64;
    for (size_t i = 0; i < length; ++i) {
      const Value want = decode(reduction.dtype, expected.data() + (first + i) * element);
      const Value got = decode(reduction.dtype, result + i * element);
      if (!(rounded ? std::abs(got - want) <= 3e-7 * std::abs(want) : got == want)) return false;
    }
    return true;
  }
};

// Checks a reduce_scatter in which rank r gets counts[r] elements. run: void (inputs, output) runs it. inputs[rank][r]
// is a rank's input for rank r, and output(rank) is its output.
template <typename Run>
void check_reduce_scatter(const Case& c, const std::vector<size_t>& counts, bool in_place, const std::string& what,
                          Report& report, const Run& run) {
  std::vector<Buffer> data = c.inputs, separate;
  std::vector<std::vector<const void*>> inputs(static_cast<size_t>(c.size));
  std::vector<size_t> offsets;
  size_t offset = 0;
  for (size_t count : counts) {
    for (size_t rank = 0; rank < inputs.size(); ++rank) inputs[rank].push_back(data[rank].data() + offset * c.element);
    offsets.push_back(offset);
    offset += count;
    separate.emplace_back(count * c.element);
  }
  const auto output = [&](int rank) {
    return in_place ? data[rank].data() + offsets[rank] * c.element : separate[rank].data();
  };
  run(inputs, output);
  for (int rank = 0; rank < c.size; ++rank) {
    report.check(c.matches(output(rank), offsets[rank], counts[rank]), "wrong result", what);
    Buffer restored = data[rank];
    if (in_place)
      std::copy_n(c.inputs[rank].data() + offsets[rank] * c.element, counts[rank] * c.element,
                  restored.data() + offsets[rank] * c.element);
    report.check(restored == c.inputs[rank], "an input was changed", what);
  }
}

}  // namespace aiocomms
