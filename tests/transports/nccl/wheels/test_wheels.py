"""The thin layer against the real wheels of CuPy and NCCL, which load without a GPU: `make test-cupy` runs this.

What needs a GPU is not here: see docs/nccl.md.
"""

from __future__ import annotations

import inspect
import re

import aiocomms_launcher
import pytest
import torch
from aiocomms_nccl import calls, native
from aiocomms_nccl import nccl as ours
from aiocomms_nccl.nccl import CupyNccl, NcclComm
from fake_cuda import FakeCuda
from processes import PATIENCE

from aiocomms.bootstrap import registry
from aiocomms.cuda import no_gpu
from aiocomms.errors import CommError

pytestmark = pytest.mark.real

theirs = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed: make test-cupy")

DTYPES = {
    "NCCL_INT8": ours.INT8,
    "NCCL_UINT8": ours.UINT8,
    "NCCL_INT32": ours.INT32,
    "NCCL_UINT32": ours.UINT32,
    "NCCL_INT64": ours.INT64,
    "NCCL_UINT64": ours.UINT64,
    "NCCL_FLOAT16": ours.FLOAT16,
    "NCCL_FLOAT32": ours.FLOAT32,
    "NCCL_FLOAT64": ours.FLOAT64,
    "NCCL_BFLOAT16": ours.BFLOAT16,
}
OPS = {
    "NCCL_SUM": ours.SUM,
    "NCCL_PROD": ours.PROD,
    "NCCL_MAX": ours.MAX,
    "NCCL_MIN": ours.MIN,
    "NCCL_AVG": ours.AVG,
}


def test_numbers_of_dtypes_and_operators() -> None:
    assert {name: getattr(theirs, name) for name in DTYPES | OPS} == DTYPES | OPS


def test_the_version_is_new_enough() -> None:
    version = CupyNccl().version()
    assert version == theirs.get_version() >= ours.SEVERAL_RANKS_PER_GPU
    assert re.fullmatch(r"2\.\d+\.\d+", ours.readable(version))
    assert ours.no_cupy() is None


CALLS = [name for name, call in vars(NcclComm).items() if inspect.isfunction(call) and not name.startswith("_")]
OUR_NAMES = {
    "sendbuf": "send",
    "sendbuff": "send",
    "recvbuf": "recv",
    "recvbuff": "recv",
    "recvcount": "count",
    "datatype": "dtype",
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_the_arguments_that_it_is_given(name: str) -> None:
    """CuPy's are compiled; their signatures stand in the first line of their descriptions."""
    told = re.match(rf"NcclCommunicator\.{name}\(self(.*)\)", getattr(theirs.NcclCommunicator, name).__doc__)
    assert told is not None
    found = [part.split()[-1] for part in told[1].split(",") if part.strip() and "=" not in part]
    wanted = list(inspect.signature(getattr(NcclComm, name)).parameters)[1:]
    assert [OUR_NAMES.get(part, part) for part in found] == wanted


def test_native_code_is_given_the_functions_of_this_very_library() -> None:
    found = CupyNccl().functions()
    assert found is not None
    assert set(found) == set(ours.FUNCTIONS)
    assert len(set(found.values())) == len(found)
    assert hasattr(theirs.NcclCommunicator, "comm")  # the communicator's address


@pytest.mark.parametrize("what", range(calls.ALL_REDUCE, calls.RECV + 1))
def test_the_native_launcher_calls_nccl_itself(what: int) -> None:
    """Over a fake of CUDA. NCCL refuses each call, of a communicator that is none, by its own number."""
    cuda, functions = FakeCuda(), CupyNccl().functions()
    assert functions is not None
    launcher = aiocomms_launcher.make({**cuda.functions(), **functions}, 0, 0)
    port = launcher.open()
    line, stream = launcher.add(port, cuda.default.cuda_stream, 0), cuda.current_handle()
    number = launcher.launch(line, launcher.mark(stream), [(what, 8, 8, 1, ours.FLOAT32, ours.SUM, 0)])
    launcher.drain_all(port)
    assert (number, native.NCCL_FAILED, 4) in launcher.take(port)
    launcher.close(port)
    launcher.end(PATIENCE)


def test_a_unique_id() -> None:
    library = CupyNccl()
    one, two = library.unique_id(), library.unique_id()
    assert type(one) is bytes
    assert len(one) == len(two) == 128
    assert one != two


def test_groups_must_match() -> None:
    library = CupyNccl()
    library.group_start()
    library.group_end()
    with pytest.raises(library.errors) as caught:
        library.group_end()
    assert ours.status_of(caught.value) == 5
    assert "ncclInvalidUsage" in str(ours.explain("a group", caught.value))


def test_without_a_gpu_forming_fails_with_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    library = CupyNccl()
    with pytest.raises(library.errors) as caught:
        library.communicator(1, library.unique_id(), 0)
    error = ours.explain("forming its communicator", caught.value)
    assert isinstance(error, CommError)
    assert "ncclUnhandledCudaError" in str(error)


@pytest.mark.parametrize("status", range(1, 9))
def test_every_status_is_understood(status: int) -> None:
    """CuPy raises a KeyError for those that are newer than its list of texts."""
    library = CupyNccl()
    with pytest.raises(library.errors) as caught:
        theirs.check_status(status)
    assert ours.status_of(caught.value) == status
    assert "ncc" in str(ours.explain("all_reduce", caught.value))


def test_the_registry_says_what_is_missing_else() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    why = registry.find("nccl", torch.device("cuda"))
    assert why == no_gpu(torch.device("cuda")) is not None
