// Reductions: the effect of each operator on arrays of each dtype.
//
// The meaning is that of aiocomms/reductions.py. Integers wrap around, and min and max propagate NaN. float16 and
// bfloat16 accumulate in float32. AVG divides the sum by the number of ranks. PREMUL_SUM first multiplies each
// contribution.
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
  // The 8-bit floats below are only moved. No operator is defined for them.
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
  double factor = 1.0;  // of PREMUL_SUM
};

// Bytes of one element.
std::size_t size_of(DType dtype);

// Whether the operator is defined for the dtype.
bool supports(Operator op, DType dtype);

// out[i] = in[0][i] op in[1][i] op ... op in[n - 1][i], folded in that order, in one pass. `out` may be one of the
// inputs. Otherwise the arrays do not overlap. n >= 1.
void reduce(const Reduction& reduction, void* out, const void* const* in, int n, std::size_t count);

// These are for schedules with partial results. A contribution is lifted once, combined with others, and lowered. A
// lifted array has dtype lifted(dtype): float32 for float16 and bfloat16, and otherwise the dtype itself.
DType lifted(DType dtype);
bool lifts(const Reduction& reduction);   // whether lifting changes the data
bool lowers(const Reduction& reduction);  // whether lowering changes the data
// The reduction between lifting and lowering.
Reduction after_lifting(const Reduction& reduction);
// Lifts the inputs and combines them in order, without lowering. `out` is none of them.
void fold(const Reduction& reduction, void* out, const void* const* in, int n, std::size_t count);
void lift(const Reduction& reduction, void* out, const void* in, std::size_t count);  // may be in place
void combine(const Reduction& reduction, void* accumulator, const void* in, std::size_t count);
void lower(const Reduction& reduction, void* out, const void* accumulator, std::size_t count, int ranks);

}  // namespace aiocomms
