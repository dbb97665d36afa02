// Reductions: what the operators do to arrays of each dtype.
//
// The meaning is aiocomms/reductions.py's: integers wrap around, min and max hand on NaN, float16 and bfloat16
// accumulate in float32, AVG divides the sum by the number of ranks, PREMUL_SUM multiplies each contribution first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace aiocomms {

enum class DType : std::uint8_t {
  Bool,
  UInt8,
  Int8,
  Int16,
  Int32,
  Int64,
  Float16,
  BFloat16,
  Float32,
  Float64,
  Complex64,
  Complex128,
  // These are only carried; no operator is defined for them.
  UInt16,
  UInt32,
  UInt64,
  Float8E4M3FN,
  Float8E4M3FNUZ,
  Float8E5M2,
  Float8E5M2FNUZ,
  Float8E8M0FNU
};

constexpr int kDTypes = static_cast<int>(DType::Float8E8M0FNU) + 1;

enum class Operator : std::uint8_t { Sum, Product, Min, Max, Band, Bor, Bxor, Avg, PremulSum };

struct Reduction {
  Operator op;
  DType dtype;
  double factor = 1.0;  // PREMUL_SUM's
};

// Bytes of one element.
std::size_t size_of(DType dtype);

// Whether the operator is defined for the dtype.
bool supports(Operator op, DType dtype);

// out[i] = in[0][i] op in[1][i] op ... op in[n - 1][i], folded in that order, in one pass.
// `out` may be one of the inputs; otherwise nothing overlaps. n >= 1.
void reduce(const Reduction& reduction, void* out, const void* const* in, int n, std::size_t count);

// For schedules in which partial results travel: a contribution is lifted once, combined along the way, and lowered.
// A lifted array is of dtype lifted(dtype): float32 for float16 and bfloat16, else the dtype itself.
DType lifted(DType dtype);
bool lifts(const Reduction& reduction);   // whether that changes anything
bool lowers(const Reduction& reduction);  // the same
// What remains to be done with what has been lifted, before it is lowered.
Reduction after_lifting(const Reduction& reduction);
// The inputs, which are lifted and combined in their order, and not lowered. `out` is none of them.
void fold(const Reduction& reduction, void* out, const void* const* in, int n, std::size_t count);
void lift(const Reduction& reduction, void* out, const void* in, std::size_t count);  // may be in place
void combine(const Reduction& reduction, void* accumulator, const void* in, std::size_t count);
void lower(const Reduction& reduction, void* out, const void* accumulator, std::size_t count, int ranks);

}  // namespace aiocomms
