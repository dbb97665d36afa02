// The functions of reduce.hpp, and the choice of their loops.
//
// On x86-64 the loops exist twice, for the baseline and for AVX2. The choice is made when the library is loaded. Build
// with -O3 and -ffp-contract=off. Fused products and sums would make results depend on the machine.
#include "collectives/reduce.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "collectives/half.hpp"
#include "collectives/reduce_loops.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define AIOCOMMS_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace aiocomms {
namespace {

constexpr int kOperators = 9;
constexpr int kFolded = 4;           // the most arrays that one loop folds
constexpr size_t kTileBytes = 4096;  // stays in the first-level cache between two loops

// `out` may be one of `in`. 2 <= n <= kFolded.
using Fold = void (*)(void* out, const void* const* in, int n, size_t count);
// `out` may be `in` if the elements have one size.
using Map = void (*)(void* out, const void* in, size_t count, double parameter);

// A loop that is compiled for an instruction set.

struct Baseline {
  template <class Loop>
  static void fold(void* out, const void* const* in, int n, size_t count) {
    Loop::run(out, in, n, count);
  }
  template <class Loop>
  static void map(void* out, const void* in, size_t count, double parameter) {
    Loop::run(out, in, count, parameter);
  }
};

#if defined(__x86_64__)
struct Avx2 {
  template <class Loop>
  AIOCOMMS_AVX2 static void fold(void* out, const void* const* in, int n, size_t count) {
    Loop::run(out, in, n, count);
  }
  template <class Loop>
  AIOCOMMS_AVX2 static void map(void* out, const void* in, size_t count, double parameter) {
    Loop::run(out, in, count, parameter);
  }
};

AIOCOMMS_AVX2 void widen_f16c(void* out, const void* in, size_t count, double) {
  float* const to = static_cast<float*>(out);
  const Half* const from = static_cast<const Half*>(in);
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < count; ++i) to[i] = widen(from[i]);
}

AIOCOMMS_AVX2 void narrow_f16c(void* out, const void* in, size_t count, double) {
  Half* const to = static_cast<Half*>(out);
  const float* const from = static_cast<const float*>(in);
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < count; ++i) narrow(from[i], to[i]);
}
#endif

// The table of loops.

struct Folder {
  Fold run = nullptr;
  size_t units = 1;  // elements of the loop per element of the dtype
};

struct Kernels {
  std::array<std::array<Folder, kDTypes>, kOperators> fold{};  // By the lifted dtype. Empty: not supported.
  std::array<Map, kDTypes> scale{};                            // The loop counts units, as the folds of PREMUL_SUM do.
  std::array<Map, kDTypes> divide{};                           // The loop counts units, as the folds of AVG do.
  std::array<Map, kDTypes> widen{};
  std::array<Map, kDTypes> narrow{};
};

constexpr size_t index(Operator op) { return static_cast<size_t>(op); }
constexpr size_t index(DType dtype) { return static_cast<size_t>(dtype); }

using Row = std::array<Folder, kDTypes>;

// Bool, UInt8, Int8, Int16, Int32, Int64, Float16, BFloat16, Float32, Float64, Complex64, Complex128, UInt16, UInt32,
// UInt64. The other dtypes have no loops.

template <class Set, class Operation>
constexpr Row arithmetic() {
  constexpr Fold u8 = Set::template fold<Folding<std::uint8_t, Operation>>;
  constexpr Fold u16 = Set::template fold<Folding<std::uint16_t, Operation>>;
  constexpr Fold u32 = Set::template fold<Folding<std::uint32_t, Operation>>;
  constexpr Fold u64 = Set::template fold<Folding<std::uint64_t, Operation>>;
  constexpr Fold f32 = Set::template fold<Folding<float, Operation>>;
  constexpr Fold f64 = Set::template fold<Folding<double, Operation>>;
  return {{{}, {u8}, {u8}, {u16}, {u32}, {u64}, {f32}, {f32}, {f32}, {f64}, {f32, 2}, {f64, 2}, {u16}, {u32}, {u64}}};
}

template <class Set, class Operation>
constexpr Row order() {
  constexpr Fold u8 = Set::template fold<Folding<std::uint8_t, Operation>>;
  constexpr Fold u16 = Set::template fold<Folding<std::uint16_t, Operation>>;
  constexpr Fold u32 = Set::template fold<Folding<std::uint32_t, Operation>>;
  constexpr Fold u64 = Set::template fold<Folding<std::uint64_t, Operation>>;
  constexpr Fold i8 = Set::template fold<Folding<std::int8_t, Operation>>;
  constexpr Fold i16 = Set::template fold<Folding<std::int16_t, Operation>>;
  constexpr Fold i32 = Set::template fold<Folding<std::int32_t, Operation>>;
  constexpr Fold i64 = Set::template fold<Folding<std::int64_t, Operation>>;
  constexpr Fold f32 = Set::template fold<Folding<float, Operation>>;
  constexpr Fold f64 = Set::template fold<Folding<double, Operation>>;
  return {{{u8}, {u8}, {i8}, {i16}, {i32}, {i64}, {f32}, {f32}, {f32}, {f64}, {}, {}, {u16}, {u32}, {u64}}};
}

template <class Set, class Operation>
constexpr Row bits() {
  constexpr Fold u8 = Set::template fold<Folding<std::uint8_t, Operation>>;
  return {{{u8}, {u8}, {u8}, {u8, 2}, {u8, 4}, {u8, 8}, {}, {}, {}, {}, {}, {}, {u8, 2}, {u8, 4}, {u8, 8}}};
}

template <class Set, class Operation, class OnComplex>
constexpr std::array<Map, kDTypes> by_parameter() {
  constexpr Map f32 = Set::template map<Mapping<float, Operation>>;
  constexpr Map f64 = Set::template map<Mapping<double, Operation>>;
  constexpr Map c64 = Set::template map<Mapping<float, OnComplex>>;
  constexpr Map c128 = Set::template map<Mapping<double, OnComplex>>;
  return {{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, f32, f32, f32, f64, c64, c128}};
}

template <class Set>
constexpr Kernels kernels_of() {
  Kernels kernels;
  kernels.fold[index(Operator::Sum)] = arithmetic<Set, Add>();
  kernels.fold[index(Operator::Product)] = arithmetic<Set, Multiply>();
  kernels.fold[index(Operator::Product)][index(DType::Complex64)] = {
      Set::template fold<Folding<Complex<float>, Multiply>>};
  kernels.fold[index(Operator::Product)][index(DType::Complex128)] = {
      Set::template fold<Folding<Complex<double>, Multiply>>};
  kernels.fold[index(Operator::Min)] = order<Set, Least>();
  kernels.fold[index(Operator::Max)] = order<Set, Greatest>();
  kernels.fold[index(Operator::Band)] = bits<Set, And>();
  kernels.fold[index(Operator::Bor)] = bits<Set, Or>();
  kernels.fold[index(Operator::Bxor)] = bits<Set, Xor>();
  for (size_t dtype = index(DType::Float16); dtype <= index(DType::Complex128); ++dtype)
    for (const Operator op : {Operator::Avg, Operator::PremulSum})
      kernels.fold[index(op)][dtype] = kernels.fold[index(Operator::Sum)][dtype];
  kernels.scale = by_parameter<Set, Scale, Scale>();
  kernels.divide = by_parameter<Set, Divide, DivideComplex>();
  kernels.widen[index(DType::Float16)] = Set::template map<Widening<Half>>;
  kernels.widen[index(DType::BFloat16)] = Set::template map<Widening<BFloat>>;
  kernels.narrow[index(DType::Float16)] = Set::template map<Narrowing<Half>>;
  kernels.narrow[index(DType::BFloat16)] = Set::template map<Narrowing<BFloat>>;
  return kernels;
}

Kernels choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx = 0, edx;  // Some compilers' __builtin_cpu_supports does not know F16C.
  if (__builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0) {
    Kernels kernels = kernels_of<Avx2>();
    kernels.widen[index(DType::Float16)] = widen_f16c;
    kernels.narrow[index(DType::Float16)] = narrow_f16c;
    return kernels;
  }
#endif
  return kernels_of<Baseline>();
}

const Kernels kernels = choose();

bool is_half(DType dtype) { return dtype == DType::Float16 || dtype == DType::BFloat16; }

const Folder& folder_of(const Reduction& reduction) {
  return kernels.fold[index(reduction.op)][index(reduction.dtype)];
}

size_t elements_of_tile(DType dtype) { return kTileBytes / size_of(lifted(dtype)); }

const void* at(const void* base, size_t bytes) { return static_cast<const std::byte*>(base) + bytes; }
void* at(void* base, size_t bytes) { return static_cast<std::byte*>(base) + bytes; }

void copy(void* out, const void* in, size_t bytes) {
  if (out != in && bytes > 0) std::memcpy(out, in, bytes);
}

// Lifts at most a tile.
void lift_tile(const Reduction& reduction, void* out, const void* in, size_t count) {
  const size_t dtype = index(reduction.dtype);
  if (is_half(reduction.dtype)) {
    kernels.widen[dtype](out, in, count, 0);
    in = out;
  }
  if (reduction.op == Operator::PremulSum) {
    kernels.scale[dtype](out, in, count * folder_of(reduction).units, reduction.factor);
  }
}

// Lowers at most a tile.
void lower_tile(const Reduction& reduction, void* out, const void* accumulator, size_t count, int ranks) {
  const size_t dtype = index(reduction.dtype);
  alignas(64) std::byte quotient[kTileBytes];
  if (reduction.op == Operator::Avg) {
    void* const to = is_half(reduction.dtype) ? quotient : out;
    kernels.divide[dtype](to, accumulator, count * folder_of(reduction).units, ranks);
    accumulator = to;
  }
  if (is_half(reduction.dtype)) kernels.narrow[dtype](out, accumulator, count, 0);
}

// Reduces tile by tile, so that several loops find their arrays in the first-level cache.
void reduce_tiled(const Reduction& reduction, void* out, const void* const* in, int n, size_t count) {
  // The tiles are not a page apart. Otherwise a load from one tile would wait for a store to another.
  alignas(64) std::byte tiles[kFolded][kTileBytes + 192];
  const Folder& folder = folder_of(reduction);
  const size_t size = size_of(reduction.dtype);
  const size_t step = elements_of_tile(reduction.dtype);
  for (size_t start = 0; start < count; start += step) {
    const size_t length = std::min(step, count - start);
    void* const to = at(out, start * size);
    void* result = nullptr;
    for (int taken = 0; taken < n;) {
      const void* group[kFolded] = {tiles[0]};
      int members = taken > 0 ? 1 : 0;  // The partial result is the first member.
      for (; members < kFolded && taken < n; ++members, ++taken) {
        group[members] = at(in[taken], start * size);
        if (!lifts(reduction)) continue;
        lift_tile(reduction, tiles[members], group[members], length);
        group[members] = tiles[members];
      }
      result = taken < n || is_half(reduction.dtype) ? tiles[0] : to;  // `out` may be an input that is not read yet.
      if (members > 1) folder.run(result, group, members, length * folder.units);
    }
    lower_tile(reduction, to, result, length, n);
  }
}

}  // namespace

size_t size_of(DType dtype) {
  constexpr std::uint8_t sizes[kDTypes] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 2, 4, 8, 1, 1, 1, 1, 1};
  return sizes[index(dtype)];
}

bool supports(Operator op, DType dtype) { return kernels.fold[index(op)][index(dtype)].run != nullptr; }

void reduce(const Reduction& reduction, void* out, const void* const* in, int n, size_t count) {
  if (n == 1 && reduction.op != Operator::PremulSum) return copy(out, in[0], count * size_of(reduction.dtype));
  if (n == 1 && !is_half(reduction.dtype)) return lift(reduction, out, in[0], count);
  if (n > kFolded || lifts(reduction) || lowers(reduction)) return reduce_tiled(reduction, out, in, n, count);
  const Folder& folder = folder_of(reduction);
  folder.run(out, in, n, count * folder.units);
}

bool lifts(const Reduction& reduction) { return is_half(reduction.dtype) || reduction.op == Operator::PremulSum; }
bool lowers(const Reduction& reduction) { return is_half(reduction.dtype) || reduction.op == Operator::Avg; }

Reduction after_lifting(const Reduction& reduction) {
  const bool sum = reduction.op == Operator::Avg || reduction.op == Operator::PremulSum;
  return {sum ? Operator::Sum : reduction.op, lifted(reduction.dtype)};
}

void fold(const Reduction& reduction, void* out, const void* const* in, int n, size_t count) {
  if (!lifts(reduction)) return reduce(after_lifting(reduction), out, in, n, count);
  const size_t from = size_of(reduction.dtype), to = size_of(lifted(reduction.dtype));
  const size_t step = elements_of_tile(reduction.dtype);
  alignas(64) std::byte tile[kTileBytes];
  for (size_t start = 0; start < count; start += step) {
    const size_t length = std::min(step, count - start);
    lift_tile(reduction, at(out, start * to), at(in[0], start * from), length);
    for (int i = 1; i < n; ++i) {
      lift_tile(reduction, tile, at(in[i], start * from), length);
      combine(reduction, at(out, start * to), tile, length);
    }
  }
}

DType lifted(DType dtype) { return is_half(dtype) ? DType::Float32 : dtype; }

void lift(const Reduction& reduction, void* out, const void* in, size_t count) {
  const size_t from = size_of(reduction.dtype);
  const size_t to = size_of(lifted(reduction.dtype));
  if (!lifts(reduction)) return copy(out, in, count * from);
  const size_t step = elements_of_tile(reduction.dtype);
  for (size_t start = 0; start < count; start += step)
    lift_tile(reduction, at(out, start * to), at(in, start * from), std::min(step, count - start));
}

void combine(const Reduction& reduction, void* accumulator, const void* in, size_t count) {
  const Folder& folder = folder_of(reduction);
  const void* const both[] = {accumulator, in};
  folder.run(accumulator, both, 2, count * folder.units);
}

void lower(const Reduction& reduction, void* out, const void* accumulator, size_t count, int ranks) {
  const size_t from = size_of(lifted(reduction.dtype));
  const size_t to = size_of(reduction.dtype);
  if (!lowers(reduction)) return copy(out, accumulator, count * from);
  const size_t step = elements_of_tile(reduction.dtype);
  for (size_t start = 0; start < count; start += step)
    lower_tile(reduction, at(out, start * to), at(accumulator, start * from), std::min(step, count - start), ranks);
}

}  // namespace aiocomms
