// Conversion of float16 and bfloat16 to float32 and back. Widening is exact, narrowing rounds to nearest even, and NaN
// stays NaN.
//
// The code has no branches, so its loops vectorise. The float16 functions are those of Marat Dukhan's FP16
// (https://github.com/Maratyszcza/FP16, MIT licence), which c10::Half also uses.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace aiocomms {

struct Half {
  std::uint16_t bits;
};

struct BFloat {
  std::uint16_t bits;
};

inline float widen(BFloat value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }

inline void narrow(float value, BFloat& out) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);  // A carry into the exponent is correct.
  out.bits = static_cast<std::uint16_t>((value != value ? 0x7FC00000 : rounded) >> 16);
}

inline float widen(Half value) {
  const std::uint32_t word = std::uint32_t{value.bits} << 16;
  const std::uint32_t magnitude = word << 1;
  // The exponent is rebiased in two steps. The second is a multiplication, so float16's infinity becomes float32's.
  const float normal = std::bit_cast<float>((magnitude >> 4) + (std::uint32_t{0xE0} << 23)) * 0x1.0p-112F;
  // A subnormal is the mantissa of a number in [0.5, 1), minus 0.5.
  const float subnormal = std::bit_cast<float>((magnitude >> 17) | (std::uint32_t{126} << 23)) - 0.5F;
  const auto bits = std::bit_cast<std::uint32_t>(magnitude < (std::uint32_t{1} << 27) ? subnormal : normal);
  return std::bit_cast<float>((word & 0x80000000) | bits);
}

inline void narrow(float value, Half& out) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = word << 1;
  // A value that exceeds float16 becomes infinity here. The addition below rounds other values at the end of float16's
  // mantissa.
  const float scaled = (std::fabs(value) * 0x1.0p+112F) * 0x1.0p-110F;
  const std::uint32_t exponent = magnitude & 0xFF000000;
  const std::uint32_t bias = exponent < 0x71000000 ? 0x71000000 : exponent;
  const auto bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>((bias >> 1) + 0x07800000) + scaled);
  const std::uint32_t rounded = ((bits >> 13) & 0x7C00) + (bits & 0x0FFF);
  out.bits = static_cast<std::uint16_t>((word >> 16 & 0x8000) | (magnitude > 0xFF000000 ? 0x7E00 : rounded));
}

}  // namespace aiocomms
