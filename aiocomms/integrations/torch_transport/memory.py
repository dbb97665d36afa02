"""Memory that is registered with a transport, views of this memory, and descriptors that give the peer access to it.

Sizes are in bytes.
"""

from __future__ import annotations

import operator
from typing import Literal, Self

import torch
from torch import Tensor

from aiocomms.arguments import describe
from aiocomms.blocking.peer import BlockingRegion
from aiocomms.endpoints.credentials import read_descriptor
from aiocomms.errors import ArgumentError, RegionError


class Registration:
    """A tensor that the peer may read and write. No memory is registered twice at the same time."""

    owner: object
    tensor: Tensor
    flat: Tensor
    region: BlockingRegion

    def __init__(self, owner: object, tensor: Tensor, flat: Tensor, region: BlockingRegion) -> None:
        """Store the parts of the registration.

        :param owner: the transport.
        :param flat: the memory of ``tensor``, as bytes.
        """
        self.owner, self.tensor, self.flat, self.region = owner, tensor, flat, region
        self.active = True

    def check(self) -> None:
        """Check that the registration is valid.

        :raises ArgumentError: the memory was unregistered, or the tensor now has different memory.
        """
        if not self.active:
            raise ArgumentError("the memory was unregistered: register the tensor again")
        if (self.tensor.data_ptr(), self.tensor.nbytes) != (self.flat.data_ptr(), self.flat.nbytes):
            raise ArgumentError(f"the registered tensor ({describe(self.tensor)}) was resized, or has another storage")


class MemoryView:
    """A range of registered memory, from which a write can take its data."""

    def __init__(self, registration: Registration, offset: int, length: int) -> None:
        self._registration, self._offset, self._length = registration, offset, length

    def size(self) -> int:
        """Return the size of the range, in bytes."""
        return self._length

    @property
    def part(self) -> Tensor:
        """The bytes of the view, as a tensor of dtype uint8."""
        return self._registration.flat[self._offset : self._offset + self._length]


class MutableMemoryView(MemoryView):
    """A range of registered memory, from which a write can take its data, and into which a read can write."""

    @property
    def writable(self) -> Literal[True]:
        """True, always."""
        return True


class Memory:
    """A registered tensor."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration

    def to_view(self, offset: int | None = None, length: int | None = None) -> MemoryView:
        """Return a view of a range of this memory. A write can take its data from the view.

        :param offset: the first byte of the range; None: 0.
        :param length: the number of bytes; None: all bytes from ``offset`` to the end.
        """
        return MemoryView(self._registration, *self._range(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> MutableMemoryView:
        """Return a view of a range of this memory, into which a read can write; see :meth:`to_view`."""
        return MutableMemoryView(self._registration, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> RemoteBuffer:
        """Return the buffer with which the peer reads and writes this memory. ``timeout`` has no effect."""
        self._registration.check()
        return RemoteBuffer(self._registration.region.descriptor)

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self._registration.check()
        total = self._registration.flat.nbytes
        first = 0 if offset is None else operator.index(offset)
        if not 0 <= first <= total:
            raise ArgumentError(f"offset is {first}, wanted 0 to {total}, the memory's bytes")
        count = total - first if length is None else operator.index(length)
        if not 0 <= count <= total - first:
            raise ArgumentError(f"length is {count}, wanted 0 to {total - first}, the bytes behind offset {first}")
        return first, count


class RemoteBuffer:
    """A reference to the peer's memory. It contains a descriptor that only the peer can create."""

    def __init__(self, descriptor: bytes) -> None:
        """Create the buffer from a result of :meth:`serialize`.

        :raises ArgumentTypeError: ``descriptor`` is not bytes.
        :raises ArgumentError: ``descriptor`` is not a result of :meth:`serialize`.
        """
        try:
            says = read_descriptor(descriptor)
        except RegionError as error:
            raise ArgumentError(f"descriptor is no remote buffer of aiocomms: {error.message}") from None
        if says.dtype != str(torch.uint8):
            raise ArgumentError(f"descriptor is of a region of {says.dtype}, wanted one of bytes")
        self._descriptor, self._length = bytes(descriptor), says.count

    def size(self) -> int:
        """Return the size of the remote memory, in bytes."""
        return self._length

    def serialize(self) -> bytes:
        """Return the descriptor, whose size is at most 1,024 bytes.

        Send the descriptor only to processes that may access the memory.
        """
        return self._descriptor

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        """Return the buffer that :meth:`serialize` has encoded.

        This method parses the data, and executes no code from the data.

        :raises ArgumentTypeError: ``data`` is not bytes.
        :raises ArgumentError: ``data`` is not a result of :meth:`serialize`.
        """
        return cls(data)
