"""The formation of a live group.

The processes agree on the memory that they share. Then each process claims a rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, Self, TypeVar

from torch.distributed import HashStore, PrefixStore, Store

from aiocomms.arguments import FORMING
from aiocomms.bootstrap import supervised
from aiocomms.communicator.formation import launched
from aiocomms.errors import ArgumentError, CommError, CommTimeoutError
from aiocomms.live import shared
from aiocomms.live.group import LiveGroup
from aiocomms.live.lane import LivePlace
from aiocomms.live.registers import LEFT, Registers, place_of
from aiocomms.live.rounds import MOST_RANKS
from aiocomms.live.shared import SharedRegisters
from aiocomms.live.stored import StoreRegisters
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.hosts import PROCESS_BITS, host_id, process_number
from aiocomms.lowlevel.libraries import native
from aiocomms.lowlevel.stores import admitting, store_errors
from aiocomms.lowlevel.threads import run_in_thread

_STORE: Final = "store"
"""The value that stands for a group whose ranks use the store and no shared memory.

The ranks agree either on this value, or on the ID of the host on which they share memory.
"""
_PAUSE: Final = 0.01
"""The seconds between two requests to the store."""
_SALT_BITS: Final = 17

_T = TypeVar("_T")


async def form(
    name: str, store: Store | None, rank: int | None, size: int | None, timeout: float, capacity: int
) -> LiveGroup:
    """Join a live group as one rank; see :class:`aiocomms.live_group` for the parameters."""
    seconds = min(timeout, FORMING)
    if rank is None or size is None:
        store, rank, size = await launched(name, seconds)
    try:
        if size > MOST_RANKS:
            raise ArgumentError(f"size is {size}, wanted at most {MOST_RANKS}")
        place = LivePlace(name, rank, size, timeout, capacity)
        async with contextlib.AsyncExitStack() as kept:
            await kept.enter_async_context(admitting(store))  # A process may take a place at any time.
            meeting = LiveMeeting(PrefixStore(f"aiocomms/live/{name}", store or HashStore()), place, seconds)
            try:
                fd = await run_in_thread(meeting.meet)
            except BaseException:
                meeting.give_up()
                raise
            registers = _registers(meeting.store, fd, place)
            kept.callback(registers.close)
            holder = await _take(registers, rank)
            supervised.report_formed(rank, size, name, 1)
            return LiveGroup(place, registers, holder, kept.pop_all())
    except CommError as error:
        raise error.about(comm=name, op="live_group", rank=rank) from error.__cause__
    except OSError as error:
        why = (
            f"capacity is {capacity}, and the memory for {size} such contributions in each lane cannot be had: {error}"
        )
        raise ArgumentError(why, comm=name, op="live_group", rank=rank) from error


def _registers(store: Store, fd: int | None, place: LivePlace) -> Registers:
    if fd is None:
        return StoreRegisters(store)
    try:
        return SharedRegisters(fd, place.rank, place.size, place.capacity)
    except BaseException:
        os.close(fd)
        raise


async def _take(registers: Registers, rank: int) -> int:
    """Claim a rank, and return the number with which this process claims the rank.

    The shared register of the rank contains this number while this process has the rank.

    :raises ArgumentError: another live process already has this rank.
    """
    salt = int.from_bytes(clock.token_bytes(4), "little") % (1 << _SALT_BITS)
    mine = salt << PROCESS_BITS | process_number(os.getpid())  # A process may have several places.
    if clock.simulation is not None:
        mine = 2 + int.from_bytes(clock.token_bytes(7), "little")
    held = await registers.load(place_of(rank))
    while True:
        if held not in (0, LEFT) and isinstance(registers, SharedRegisters) and registers.alive(held):
            raise ArgumentError(f"rank is {rank}, which another live process has already")
        if (found := await registers.swap(place_of(rank), held, mine)) == held:
            await registers.tell(None)  # The other ranks no longer wait for the former process.
            return mine
        held = found


class Opened(NamedTuple):
    """The record of a process that has opened the memory. Other processes open the file descriptor in this record."""

    pid: int
    holder: int
    fd: int
    inode: int

    @classmethod
    def here(cls, fd: int) -> Self:
        """Return the record of this process.

        :param fd: the file descriptor of the memory in this process.
        """
        return cls(os.getpid(), process_number(os.getpid()), fd, os.fstat(fd).st_ino)

    @classmethod
    def listed(cls, text: str) -> list[Self]:
        """Decode a list of records with one record per line."""
        return [cls(*map(int, line.split(","))) for line in text.split()]

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @property
    def lives(self) -> bool:
        """True if the recorded process is alive."""
        return process_number(self.pid) == self.holder

    def opened(self) -> int | None:
        """Open the memory of the recorded process, and return a file descriptor.

        :raises ArgumentError: another user runs the recorded process.
        """
        try:
            if not self.lives:
                return None
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except PermissionError:
            raise ArgumentError(f"the group's memory is that of process {self.pid}, which another user runs") from None
        except OSError:
            return None
        if os.fstat(fd).st_ino == self.inode:
            return fd
        os.close(fd)
        return None


class LiveMeeting:
    """The actions of one process in the formation of the group. These actions run in a thread, because they block."""

    def __init__(self, store: Store, place: LivePlace, seconds: float) -> None:
        self.store, self._place = store, place
        self._seconds, self._ends = seconds, clock.now() + seconds
        self._lock = threading.Lock()
        self._given_up, self._fd = False, -1

    def give_up(self) -> None:
        """Close the memory that the thread has opened or will open, because the call was cancelled or failed."""
        with self._lock:
            self._given_up = True
            if self._fd >= 0:
                os.close(self._fd)

    @store_errors("the store of the group is lost")
    def meet(self) -> int | None:
        """Wait for the other ranks, and open the memory.

        :returns: a file descriptor of the shared memory; None if the ranks use the store and no shared memory.

        :raises ArgumentError: the ranks have passed different arguments, or the other ranks share memory that this
            process cannot open.
        :raises CommTimeoutError: a rank has not joined before the deadline.
        :raises OSError: the memory is not available.
        """
        mine = f"{self._place.size} {self._place.capacity}"
        theirs = self.store.compare_set("arguments", "", mine).decode()
        if theirs != mine:
            raise ArgumentError(f"size and capacity are {mine}, and those of another rank {theirs}")
        here = _STORE if native() is None else host_id(*sorted(os.listdir("/proc/self/ns")))  # noqa: PTH208
        self.store.set(f"host/{self._place.rank}", here)
        where = self._until(self._agreed, self._absent)
        if where == _STORE:
            return None
        if where != here:
            raise ArgumentError(f"the group has its memory on host {where}, and this process is on {here}")
        fd = self._memory()
        with self._lock:
            self._fd = fd
            if self._given_up:
                os.close(fd)
        return fd

    def _until(self, look: Callable[[], _T | None], late: Callable[[], str]) -> _T:
        while True:
            found = look()
            if found is not None:
                return found
            if clock.now() > self._ends:
                raise CommTimeoutError(f"{late()}, within {self._seconds:g} s")
            clock.sleep(_PAUSE)

    # ------------------------------------------------------------------------------------------------- choice of memory

    def _hosts(self) -> list[str]:
        return [f"host/{rank}" for rank in range(self._place.size)]

    def _agreed(self) -> str | None:
        if self.store.check(["where"]):
            return str(self.store.get("where").decode())
        if not all(self.store.check([key]) for key in self._hosts()):
            return None
        hosts = {self.store.get(key).decode() for key in self._hosts()}
        wanted = hosts.pop() if len(hosts) == 1 else _STORE
        return str(self.store.compare_set("where", "", wanted).decode())

    def _absent(self) -> str:
        absent = [rank for rank, key in enumerate(self._hosts()) if not self.store.check([key])]
        return f"ranks {absent} have not joined"

    # ---------------------------------------------------------------------------------------------------- shared memory

    def _memory(self) -> int:
        """Open the memory that live processes of the group have opened.

        If no live process has opened the memory, make new memory. One key of the store lists the processes that have
        opened the memory. The key changes only by compare-and-set, so the group has only one memory at a time.
        """
        listed = self.store.compare_set("memory", "", "").decode()
        while True:
            living = [it for it in Opened.listed(listed) if it.lives]
            fd = next((fd for it in living if (fd := it.opened()) is not None), None)
            if fd is None:
                living, fd = [], shared.new_memory(self._place.size, self._place.capacity)
            wanted = "\n".join(map(str, [*living, Opened.here(fd)]))
            now = self.store.compare_set("memory", listed, wanted).decode()
            if now == wanted:
                return fd
            os.close(fd)
            listed = now
