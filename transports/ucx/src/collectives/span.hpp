// Parts of a larger whole.
#pragma once

#include <algorithm>
#include <cstddef>

namespace aiocomms {

// A cache line: parts that different ranks write begin on one of their own.
inline constexpr std::size_t kLine = 64;

constexpr std::size_t divided_up(std::size_t whole, std::size_t part) { return (whole + part - 1) / part; }
constexpr std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return divided_up(bytes, unit) * unit; }

// The index-th part: where it begins and how long it is. Each is `step` long, but for the last, and those behind it.
struct Span {
  std::size_t offset = 0, length = 0;
  Span(std::size_t index, std::size_t step, std::size_t whole)
      : offset(std::min(index * step, whole)), length(std::min(step, whole - offset)) {}
  // The same of a part.
  Span within(std::size_t index, std::size_t step) const {
    Span inner(index, step, length);
    inner.offset += offset;
    return inner;
  }
};

}  // namespace aiocomms
