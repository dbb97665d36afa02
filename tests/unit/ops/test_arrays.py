"""Arrays as tensors: which are accepted, which memory the tensor shares, and how others are refused."""

from __future__ import annotations

import gc
import operator
import re
import subprocess
import sys
import weakref
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from processes import HANGS

from aiocomms import ReduceOp, ops
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.ops.arrays import as_tensor, checked, like

pytestmark = pytest.mark.deterministic


class Group(NamedTuple):
    """A communicator with the attributes that checks read."""

    rank: int = 0
    size: int = 2
    device: torch.device = torch.device("cpu")
    fast_check: None = None


class Exporter:
    """An array that exports a tensor's memory by the current version of DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **asked: Any) -> Any:
        return self.tensor.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.tensor.__dlpack_device__()


class Old(Exporter):
    """An exporter from before the versions of DLPack: it takes a stream and nothing else."""

    def __dlpack__(self, stream: None = None) -> Any:
        return self.tensor.__dlpack__(stream=stream)


class Copied(Exporter):
    """An exporter whose memory is elsewhere: it exports a copy, and says so."""

    def __dlpack__(self, **asked: Any) -> Any:
        return self.tensor.numpy().__dlpack__(**asked, copy=True)


class Broken(Exporter):
    """An exporter that fails."""

    def __dlpack__(self, **asked: Any) -> Any:
        raise RuntimeError("the memory is gone")


def reduce_(array: Any) -> ops.AllReduce:
    return checked(ops.AllReduce(array, ReduceOp.SUM), Group())


def test_checked_op_of_tensors_is_the_same_op():
    asked = ops.AllReduce(torch.ones(3), ReduceOp.SUM)
    assert checked(asked, Group()) is asked


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3), np.array(3.0), np.zeros((0, 4)), np.ones(3, bool),
        np.ones(2, np.complex128), np.ones((1, 2)).view(np.matrix), np.arange(8, dtype=np.uint16)[2:6],
        np.frombuffer(bytearray(9), np.uint8)[1:].view(np.float32), Exporter(torch.ones(4)), Old(torch.ones(4)),
    ],
    ids=lambda it: type(it).__name__,
)  # fmt: skip
def test_as_tensor_shares_memory_with_the_array(array: Any):
    tensor = as_tensor("it", array, write=True)
    tensor.fill_(1)
    mine = array.tensor if isinstance(array, Exporter) else np.asarray(array)
    assert tuple(tensor.shape) == tuple(mine.shape)
    assert (mine == 1).all()
    if tensor.numel():
        assert tensor.data_ptr() == (mine.data_ptr() if isinstance(array, Exporter) else mine.ctypes.data)


def test_as_tensor_of_a_memmap_writes_to_its_file(tmp_path):
    array = np.memmap(tmp_path / "file", np.float32, "w+", shape=(4,))
    as_tensor("it", array, write=True).fill_(2)
    array.flush()
    assert np.fromfile(tmp_path / "file", np.float32).tolist() == [2] * 4


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_as_tensor_accepts_ml_dtypes(name: str):
    array = np.ones(4, getattr(ml_dtypes, name))
    tensor = as_tensor("it", array, write=True)
    assert (tensor.dtype, tensor.float().tolist()) == (getattr(torch, name), [1] * 4)
    tensor.copy_(torch.full((4,), 2.0))
    assert array.astype(float).tolist() == [2] * 4
    again = like(array, torch.full((2,), 4.0).to(tensor.dtype))
    assert (again.dtype, again.astype(float).tolist()) == (array.dtype, [4, 4])


READ_ONLY = np.ones(4, np.float32)
READ_ONLY.flags.writeable = False
REFUSED: dict[str, tuple[Any, str]] = {
    "read-only": (READ_ONLY, "a float32[4] numpy.ndarray which is read-only, wanted one that can be written"),
    "backwards": (np.ones(4)[::-1], "a float64[4] numpy.ndarray which runs backwards in memory, wanted a contiguous"),
    "a copy": (Copied(torch.ones(4)), "test_arrays.Copied which is exported as a copy, wanted one"),
    "of the other byte order": (
        np.ones(2, ">i4"),
        "a >i4[2] numpy.ndarray, wanted one whose memory",
    ),
    "of objects": (np.array([None]), "a object[1] numpy.ndarray, wanted one whose memory a tensor can share"),
    "of strings": (np.array(["a"]), "a <U1[1] numpy.ndarray, wanted one whose memory a tensor can share"),
    "of records": (np.zeros(2, [("a", "f4")]), "numpy.ndarray, wanted one whose memory a tensor can share"),
    "of long doubles": (np.ones(2, np.longdouble), "numpy.ndarray, wanted one whose memory a tensor can share"),
    "between elements": (np.zeros(2, [("a", "f4"), ("b", "u1")])["a"], "wanted one whose memory a tensor can share"),
    "masked": (np.ma.array([1.0, 2.0], mask=[0, 1]), "a float64[2] numpy.ma.MaskedArray, whose mask would stay behind"),
    "not contiguous": (np.ones((4, 4))[:, 0], "which is not contiguous; give one that is"),
    "broken": (Broken(torch.ones(1)), "wanted one whose memory a tensor can share: the memory is gone"),
}


@pytest.mark.parametrize(("array", "why"), REFUSED.values(), ids=list(REFUSED))
def test_unsupported_array_is_refused_with_a_reason(array: Any, why: str):
    with pytest.raises(ArgumentError, match=rf"^tensor .*{re.escape(why)}"):
        reduce_(array)


@pytest.mark.fault(125)
def test_array_error_suggests_a_call_of_its_library():
    column = np.ones((4, 4), np.float32)[:, 0]
    with pytest.raises(ArgumentError, match=r"is not contiguous; give numpy\.ascontiguousarray\(tensor\)$"):
        checked(ops.Send(column, 1), Group())
    with pytest.raises(ArgumentError, match=r"is not contiguous; give one that is$"):  # a copy would be written
        checked(ops.Recv(column, 1), Group())
    with pytest.raises(ArgumentError, match=r"numpy\.ndarray on cpu, wanted it on meta, .*; give a tensor there, or "):
        checked(ops.Send(np.ones(4, np.float32), 1), Group(device=torch.device("meta")))


def test_value_that_is_no_array_is_refused():
    for value in (None, [1.0], 3, np.float32(1), np.ndarray):
        with pytest.raises(ArgumentTypeError, match=r"tensor is .*, wanted a torch\.Tensor"):
            reduce_(value)
    with pytest.raises(ArgumentTypeError, match=r"dst is an int64\[\] numpy\.ndarray \(ndarray\), wanted a rank"):
        checked(ops.Send(torch.ones(1), np.array(1)), Group())  # type: ignore[arg-type]


def test_read_only_array_may_be_sent_without_a_warning():
    op = checked(ops.Send(READ_ONLY, 1), Group())  # A warning would be an error.
    assert op.tensor.data_ptr() == READ_ONLY.ctypes.data


def test_checked_op_gives_tensors_and_its_result_the_given_arrays():
    outputs, mine = (np.zeros(2), torch.zeros(2, dtype=torch.float64)), np.ones(2)
    asked = ops.AllGather(outputs, mine)  # type: ignore[arg-type]
    op = checked(asked, Group())
    assert type(op) is ops.AllGather
    assert [type(it) for it in (*op.outputs, op.input)] == [torch.Tensor] * 3
    assert op.outputs[1] is outputs[1]
    assert all(map(operator.is_, asked.result(), outputs))


def test_array_used_as_input_and_output_becomes_one_tensor():
    shared = np.ones(4, np.float32)
    op = checked(ops.AllGather((shared, np.ones(4, np.float32)), shared), Group())  # type: ignore[arg-type]
    assert op.input is op.outputs[0]
    with pytest.raises(ArgumentError, match=r"outputs\[1\] overlaps outputs\[0\]"):
        checked(ops.AllGather((shared, shared), shared), Group())  # type: ignore[arg-type]
    parts = (ops.Send(shared, 1), ops.Recv(shared, 1))
    with pytest.raises(ArgumentError, match="part 1's tensor overlaps part 0's tensor"):
        checked(ops.Batch(parts), Group())


def test_tensor_of_an_array_keeps_its_memory_alive():
    array = np.ones(4)
    alive = weakref.ref(array)
    tensor = as_tensor("it", array, write=True)
    del array
    gc.collect()
    assert alive() is not None
    del tensor
    assert alive() is None


def test_like_returns_the_library_of_its_model():
    tensor = torch.ones(2)
    assert like(tensor, tensor) is tensor
    assert like(Exporter(tensor), tensor) is tensor  # An Exporter cannot be made from a tensor.
    array = like(np.zeros(1, np.float32), tensor)
    assert type(array) is np.ndarray
    assert (array.flags.writeable, array.ctypes.data) == (True, tensor.data_ptr())


@pytest.mark.real
def test_arrays_without_numpy_installed_are_accepted():
    """Torch warns without NumPy, and arrays by DLPack are accepted all the same."""
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import aiocomms, torch, warnings; warnings.simplefilter('error')\n"
        "from aiocomms.ops.arrays import as_tensor, like\n"
        "class Array:\n"
        "    def __init__(self): self.tensor = torch.ones(3)\n"
        "    def __dlpack__(self, **asked): return self.tensor.__dlpack__(**asked)\n"
        "    def __dlpack_device__(self): return self.tensor.__dlpack_device__()\n"
        "print(as_tensor('it', Array(), write=True).tolist(), like(Array(), torch.ones(1)).tolist())\n"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=HANGS)
    assert run.stdout.split("\n")[0] == "[1.0, 1.0, 1.0] [1.0]", run.stderr
