"""The engine's knowledge of a tensor, against what torch says."""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import aiocomms
from aiocomms.errors import ArgumentError
from aiocomms.ops import checks, tensor_words

pytestmark = pytest.mark.deterministic

engine = pytest.importorskip("aiocomms_ucx._engine", reason="needs the ucx transport", exc_type=ImportError)

CPU = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), fast_check=None)


@pytest.fixture(params=["by words", "by calls"])
def asked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the engine read words of tensors, or ask torch as where it finds none."""
    words = tensor_words.find()
    engine.read_words_at(*(words if request.param == "by words" else (0, 0, 0, 0)))
    yield
    engine.read_words_at(*words)


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@functools.cache
def zoo() -> dict[str, object]:
    with warnings.catch_warnings(action="ignore"):  # torch warns of prototypes and deprecations
        return _zoo()


def _zoo() -> dict[str, object]:
    complex_ones = torch.ones(3, dtype=torch.complex64)
    floats, tracked = torch.arange(12.0), torch.ones(3, requires_grad=True)
    tensors: dict[str, object] = {str(dtype): torch.ones(3).to(dtype) for dtype in sorted(checks.DTYPES, key=str)}
    return tensors | {
        "empty": torch.empty(0, 3),
        "of no dimension": torch.tensor(1.0),
        "matrix": floats.view(3, 4),
        "slice": floats[4:8],
        "rows of length 1": floats[::4].view(3, 1),
        "column": floats.view(3, 4)[:, 1],
        "transposed": floats.view(3, 4).t(),
        "expanded": torch.ones(1).expand(4),
        "strided, one element": floats[::12],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "tracked": tracked,
        "conjugate": complex_ones.conj(),
        "negative": complex_ones.conj().imag[:1],
        "negative, strided anew": complex_ones.conj().imag.as_strided((3,), (1,)),
        "slice of a tracked one": tracked.detach()[:2],
        "view of a tracked one": tracked[:2],
        "of inference mode": inferred(),
        "freed": freed(),
        "meta": torch.ones(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
        "complex32": torch.ones(3).to(torch.complex32),
        "float4": torch.empty(3, dtype=torch.float4_e2m1fn_x2),
        "subclass": torch.ones(3).as_subclass(type("Mine", (torch.Tensor,), {})),
        "no tensor": [1.0],
        "None": None,
    }


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("name", zoo())
def test_engine_calls_a_tensor_plain_only_if_the_core_accepts_it(name, written):
    value = zoo()[name]
    try:
        (checks.writable if written else checks.readable)("tensor", value, CPU)
        fine = True
    except ArgumentError:
        fine = False
    # The engine may leave a tensor to the core, and does so with the subclasses that torch has itself.
    wanted = fine and not isinstance(value, torch.nn.Parameter)
    assert engine.is_plain(value, written) is wanted


@pytest.mark.usefixtures("asked")
def test_engine_sees_what_has_changed_about_a_tensor():
    tensor, negative = torch.ones(3), torch.ones(3, dtype=torch.complex64).conj().imag
    assert engine.is_plain(tensor, True)
    assert not engine.is_plain(tensor.requires_grad_(), True)
    assert engine.is_plain(tensor.requires_grad_(False), True)
    tensor.data = negative
    assert tensor.is_neg() is not engine.is_plain(tensor, False)
    other = torch.ones(3, requires_grad=True)
    torch.utils.swap_tensors(tensor, other)
    assert not engine.is_plain(tensor, True)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_op_gives_the_tensor_that_it_writes_the_next_version(dtype):
    async def reduce() -> None:
        async with aiocomms.new_comm("ucx") as comm:
            await comm.all_reduce(whole)
            await comm.all_reduce(whole[1:])
            await comm.all_reduce(inferred())  # a tensor without a version

    whole = torch.ones(3, dtype=dtype)
    before = whole._version
    asyncio.run(reduce())
    assert whole._version == before + 2


def test_the_words_of_a_tensor_are_found():
    words = tensor_words.find()
    assert words is not None
    assert words.plain == torch._C._dispatch_keys(torch.ones(1)).raw_repr()


def test_no_words_are_found_in_a_torch_that_does_not_show_them(monkeypatch):
    monkeypatch.setattr(tensor_words, "_keys", lambda _tensor: 7)
    tensor_words.find.cache_clear()
    assert tensor_words.find() is None
    tensor_words.find.cache_clear()


def test_engine_and_core_have_the_same_dtypes():
    assert {getattr(torch, name) for name in engine.dtype_names()} == checks.DTYPES
