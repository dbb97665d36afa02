"""A fault of a GPU, its libraries, or an argument is one sentence, before anything is launched.

It says what was given, and what is wanted, to be installed, or to be set; and a communicator stays usable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiocomms_nccl import NcclTransport, bringup
from aiocomms_nccl import nccl as names
from fake_cuda import FakeCuda, FakeStream
from fake_nccl import FakeNccl

import aiocomms
from aiocomms.errors import ArgumentError, ArgumentTypeError, UnsupportedOperation
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

SECOND = torch.device("cuda", 1)

# --------------------------------------------------------------------------------- what is missing, or does not fit


class Machine:
    """A machine as ``probe`` sees it: it has all that is wanted, until something is changed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        there = SimpleNamespace(submodule_search_locations=None)
        self.nccl = SimpleNamespace(
            available=True, NcclCommunicator=SimpleNamespace(commSplit=None), get_version=lambda: 23203
        )
        self.driver = SimpleNamespace(get_build_version=lambda: 13020)
        patch.setattr(names.importlib.util, "find_spec", lambda name: there)
        patch.setitem(sys.modules, "cupy", SimpleNamespace())
        patch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=self.nccl, driver=self.driver))
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)

    def without_cupy(self) -> None:
        self.patch.setattr(names.importlib.util, "find_spec", lambda name: None)

    def broken_cupy(self) -> None:
        self.patch.delitem(sys.modules, "cupy.cuda")
        self.patch.setattr(sys, "meta_path", [BrokenCupy()])
        self.patch.setitem(sys.modules, "cupy", SimpleNamespace(__path__=[], __spec__=None))

    def without_nccl(self) -> None:
        self.nccl.available = False

    def old_cupy(self) -> None:
        self.nccl.NcclCommunicator = SimpleNamespace()

    def old_nccl(self) -> None:
        self.nccl.get_version = lambda: 21703

    def other_cuda(self) -> None:
        self.driver.get_build_version = lambda: 12090

    def torch_without_cuda(self) -> None:
        self.patch.setattr(torch.version, "cuda", None)

    def no_gpu(self, why: str = "No CUDA GPUs are available") -> None:
        def init() -> None:
            raise RuntimeError(why)

        self.patch.setattr(torch.cuda, "is_available", lambda: False)
        self.patch.setattr(torch.cuda, "init", init)

    def old_driver(self) -> None:
        self.no_gpu(
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
            "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
        )

    def one_gpu(self) -> None:
        self.patch.setattr(torch.cuda, "device_count", lambda: 1)


class BrokenCupy:
    """Finds a CuPy that cannot be loaded, and says so as CuPy does: on a page."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        page = "\n" + 80 * "=" + "\nFailed to import CuPy.\n\nIf you installed CuPy via wheels, look there.\n"
        raise ImportError(page) from ImportError("libcudart.so.13: cannot open shared object file")


MISSING: list[tuple[Callable[[Machine], None], str]] = [
    (Machine.without_cupy, "CuPy is not installed: pip install 'aiocomms[nccl]' for CUDA 13, 'aiocomms[nccl-cu12]'"),
    (Machine.broken_cupy, "CuPy cannot be loaded (ImportError: libcudart.so.13: cannot open shared object file): re"),
    (Machine.without_nccl, "CuPy finds no NCCL: pip install nvidia-nccl-cu13 for CUDA 13, nvidia-nccl-cu12 for"),
    (Machine.old_cupy, "CuPy is too old, wanted 14 or newer: pip install -U cupy-cuda13x (or -cuda12x)"),
    (Machine.old_nccl, "NCCL is 2.17.3, wanted 2.18.1 or newer: pip install -U nvidia-nccl-cu13 (or -cu12)"),
    (Machine.other_cuda, "CuPy is built for CUDA 12, and torch for CUDA 13: pip install cupy-cuda13x"),
    (Machine.torch_without_cuda, "this torch was built without CUDA: install a CUDA build of torch"),
    (Machine.no_gpu, "torch finds no GPU (No CUDA GPUs are available): check nvidia-smi, the driver, and CUDA_VIS"),
    (Machine.old_driver, "torch finds no GPU (The NVIDIA driver on your system is too old (found version 11040)): "),
    (Machine.one_gpu, "device is cuda:1, and this process sees 1 GPU(s): use cuda:0 to cuda:0"),
]


@pytest.mark.parametrize(("change", "said"), MISSING, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, change: Callable[[Machine], None], said: str) -> None:
    machine = Machine(monkeypatch)
    assert NcclTransport.probe(SECOND) is None
    change(machine)
    why = NcclTransport.probe(SECOND)
    assert why is not None
    assert why.startswith(said)
    assert "\n" not in why


def test_a_program_that_wants_it_all_the_same_is_told(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    Machine(monkeypatch).old_driver()

    async def main() -> None:
        with pytest.raises(UnsupportedOperation, match=r"'nccl' is not available: torch finds no GPU .*too old"):
            await aiocomms.new_comm("nccl", SECOND)

    run(main)


# ------------------------------------------------------------------------------------------------- ranks that share


def hello(gpu: str, **changed: Any) -> bringup.NcclHello:
    known = {"byte_order": sys.byteorder, "host": "h", "name": "h", "gpu": gpu, "nccl": 23203, "several": False}
    return bringup.NcclHello(**{**known, "host_override": "", "token": b"", **changed})


def test_two_ranks_on_one_gpu_are_told_what_to_set() -> None:
    with pytest.raises(ArgumentError, match=r"ranks 0 and 1 are on the same GPU.*NCCL_MULTI_RANK_GPU_ENABLE=1 on all"):
        bringup.check([hello("a"), hello("a")])


@pytest.mark.parametrize(("gpus", "mps", "warned"), [("aa", False, True), ("aa", True, False), ("ab", False, False)])
def test_without_mps_they_are_told_that_they_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, gpus: str, mps: bool, warned: bool
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if mps:
        (tmp_path / "control").touch()
    hellos = [hello(gpu, several=True) for gpu in gpus]
    bringup.check(hellos)
    bringup._advise(1, hellos)
    said = [record.getMessage() for record in caplog.records]
    assert bool(said) is warned
    assert all(text.startswith("ranks 1 and 0 share a GPU without MPS") and "nvidia-cuda-mps-control -d" in text
               for text in said)  # fmt: skip


# -------------------------------------------------------------------------------------------- tensors and streams


def other_stream(cuda: FakeCuda) -> FakeStream:
    stream = FakeStream(cuda.gpu)
    stream.device = SECOND
    return stream


def captured_elsewhere(comm: Any, cuda: FakeCuda) -> None:
    """A capture on the current device, which is not the communicator's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "capturing", lambda stream=None: stream is None)
        comm.barrier()


def amid_a_capture(comm: Any, cuda: FakeCuda) -> None:
    with cuda.graph():
        comm.send(torch.ones(1), 1)


BAD: list[tuple[Callable[[Any, FakeCuda], object], type[Exception], str]] = [
    (
        lambda comm, cuda: comm.all_reduce(torch.ones(3, device="meta")),
        ArgumentError,
        r"tensor is on meta, wanted it on cpu, the communicator's device; give tensor.to\('cpu'\), or form a",
    ),
    (
        lambda comm, cuda: comm.send(torch.ones(3, device="meta"), 1),
        ArgumentError,
        "tensor is on meta, wanted it on cpu",
    ),
    (
        lambda comm, cuda: comm.barrier().wait_stream(other_stream(cuda)),
        ArgumentError,
        "stream is of cuda:1, wanted one of cuda:0, the communicator's device: let that one wait",
    ),
    (
        lambda comm, cuda: comm.barrier().wait_stream(3),
        ArgumentTypeError,
        r"stream is 3 \(int\), wanted a torch.cuda.Stream, or None for the current one",
    ),
    (
        lambda comm, cuda: captured_elsewhere(comm, cuda),
        UnsupportedOperation,
        "is of another device than the communicator's, cuda:0: capture on a stream of that device",
    ),
    (
        lambda comm, cuda: amid_a_capture(comm, cuda),
        UnsupportedOperation,
        "a message cannot be captured into a CUDA graph.*send it outside of the capture",
    ),
]

OPS_GO_ON = [call for call, _, said in BAD if said.startswith("stream is")]
"""The calls whose op is right, and for whose work alone something wrong is asked."""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("call", "error", "said"),
    BAD,
    ids=["tensor", "message", "other stream", "no stream", "capture elsewhere", "captured message"],
)
async def test_bad_input_leaves_the_communicator_usable(
    cuda: FakeCuda, call: Callable[[Any, FakeCuda], object], error: type[Exception], said: str
) -> None:
    async with local_world(2, "nccl_fake") as comms:
        calls = len(comms[0]._core.transports[0]._comm_stream.comm.calls)
        with pytest.raises(error, match=said):
            call(comms[0], cuda)
        if call in OPS_GO_ON:
            await comms[1].barrier()
        else:
            assert len(comms[0]._core.transports[0]._comm_stream.comm.calls) == calls, "something was launched"
        tensors = [torch.ones(2) for _ in comms]
        works = [comm.all_reduce(tensor) for comm, tensor in zip(comms, tensors, strict=True)]
        for work in works:
            assert (await work).tolist() == [2, 2]
        assert isinstance(comms[0]._core.transports[0].library, FakeNccl)
