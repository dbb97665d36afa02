"""A fake GPU for each test of the nccl transport, and the transport over it as an installed plug-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cuda import FakeCuda
from fake_functions import complaints
from fake_nccl import FakeNccl, FakeNcclTransport, connect_without_a_network
from plugins import installed


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the metadata by which the fake transport is found."""
    return installed(
        tmp_path_factory.mktemp("fake"),
        nccl_fake="fake_nccl:FakeNcclTransport",
        nccl_fake_debug="fake_nccl:FakeNcclDebugTransport",
    )


@pytest.fixture(params=["native", "python"])
def cuda(request: pytest.FixtureRequest, distribution: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU for one test, with either launcher."""
    monkeypatch.setenv("AIOCOMMS_PURE", str(int(request.param == "python")))
    monkeypatch.syspath_prepend(str(distribution))
    cuda = FakeCuda()
    monkeypatch.setattr(FakeNcclTransport, "cuda_layer", cuda)
    monkeypatch.setattr(FakeNcclTransport, "nccl_layer", FakeNccl(cuda))
    connect_without_a_network(monkeypatch)
    complaints.clear()
    yield cuda
    assert not complaints
