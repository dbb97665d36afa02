// The loops of reductions. The compiler vectorises them once per instruction set, because each is inlined into a
// function that is compiled for one set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "collectives/half.hpp"

#define AIOCOMMS_INLINE __attribute__((always_inline)) static inline

// The iterations of a loop are independent. Arrays overlap only element on element.
#if defined(__clang__)
#define AIOCOMMS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define AIOCOMMS_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace aiocomms {

using std::size_t;

template <class T>
struct Complex {
  T re, im;
};

// Operators: a = a op b. Integers wrap around because they are unsigned. `1U *` keeps them unsigned after promotion.

struct Add {
  template <class T>
  AIOCOMMS_INLINE void apply(T& a, const T& b) {
    if constexpr (std::is_integral_v<T>)
      a = static_cast<T>(1U * a + b);
    else
      a += b;
  }
};

struct Multiply {
  template <class T>
  AIOCOMMS_INLINE void apply(T& a, const T& b) {
    if constexpr (std::is_integral_v<T>)
      a = static_cast<T>(1U * a * b);
    else
      a *= b;
  }
  template <class T>
  AIOCOMMS_INLINE void apply(Complex<T>& a, const Complex<T>& b) {
    const T re = a.re * b.re - a.im * b.im;
    a.im = a.re * b.im + a.im * b.re;
    a.re = re;
  }
};

// If `b` is NaN, the comparison fails and the result is `b`. A NaN in `a` is tested, with `|` because `||` is a branch.
struct Least {
  template <class T>
  AIOCOMMS_INLINE void apply(T& a, const T& b) {
    if constexpr (std::is_integral_v<T>)
      a = a < b ? a : b;
    else
      a = (static_cast<int>(a < b) | static_cast<int>(a != a)) != 0 ? a : b;
  }
};

struct Greatest {
  template <class T>
  AIOCOMMS_INLINE void apply(T& a, const T& b) {
    if constexpr (std::is_integral_v<T>)
      a = a > b ? a : b;
    else
      a = (static_cast<int>(a > b) | static_cast<int>(a != a)) != 0 ? a : b;
  }
};

struct And {
  AIOCOMMS_INLINE void apply(std::uint8_t& a, std::uint8_t b) { a &= b; }
};

struct Or {
  AIOCOMMS_INLINE void apply(std::uint8_t& a, std::uint8_t b) { a |= b; }
};

struct Xor {
  AIOCOMMS_INLINE void apply(std::uint8_t& a, std::uint8_t b) { a ^= b; }
};

// Operators on a parameter and a value, or one part of a complex value.

struct Scale {
  template <class T>
  AIOCOMMS_INLINE void apply(T& value, T factor) {
    value *= factor;
  }
};

struct Divide {
  template <class T>
  AIOCOMMS_INLINE void apply(T& value, T divisor) {
    value /= divisor;
  }
};

// This rounds like torch's division of a complex number by a real one.
struct DivideComplex {
  template <class T>
  AIOCOMMS_INLINE void apply(T& value, T divisor) {
    value *= T{1} / divisor;
  }
};

template <class T, class Operation>
struct Folding {
  AIOCOMMS_INLINE void run(void* out, const void* const* in, int n, size_t count) {
    if (n == 2) return fold<2>(out, in, count);
    if (n == 3) return fold<3>(out, in, count);
    fold<4>(out, in, count);
  }

  template <int n>
  AIOCOMMS_INLINE void fold(void* out, const void* const* in, size_t count) {
    T* const to = static_cast<T*>(out);
    const T* from[n];
    for (int k = 0; k < n; ++k) from[k] = static_cast<const T*>(in[k]);
    AIOCOMMS_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      T value = from[0][i];
      for (int k = 1; k < n; ++k) Operation::apply(value, from[k][i]);
      to[i] = value;
    }
  }
};

template <class T, class Operation>
struct Mapping {
  AIOCOMMS_INLINE void run(void* out, const void* in, size_t count, double parameter) {
    T* const to = static_cast<T*>(out);
    const T* const from = static_cast<const T*>(in);
    const T same = static_cast<T>(parameter);
    AIOCOMMS_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      T value = from[i];
      Operation::apply(value, same);
      to[i] = value;
    }
  }
};

template <class T>
struct Widening {
  AIOCOMMS_INLINE void run(void* out, const void* in, size_t count, double) {
    float* const to = static_cast<float*>(out);
    const T* const from = static_cast<const T*>(in);
    AIOCOMMS_INDEPENDENT
    for (size_t i = 0; i < count; ++i) to[i] = widen(from[i]);
  }
};

template <class T>
struct Narrowing {
  AIOCOMMS_INLINE void run(void* out, const void* in, size_t count, double) {
    T* const to = static_cast<T*>(out);
    const float* const from = static_cast<const float*>(in);
    AIOCOMMS_INDEPENDENT
    for (size_t i = 0; i < count; ++i) narrow(from[i], to[i]);
  }
};

}  // namespace aiocomms
