// Parts of a larger whole.
#pragma once

#include <algorithm>
#include <cstddef>

namespace aiocomms {

// The size of a cache line. Parts that different ranks write begin on separate cache lines.
inline constexpr std::size_t kLine = 64;

constexpr std::size_t divided_up(std::size_t whole, std::size_t part) { return (whole + part - 1) / part; }
constexpr std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return divided_up(bytes, unit) * unit; }

// The offset and length of the index-th part. Each part has `step` elements, except the last one and empty ones behind
// it.
struct Span {
  std::size_t offset = 0, length = 0;
  Span(std::size_t index, std::size_t step, std::size_t whole)
      : offset(std::min(index * step, whole)), length(std::min(step, whole - offset)) {}
  // A part of this part.
  Span within(std::size_t index, std::size_t step) const {
    Span inner(index, step, length);
    inner.offset += offset;
    return inner;
  }
};

}  // namespace aiocomms
