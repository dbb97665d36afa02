"""The memory of a target rank: buffers into which the source writes. Each buffer holds one version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from aiocomms.endpoints.endpoint import Endpoint
from aiocomms.endpoints.regions import Region
from aiocomms.lowlevel import run_in_thread
from aiocomms.lowlevel.shielding import shielded
from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected
from aiocomms.resharding.chunks import Chunk, size_of, view_of
from aiocomms.resharding.words import ChunkRecord


class Weights(Mapping[str, Tensor]):
    """A version of the weights: this rank's chunks by name. A program must not write to the chunks.

    The values stay unchanged within the ``with`` block that provides this object. After the block, the same memory may
    hold another version of the weights.
    """

    version: int

    def __init__(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.version, self._tensors = version, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Weights of version {self.version}: {len(self)} tensors>"


class VersionMemory:
    """The buffers of a target rank, by number."""

    def __init__(self, here: Endpoint) -> None:
        self._here = here
        self.records: tuple[ChunkRecord, ...] = ()
        """The records of this rank's chunks."""
        self._regions: dict[int, Region] = {}
        self._tensors: dict[int, dict[str, Tensor]] = {}

    async def make(self, number: int) -> None:
        """Make the buffer with this number, if it does not exist.

        A thread allocates the memory, because the allocation touches all pages.
        """
        if number in self._regions:
            return
        flat, tensors = await run_in_thread(self._allocated)
        self._regions[number] = self._here.register(flat, read=False)
        self._tensors[number] = tensors

    @unaffected
    def _allocated(self) -> tuple[Tensor, dict[str, Tensor]]:
        flat = buffers.zeros(size_of(self.records), dtype=torch.uint8, device=self._here.device)
        # The first opening of a region moves memory that is not shared yet, on the event loop's thread.
        if flat.device.type == "cpu" and flat.numel():
            flat.share_memory_()  # type: ignore[no-untyped-call]
        return flat, {record.name: view_of(flat, record) for record in self.records}

    async def fill(self, number: int, chunks: Mapping[str, Chunk]) -> None:
        """Copy chunks into a buffer. A cancelled call waits until the copy no longer reads the program's tensors."""

        @unaffected
        def call() -> None:
            for name, chunk in chunks.items():
                self._tensors[number][name].copy_(chunk.tensor)

        await shielded(lambda: run_in_thread(call))

    def tensors(self, number: int) -> Mapping[str, Tensor]:
        """Return the chunks in a buffer."""
        return self._tensors[number]

    def descriptor(self, number: int) -> bytes:
        """Return the descriptor of a buffer's region, for the source ranks."""
        return self._regions[number].descriptor

    def drop(self, named: set[int]) -> list[Region]:
        """Remove all buffers that are not in ``named``, and return the regions of the removed buffers.

        The caller must revoke these regions.
        """
        for number in self._tensors.keys() - named:
            del self._tensors[number]
        return [self._regions.pop(number) for number in self._regions.keys() - named]
