"""Registers and areas in memory that processes of one host share.

The memory has no name. A process that joins the group opens the memory through the ``/proc`` entry of another process
that has opened the memory. The kernel frees the memory when no process has the memory open, for example when all
processes have died.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final

import anyio
import torch
from torch import Tensor

from aiocomms.errors import ArgumentError, CommClosedError
from aiocomms.live.registers import HEADER, LANES, LONG, PER_LANE, Shortcut, area_of, place_of, register_of
from aiocomms.live.rounds import MOST_RANKS
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.forks import Unshared
from aiocomms.lowlevel.hosts import PROCESS_BITS, process_descriptor
from aiocomms.lowlevel.libraries import native
from aiocomms.lowlevel.shielding import shielded
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.ops import buffers, tensor_words
from aiocomms.progress.driver import Bell, LoopDriver

_LINE: Final = 64
"""The size of a register in the memory, in bytes: one cache line."""
_ALL: Final = 2**32 - 1
"""The number in a datagram that wakes all waiting ranks. Other datagrams contain the number of a register."""
_NUMBER: Final = struct.Struct("<I")
_LENGTHS: Final = struct.Struct("<QQ")
"""The format of an area's beginning, which contains the lengths of the area's header and data."""
_HEAD: Final = HEADER + _LENGTHS.size
"""The offset of an area's data from the beginning of the area, in bytes."""
_WORDS: Final = place_of(MOST_RANKS) + LANES * PER_LANE
"""The number of registers in the memory, including hidden registers.

Each register of a lane has a hidden register, with the bits of the ranks that sleep until the lane's register changes.
"""
_AREAS: Final = (_WORDS * _LINE + _HEAD - 1) // _HEAD * _HEAD
_UNWATCHED: Final = -1
"""The value in place of a file descriptor for a process whose death cannot be detected.

This process always counts as alive.
"""


def size_of(size: int, capacity: int) -> int:
    """Return the size of a group's memory in bytes. The kernel allocates only pages that were written."""
    return _AREAS + LANES * 2 * size * _stride(capacity)


def new_memory(size: int, capacity: int) -> int:
    """Return a file descriptor of new memory for a group.

    :raises OSError: the memory or the descriptor is not available.
    """
    fd = os.memfd_create("aiocomms live group", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, size_of(size, capacity))
    except BaseException:
        os.close(fd)
        raise
    return fd


class SharedRegisters:
    """The registers and areas of a live group in shared memory; see :class:`aiocomms.live.registers.Registers`.

    All methods run on one event loop's thread. A waiting rank sleeps until it gets a datagram from the rank that has
    changed the register.

    :param fd: the file descriptor of the memory; :meth:`close` closes it.
    """

    def __init__(self, fd: int, rank: int, size: int, capacity: int) -> None:
        self._fd, self._rank, self._size, self._capacity = fd, rank, size, capacity
        self._words = native().Words(fd, _WORDS)
        self._memory = memoryview(mmap.mmap(fd, size_of(size, capacity)))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._driver = LoopDriver.current()
        self._bells: dict[int, Bell] = {}
        self._writes: set[int] = set()
        """The areas into which threads are writing."""
        self._wrote = Bell(self._driver)
        self._living: dict[int, int | None] = {}
        """A dict from the number of each process to a file descriptor; None if the process has died."""
        self._name = f"\0aiocomms live {os.fstat(fd).st_ino} "
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._listen()

    def _listen(self) -> None:
        try:
            self._socket.bind(self._name + str(self._rank))
        except OSError:
            self._socket.close()
            raise ArgumentError(f"rank is {self._rank}, which another live process has already") from None
        Unshared(self._name + str(self._rank)).belongs_to(self)
        self._driver.watch(self._socket.fileno(), self._heard)

    async def load(self, register: int) -> int:
        """See :class:`aiocomms.live.registers.Registers`."""
        if self._fd < 0:
            raise CommClosedError("the group was closed")
        return int(self._words.load(register))

    async def swap(self, register: int, expected: int, desired: int) -> int:
        """See :class:`aiocomms.live.registers.Registers`."""
        return int(self._words.swap(register, expected, desired))

    async def write(self, area: int, header: bytes, parts: Sequence[Tensor]) -> None:
        """See :class:`aiocomms.live.registers.Registers`."""
        begin = self._begin(area)
        head = begin + _LENGTHS.size
        self._memory[head : head + len(header)] = header
        count = sum(map(len, parts))
        _LENGTHS.pack_into(self._memory, begin, len(header), count)
        if count <= LONG:
            return self._copy(begin + _HEAD, parts)
        self._writes.add(area)
        try:
            # A thread that writes on after this call would overwrite a later contribution.
            await shielded(lambda: run_in_thread(functools.partial(self._copy, begin + _HEAD, parts)))
        finally:
            self._writes.discard(area)
            self._wrote.ring()

    async def written(self, areas: Sequence[int]) -> None:
        """See :class:`aiocomms.live.registers.Registers`."""
        while not self._writes.isdisjoint(areas):
            await self._wrote

    def _copy(self, at: int, parts: Sequence[Tensor]) -> None:
        for part in parts:
            self._bytes[at : at + len(part)].copy_(part)
            at += len(part)

    async def read(self, area: int) -> tuple[bytes, Tensor]:
        """See :class:`aiocomms.live.registers.Registers`. The data is a view of the area."""
        begin = self._begin(area)
        length, count = _LENGTHS.unpack_from(self._memory, begin)
        head, data = begin + _LENGTHS.size, begin + _HEAD
        header = bytes(self._memory[head : head + min(length, _HEAD - _LENGTHS.size)])
        return header, self._bytes[data : data + min(count, self._capacity)]

    def shortcut(self, lane: int, rank: int, size: int, holder: int) -> Shortcut:
        """See :class:`aiocomms.live.registers.Registers`. The native code spins for some time before a rank sleeps."""
        from aiocomms.arguments import COMM_TIMEOUT, TIMEOUT_MAX
        from aiocomms.live.lane import Partial

        module = native()
        if (words := tensor_words.find()) is not None:
            module.read_words_at(*words)
        made: Shortcut = module.LaneRounds(
            words=self._words,
            first=register_of(lane, 0),
            places=place_of(0),
            sleepers=_sleepers(0),
            rank=rank,
            size=size,
            most_ranks=MOST_RANKS,
            holder=holder,
            areas=self._bytes.data_ptr() + self._begin(area_of(lane, 0, 0, size)),
            stride=_stride(self._capacity),
            most=min(LONG, self._capacity),
            partial=Partial,
            like=buffers.like,
            unset=COMM_TIMEOUT,
            longest=TIMEOUT_MAX,
        )
        return made

    async def changed(self, register: int, held: int, ends: float) -> bool:
        """See :class:`aiocomms.live.registers.Registers`."""
        bell = self._bells.setdefault(register, Bell(self._driver))
        self._sleep(register, True)  # A rank looks for sleepers after a change, so no change is missed.
        try:
            with anyio.move_on_after(ends - clock.now()):
                if self._words.load(register) == held:
                    await bell
        finally:
            self._sleep(register, False)
        return clock.now() < ends

    def _sleep(self, register: int, sleeps: bool) -> None:
        if self._fd < 0:
            return
        at, bit = _sleepers(register), 1 << self._rank
        held = self._words.load(at)
        while bool(held & bit) != sleeps and (found := self._words.swap(at, held, held ^ bit)) != held:
            held = found

    async def tell(self, register: int | None) -> None:
        """See :class:`aiocomms.live.registers.Registers`."""
        asleep = _ALL if register is None else self._words.load(_sleepers(register))
        said = _NUMBER.pack(_ALL if register is None else register)
        for rank in range(self._size):
            if asleep >> rank & 1 and rank != self._rank:
                # A dead rank needs no datagram, and a rank with a full queue wakes anyway.
                with contextlib.suppress(OSError):
                    self._socket.sendto(said, self._name + str(rank))

    def alive(self, holder: int) -> bool:
        """See :class:`aiocomms.live.registers.Registers`."""
        if holder not in self._living:
            self._living[holder] = self._watched(holder)
        return self._living[holder] is not None

    def _watched(self, holder: int) -> int | None:
        try:
            fd = process_descriptor(holder % (1 << PROCESS_BITS))
        except ProcessLookupError:
            return None
        if fd is None:
            return _UNWATCHED
        self._driver.watch(fd, functools.partial(self._died, holder, fd))
        return fd

    def _died(self, holder: int, fd: int) -> None:
        self._living[holder] = None
        self._driver.unwatch(fd)
        os.close(fd)
        self._ring(_ALL)

    def _heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while said := self._socket.recv(16):
                self._ring(_NUMBER.unpack(said)[0] if len(said) == _NUMBER.size else _ALL)

    def _ring(self, number: int) -> None:
        for register in list(self._bells) if number == _ALL else [number]:
            if (bell := self._bells.get(register)) is not None:
                bell.ring()

    def close(self) -> None:
        """See :class:`aiocomms.live.registers.Registers`."""
        if self._fd >= 0:
            self._driver.unwatch(self._socket.fileno())
            self._socket.close()
            for fd in self._living.values():
                if fd is not None and fd != _UNWATCHED:
                    self._driver.unwatch(fd)
                    os.close(fd)
            self._living.clear()
            os.close(self._fd)
            self._fd = -1
            del self._words, self._memory, self._bytes  # Only results that are being made still map the memory.
            self._ring(_ALL)

    def _begin(self, area: int) -> int:
        return _AREAS + area * _stride(self._capacity)


def _stride(capacity: int) -> int:
    return _HEAD + (capacity + _HEAD - 1) // _HEAD * _HEAD


def _sleepers(register: int) -> int:
    return place_of(MOST_RANKS) + register
