"""Writes of a source rank, into memory that it shares with the target and into other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from aiocomms.errors import ArgumentError, MoveLostError, RegionError
from aiocomms.lowlevel.copying import YieldingCopy
from aiocomms.progress.work import Work
from aiocomms.resharding import writing
from aiocomms.resharding.chunks import Chunk, records_of, size_of, view_of
from aiocomms.resharding.plan import planned
from aiocomms.resharding.words import TargetRecord

pytestmark = pytest.mark.deterministic


class Done:
    """A work that is done."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self._then = then
        self.callbacks: list[object] = []

    def add_done_callback(self, callback: object) -> None:
        """Record a callback."""
        self.callbacks.append(callback)

    def __await__(self) -> Any:
        yield from anyio.lowlevel.checkpoint().__await__()
        self._then()


class FakeRegion:
    """A region as a source rank sees it."""

    def __init__(self, shared: bool, size: int) -> None:
        self.shared, self.closed = shared, False
        self.memory = torch.zeros(size, dtype=torch.uint8)

    async def attach(self, descriptor: bytes) -> FakeRegion:
        """Return this region, the only one."""
        return self

    async def _memory(self) -> Tensor | None:
        return self.memory if self.shared else None

    def put_v(self, data: Tensor, offsets: list[int], starts: list[int], count: int) -> Done:
        """Copy each run."""
        assert not self.shared
        for offset, start in zip(offsets, starts, strict=True):
            self.memory[offset : offset + count] = data[start : start + count]
        return Done()

    def flush(self) -> Done:
        """Return a work that fails if the region is closed."""
        self.flushed = Done(self._check)
        return self.flushed

    def _check(self) -> None:
        if self.closed:
            raise RegionError("its owner has revoked the region")


WHOLE = torch.arange(6 * 8 * 10, dtype=torch.float32).view(6, 8, 10)


def moved(region_of: Callable[[int], FakeRegion], dtype: torch.dtype, convert: Any = None) -> tuple[Tensor, Tensor]:
    """Write a part of a tensor into a region; return the values there, and those expected."""
    chunks = {"w": Chunk(WHOLE[1:, :, 2:], (6, 8, 10), (1, 0, 2))}
    there = records_of({"w": Chunk(torch.zeros(4, 5, 6, dtype=dtype), (6, 8, 10), (2, 3, 3))})
    copies = planned(0, [records_of(chunks)], [TargetRecord(b"", there)]).copies
    region = region_of(size_of(there))
    anyio.run(writing.write, copies, chunks, {0: (region, b"")}, convert)
    return view_of(region.memory, there[0]), WHOLE[2:6, 3:8, 3:9].to(dtype)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_part_of_a_tensor_arrives_in_the_dtype_of_the_target(
    shared: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("aiocomms.resharding.plan", "aiocomms.resharding.writing"):
        monkeypatch.setattr(f"{module}.BLOCK", 64)
    found, wanted = moved(lambda size: FakeRegion(shared, size), dtype)
    assert found.equal(wanted)


@pytest.mark.parametrize("shared", [False, True])
def test_single_element_of_any_stride_arrives(shared: bool) -> None:
    chunks = {"w": Chunk(torch.arange(1.0, 5)[::2][1:], (1,), (0,))}
    records = records_of(chunks)
    region = FakeRegion(shared, size_of(records))
    copies = planned(0, [records], [TargetRecord(b"", records)]).copies
    anyio.run(writing.write, copies, chunks, {0: (region, b"")}, None)
    assert view_of(region.memory, records[0]).tolist() == [3.0]


@pytest.mark.parametrize("shared", [False, True])
def test_part_that_was_converted_is_checked_and_arrives(shared: bool) -> None:
    def convert(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        return (2 * part).to(dtype)

    found, wanted = moved(lambda size: FakeRegion(shared, size), torch.bfloat16, convert)
    assert found.equal((2 * wanted).bfloat16())
    with pytest.raises(ExceptionGroup) as error:
        moved(lambda size: FakeRegion(shared, size), torch.bfloat16, lambda name, part, dtype: part)
    assert error.group_contains(ArgumentError, match=r"convert returned .* for 'w', wanted a tensor of torch.bfloat16")


def test_region_that_is_closed_is_not_written() -> None:
    regions: list[FakeRegion] = []

    def closed(size: int) -> FakeRegion:
        regions.append(FakeRegion(True, size))
        regions[0].closed = True
        return regions[0]

    with pytest.raises(MoveLostError, match="target rank 0: its owner has revoked the region"):
        moved(closed, torch.float32)
    assert not regions[0].memory.any()
    assert Work.exception in regions[0].flushed.callbacks, "its error would be reported if the call were cancelled"


def test_cancelled_write_ends_with_the_block_that_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("aiocomms.resharding.plan", "aiocomms.resharding.writing"):
        monkeypatch.setattr(f"{module}.BLOCK", 64)
    monkeypatch.setattr(writing, "run_in_thread", anyio.to_thread.run_sync)
    chunks = {"w": Chunk(WHOLE, (6, 8, 10), (0, 0, 0))}
    records = records_of(chunks)
    copies = planned(0, [records], [TargetRecord(b"", records)]).copies
    converted: list[Tensor] = []

    async def run() -> None:
        def convert(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
            converted.append(part)
            if len(converted) == 3:
                anyio.from_thread.run_sync(scope.cancel)
                anyio.from_thread.run(anyio.lowlevel.cancel_shielded_checkpoint)  # The task is cancelled here.
            return part

        with anyio.CancelScope() as scope:
            await writing.write(copies, chunks, {0: (FakeRegion(True, size_of(records)), b"")}, convert)  # type: ignore[dict-item]
        assert scope.cancelled_caught

    anyio.run(run)
    assert len(converted) == 3 < len(copies)


@pytest.mark.parametrize("native", [False, True])
def test_yielding_copies_are_copies(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native:
        pytest.importorskip("aiocomms_words", reason="the part with native code is not installed")
    else:
        monkeypatch.setattr("aiocomms.lowlevel.copying.native", lambda: None)
    pairs = [
        (torch.zeros(5, 4, 6)[:, 1:3, ::2], WHOLE[:5, :2, :3]),
        (torch.zeros(8, 6), WHOLE[:, :, 0].t()),
        (torch.zeros(6, 8, 10, dtype=torch.int32), WHOLE),
        (torch.zeros(2, dtype=torch.complex64), torch.tensor([1 + 2j, 3 - 4j]).conj()),
        (torch.zeros(()), torch.tensor(7.0)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ]
    copying = YieldingCopy()
    copying.copy(pairs)
    for there, part in pairs:
        assert there.equal(part.to(there.dtype).resolve_conj())
    copying.stop()
    copying.copy([(there, torch.zeros_like(there)) for there, _ in pairs[:4]])
    assert all(there.any() for there, _ in pairs[:4])
