"""The UCX transport's reductions in C++ against those of the core."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiocomms.ops import reductions
from aiocomms.ops.reductions import ReduceOp

pytestmark = pytest.mark.deterministic

SRC = Path(__file__).parents[3] / "transports" / "ucx" / "src"
FLAGS = "-std=c++20 -O3 -ffp-contract=off -fPIC -shared -Wall -Wextra -Werror"

# In the order of reduce.hpp's enums.
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
OPS = [
    ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR,
    ReduceOp.AVG, ReduceOp.PREMUL_SUM(-1.7),
]  # fmt: skip
PAIRS = [pytest.param(op, dtype, id=f"{op.kind}-{dtype}"[:40]) for op in OPS for dtype in DTYPES if op.supports(dtype)]
RANKS = (1, 2, 3, 4, 5, 9)  # with more than four, more than one loop takes turns; with more than seven, more than two
COUNTS = (1, 2, 7, 8, 63, 64, 65, 1000, 4097)
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-40,
    -6e-8,
    5.0e-324,
    65504.0,
    65520.0,
    3.4e38,
    1e308,
]

HEAD = """
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
"""
WRAPPERS = """
#include "collectives/reduce.cpp"
using namespace aiocomms;
static Reduction make(int op, int dtype, double factor) { return {Operator(op), DType(dtype), factor}; }
extern "C" {
bool supports_(int op, int dtype) { return supports(Operator(op), DType(dtype)); }
int size_(int dtype) { return int(size_of(DType(dtype))); }
int lifted_(int dtype) { return int(lifted(DType(dtype))); }
void reduce_(int op, int dtype, double factor, void* out, const void* const* in, int n, std::size_t count) {
  reduce(make(op, dtype, factor), out, in, n, count);
}
void lift_(int op, int dtype, double factor, void* out, const void* in, std::size_t count) {
  lift(make(op, dtype, factor), out, in, count);
}
void combine_(int op, int dtype, double factor, void* accumulator, const void* in, std::size_t count) {
  combine(make(op, dtype, factor), accumulator, in, count);
}
void lower_(int op, int dtype, double factor, void* out, const void* accumulator, std::size_t count, int ranks) {
  lower(make(op, dtype, factor), out, accumulator, count, ranks);
}
}
"""
# A machine without AVX2, or one that is no x86-64, runs the baseline's loops.
VARIANTS = {"native": "", "baseline": "#undef __x86_64__\n"}


class Library:
    """reduce.hpp for tensors."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.supports_.restype = ctypes.c_bool

    def reduce(self, op: ReduceOp, tensors: list[Tensor], out: Tensor) -> None:
        """``out`` is written, and may be one of the inputs."""
        pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        count = ctypes.c_size_t(out.numel())
        self.c.reduce_(*self.reduction(op, out.dtype), pointer(out), pointers, len(tensors), count)

    def lift(self, op: ReduceOp, tensor: Tensor, out: Tensor) -> None:
        """``out`` may be the tensor where the dtype is its own lifted dtype."""
        self.c.lift_(*self.reduction(op, tensor.dtype), pointer(out), pointer(tensor), ctypes.c_size_t(out.numel()))

    def combine(self, op: ReduceOp, dtype: torch.dtype, accumulator: Tensor, tensor: Tensor) -> None:
        """Both are lifted; ``dtype`` is that of the contributions."""
        count = ctypes.c_size_t(tensor.numel())
        self.c.combine_(*self.reduction(op, dtype), pointer(accumulator), pointer(tensor), count)

    def lower(self, op: ReduceOp, accumulator: Tensor, out: Tensor, ranks: int) -> None:
        """``out`` is of the dtype of the contributions."""
        count = ctypes.c_size_t(out.numel())
        self.c.lower_(*self.reduction(op, out.dtype), pointer(out), pointer(accumulator), count, ranks)

    @staticmethod
    def reduction(op: ReduceOp, dtype: torch.dtype) -> tuple[Any, ...]:
        """The first arguments of every function."""
        kinds = [o.kind for o in OPS]
        return kinds.index(op.kind), DTYPES.index(dtype), ctypes.c_double(op.factor)


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Return the address at which a contiguous tensor begins."""
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads wait for each other at these sizes more than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    """Each variant, built at the same time."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("reduce")
    builds = {}
    for name, define in VARIANTS.items():
        (folder / f"{name}.cpp").write_text(HEAD + define + WRAPPERS)
        command = [*compiler, *FLAGS.split(), f"-I{SRC}", f"{name}.cpp", "-o", f"{name}.so"]
        builds[name] = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    for build in builds.values():
        errors = build.communicate()[1]
        assert build.returncode == 0, errors
    return {name: Library(folder / f"{name}.so") for name in builds}


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest, libraries: dict[str, Library]) -> Library:
    """One variant after the other."""
    return libraries[request.param]


def integers(dtype: torch.dtype, count: int) -> Tensor:
    """Random bits, as integers of ``dtype``."""
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (count,), dtype=dtype) ^ torch.randint(0, 2, (count,), dtype=dtype)


def sample(dtype: torch.dtype, count: int) -> Tensor:
    """Shape ``(count,)``: ordinary values among all that is special about a dtype."""
    if dtype == torch.bool:
        return torch.rand(count) < 0.5
    if dtype.is_complex:
        return torch.view_as_complex(sample(dtype.to_real(), 2 * count).view(count, 2))
    if dtype in UNSIGNED:  # torch draws no numbers of these
        return sample(UNSIGNED[dtype], count).view(dtype)
    which = torch.rand(count)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        extreme = torch.tensor([info.min, info.max, 0, 1, -1, info.min + 1])[torch.randint(6, (count,))].to(dtype)
        return torch.where(which < 0.3, extreme, integers(dtype, count))
    special = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(len(SPECIAL), (count,))].to(dtype)
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    anything = integers(width, count).view(dtype)
    ordinary = torch.randn(count, dtype=torch.float64).to(dtype)
    return torch.where(which < 0.6, ordinary, torch.where(which < 0.8, special, anything))


def bits(tensor: Tensor, *, signed_zeros: bool = True) -> Tensor:
    """The bits of the values as integers, where all NaN are one."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    if not signed_zeros:
        tensor = torch.where(tensor == 0, 0.0, tensor)
    tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def check(op: ReduceOp, got: Tensor, wanted: Tensor) -> None:
    """Equal bits. Whether min(0, -0) is 0 or -0 depends on the position in torch, whose vectors and rests disagree."""
    signed_zeros = op.kind not in ("min", "max")
    if torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)):
        return
    a, b = bits(got, signed_zeros=signed_zeros), bits(wanted, signed_zeros=signed_zeros)
    if not torch.equal(a, b):
        wrong = (a != b).reshape(wanted.numel(), -1).any(1)
        where = wrong.nonzero().flatten()[:5].tolist()
        pytest.fail(f"at {where} of {wanted.numel()}: {got[wrong][:5]}, wanted {wanted[wrong][:5]}")


# The core's functions where they are not torch's on complex values. Those treat a real number as a complex one whose
# imaginary part is 0, even where one just adds: infinities become NaN and zeros change signs, depending on the order of
# the ranks. Their product fuses some multiplications and additions, depending on the position. Here real and imaginary
# parts are handled as real values are.


def parts(tensor: Tensor) -> Tensor:
    """A view as real values of one more dimension, if they are complex."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def lift(op: ReduceOp, tensor: Tensor) -> Tensor:
    lifted = reductions.lift(op, parts(tensor))
    return torch.view_as_complex(lifted) if tensor.is_complex() else lifted


def combine(op: ReduceOp, accumulator: Tensor, tensor: Tensor) -> None:
    if op.kind == "product" and tensor.is_complex():
        (a, b), (c, d) = parts(accumulator).unbind(-1), parts(tensor).unbind(-1)
        parts(accumulator).copy_(torch.stack([a * c - b * d, a * d + b * c], -1))
    else:
        reductions.combine(op, parts(accumulator), parts(tensor))


def lower(op: ReduceOp, accumulator: Tensor, size: int, out: Tensor) -> None:
    if op.kind == "avg" and out.is_complex():
        out.copy_(accumulator)
        # torch multiplies likewise, and does not use parts / size.
        parts(out).mul_(torch.ones((), dtype=parts(out).dtype) / size)
    else:
        reductions.lower(op, parts(accumulator), size, parts(out))


def reduce(op: ReduceOp, tensors: list[Tensor]) -> Tensor:
    """A new tensor."""
    out = torch.empty_like(tensors[0])
    if not out.is_complex():
        reductions.reduce(op, tensors, out)
        return out
    accumulator = lift(op, tensors[0])
    for tensor in tensors[1:]:
        combine(op, accumulator, lift(op, tensor))
    lower(op, accumulator, len(tensors), out)
    return out


@functools.cache
def pool(dtype: torch.dtype) -> list[Tensor]:
    """Return the pool from which the ranks' contributions are cut."""
    torch.manual_seed(DTYPES.index(dtype))
    return [sample(dtype, 2 * max(COUNTS) + max(RANKS)) for _ in range(max(RANKS))]


def cases(dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """One tensor per rank, of every count and number of ranks, hardly aligned; not to be written."""
    for n in RANKS:
        for count in COUNTS if n < 9 else COUNTS[-1:]:
            yield [t[count - 1 + k : 2 * count - 1 + k] for k, t in enumerate(pool(dtype)[:n])]


def test_engine_supports_the_operator_dtype_pairs_of_the_core(library: Library) -> None:
    for i, op in enumerate(OPS):
        for j, dtype in enumerate(DTYPES):
            assert library.c.supports_(i, j) == op.supports(dtype), (op, dtype)


def test_engine_dtypes_have_the_size_and_lifted_dtype_of_torch(library: Library) -> None:
    for j, dtype in enumerate(DTYPES):
        assert library.c.size_(j) == dtype.itemsize
        assert DTYPES[library.c.lifted_(j)] == reductions.lift(ReduceOp.SUM, torch.zeros(1, dtype=dtype)).dtype


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_engine_reduce_equals_the_core_bit_for_bit(
    libraries: dict[str, Library], op: ReduceOp, dtype: torch.dtype
) -> None:
    for tensors in cases(dtype):
        wanted = reduce(op, tensors)
        before = pool(dtype)[0][: wanted.numel() + 2]
        after = torch.cat([before[:1], wanted, before[-1:]])
        for library in libraries.values():
            guarded = before.clone()
            library.reduce(op, tensors, guarded[1:-1])
            check(op, guarded, after)
            for k in range(len(tensors)):
                out = tensors[k].clone()
                library.reduce(op, [*tensors[:k], out, *tensors[k + 1 :]], out)
                check(op, out, wanted)


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_engine_lift_combine_and_lower_equal_the_core_bit_for_bit(
    libraries: dict[str, Library], op: ReduceOp, dtype: torch.dtype
) -> None:
    for tensors in cases(dtype):
        lifts = [lift(op, t) for t in tensors]
        combined = lifts[0].clone()
        for tensor in lifts[1:]:
            combine(op, combined, tensor)
        wanted = torch.empty_like(tensors[0])
        lower(op, combined.clone(), len(tensors), wanted)
        for library in libraries.values():
            accumulators = [torch.empty_like(t) for t in lifts]
            for tensor, accumulator, lifted in zip(tensors, accumulators, lifts, strict=True):
                library.lift(op, tensor, accumulator)
                check(op, accumulator, lifted)
            for tensor in accumulators[1:]:
                library.combine(op, dtype, accumulators[0], tensor)
            check(op, accumulators[0], combined)
            out = torch.empty_like(wanted)
            library.lower(op, accumulators[0], out, len(tensors))
            check(op, out, wanted)
            if dtype == combined.dtype:
                in_place = tensors[0].clone()
                library.lift(op, in_place, in_place)
                check(op, in_place, lifts[0])
                library.lower(op, accumulators[0], accumulators[0], len(tensors))
                check(op, accumulators[0], wanted)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("op", [op for op in OPS if op.supports(torch.complex64)], ids=lambda op: op.kind)
def test_engine_reduce_of_finite_complex_values_equals_the_core(
    library: Library, op: ReduceOp, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for n in (1, 2, 3, 5, 7):
        tensors = [torch.randn(1001, dtype=dtype) for _ in range(n)]
        out, wanted = torch.empty_like(tensors[0]), torch.empty_like(tensors[0])
        library.reduce(op, tensors, out)
        reductions.reduce(op, tensors, wanted)
        if op.kind == "product":
            torch.testing.assert_close(out, wanted)
        else:
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_engine_converts_half_precision_as_torch_does(library: Library, dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = torch.empty(2**16)
    library.lift(ReduceOp.SUM, halves, wide)
    check(ReduceOp.SUM, wide, halves.float())
    # Every half and every middle between two, with the float32 just above and below each, and random bits.
    exact = bits(wide)
    step = 2**12 if dtype == torch.float16 else 2**15
    near = torch.cat([exact + middle + ulp for middle in (0, step) for ulp in (-1, 0, 1)])
    # float16's subnormals are further apart in float32 the smaller they are.
    tiny = torch.arange(0, 2**11 + 1, dtype=torch.float32) * 2.0**-25
    tiny = torch.cat([tiny, -tiny]).view(torch.int32)
    below = torch.cat([tiny + ulp for ulp in (-1, 0, 1)])
    values = torch.cat([near, below, integers(torch.int32, 200_000)]).view(torch.float32)
    narrow = torch.empty(values.numel(), dtype=dtype)
    library.lower(ReduceOp.SUM, values, narrow, 1)
    check(ReduceOp.SUM, narrow, values.to(dtype))


def test_engine_reduce_of_no_elements_writes_nothing(library: Library) -> None:
    pointers = (ctypes.c_void_p * 2)(None, None)
    for op in OPS:
        for dtype in (d for d in DTYPES if op.supports(d)):
            library.c.reduce_(*library.reduction(op, dtype), None, pointers, 2, ctypes.c_size_t(0))
