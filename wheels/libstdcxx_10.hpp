// What the engine uses of C++20's library that libstdc++ 10 has not yet, in the words of the standard. Wheels are built
// with that one (wheels/sysroot.py), by a compiler that is newer; the engine's own sources know nothing of it.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

#if __cplusplus >= 202002L  // CMake tries the compiler with what it takes to be C++ if nothing is said
namespace std {

template <typename To, typename From>
constexpr To bit_cast(const From& from) noexcept {
  static_assert(sizeof(To) == sizeof(From) && is_trivially_copyable_v<To> && is_trivially_copyable_v<From>);
  return __builtin_bit_cast(To, from);
}

template <typename Array>
  requires is_unbounded_array_v<Array>
unique_ptr<Array> make_unique_for_overwrite(size_t count) {
  return unique_ptr<Array>(new remove_extent_t<Array>[count]);
}

}  // namespace std
#endif
