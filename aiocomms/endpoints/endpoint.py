"""Endpoints, to which other processes connect to use regions and pools of this process's memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from math import inf
from threading import get_ident
from typing import Any, Self

import torch

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, FORMING, UNNAMED, OpTimeout, Timeout
from aiocomms.bootstrap.registry import Selection, choose
from aiocomms.communicator.formation import settled
from aiocomms.core.leak_guard import LeakGuard
from aiocomms.endpoints.connections import Connections
from aiocomms.endpoints.credentials import LONGEST_LABEL, Address, Descriptor, check_descriptor, expiry, new_key
from aiocomms.endpoints.handed import HandedLeases
from aiocomms.endpoints.handovers import Counter
from aiocomms.endpoints.peer import Peer
from aiocomms.endpoints.pools import Pool
from aiocomms.endpoints.regions import REVOKED, Region
from aiocomms.errors import (
    ArgumentError,
    CommClosedError,
    CommError,
    RegionError,
    UnsupportedOperation,
    wrong_thread,
)
from aiocomms.lowlevel import clock, run_in_thread
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.hosts import this_process
from aiocomms.lowlevel.lines import Reception, ReceptionDriver
from aiocomms.lowlevel.wires import wires
from aiocomms.ops import TensorLike, checks
from aiocomms.ops.arrays import fitting
from aiocomms.progress.driver import LoopDriver, Promise


async def opened(
    transport: str | Mapping[str, str], device: str | torch.device, hints: Mapping[str, Any],
    host: str, lifetime: float, name: str, timeout: float,
) -> Endpoint:  # fmt: skip
    """Open an endpoint; see :class:`aiocomms.open_endpoint` for the parameters."""
    expires, where = expiry("lifetime", None if lifetime == inf else lifetime), await settled(device)
    plan = await run_in_thread(functools.partial(choose, transport, where, 2, hints), anyhow=True)
    listen = await run_in_thread(lambda: wires().find(host), anyhow=True)
    process = await run_in_thread(this_process, anyhow=True)
    return Endpoint(plan, where, listen, expires, name, timeout, process)


class _Alone:
    """A substitute for a communicator in the checks of tensors. The checks use only the communicator's device."""

    rank, size = 0, 1
    fast_check: Callable[[object, bool], bool] | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Endpoint(Handle):
    """An object with an address to which other processes connect; made by :func:`aiocomms.open_endpoint`.

    Only the event loop, thread and process that made the endpoint may use it. The endpoint wakes the event loop only
    when another endpoint connects.
    """

    name: str
    device: torch.device

    def __init__(
        self, plan: Selection, device: torch.device, listen: Callable[[ReceptionDriver], Reception],
        expires: float, name: str, timeout: float, process: tuple[str, int],
    ) -> None:  # fmt: skip
        self.name, self.device = name, device
        self._alone = _Alone(device)
        self._thread, self._seconds, self._key = get_ident(), timeout, new_key()
        self._numbers = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._closed: Promise | None = None
        self._driver = LoopDriver.current()
        self._reception = listen(self._driver)
        self._address = Address(
            clock.token_bytes(16), self._reception.host, self._reception.port,
            {str(family): transport for family, transport in plan.names.items()}, str(device), expires,
            "" if name == UNNAMED else name[:LONGEST_LABEL],
        )  # fmt: skip
        self._counter = Counter(self._driver, *process)
        self._pools: list[Pool] = []
        self._connections = Connections(self._address, name, device, plan, timeout, self._grant, self._counter)
        self._reception.open(self._address.secret("connect"), self._connections.let_in)
        self._guard = LeakGuard(self)

    def __repr__(self) -> str:
        state = " (closed)" if self.closed else ""
        where = self._address
        return f"<Endpoint '{self.name}' {where.endpoint.hex()[:8]} at {where.host}:{where.port}{state}>"

    @property
    def address(self) -> bytes:
        """The address to which other endpoints connect: at most 1,024 bytes, signed with the job's token, if any."""
        return self._address.pack()

    @property
    def peers(self) -> Sequence[Peer]:
        """The connected endpoints."""
        return self._connections.peers

    @property
    def closed(self) -> bool:
        """True once :meth:`aclose` was called."""
        return self._closed is not None

    async def connect(self, address: bytes, *, timeout: OpTimeout = COMM_TIMEOUT) -> Peer:
        """Connect to another endpoint, or return the existing connection to it.

        :param address: the address of the other endpoint.
        :param timeout: the deadline in seconds; None: 600 s. The default is the endpoint's timeout.
        :raises ArgumentError: ``address`` is no address, is this endpoint's own, or has expired; nothing was sent.
        :raises AuthError: the address was not made with this job's token, or the process there has another token.
        :raises MismatchError: the other endpoint has another transport or device.
        :raises PeerDiedError: no endpoint listens at the address any more.
        :raises CommTimeoutError: the deadline has passed.
        :raises CommClosedError: this endpoint is closed.
        """
        self._check("connect")
        try:
            seconds = arguments.op_deadline(timeout, self._seconds)
            return await self._connections.connect(address, FORMING if seconds == inf else seconds)
        except CommError as error:
            raise error.about(comm=self.name, op="connect") from error.__cause__

    async def accept(self) -> Peer:
        """Wait for the next endpoint that connects to this endpoint.

        The method returns each connection once, even if :meth:`connect` has also returned the connection.

        :raises CommClosedError: this endpoint is closed.
        """
        self._check("accept")
        try:
            return await self._connections.accept()
        except CommError as error:
            raise error.about(comm=self.name, op="accept") from None

    def register(
        self, tensor: TensorLike, *, read: bool = True, write: bool = True, lifetime: Timeout = None
    ) -> Region:
        """Make a region: memory of this process that connected endpoints may access with the region's descriptor.

        :param tensor: the memory: a contiguous tensor of any shape and dtype. When an endpoint first opens the region,
            the transport may move the tensor's storage to shared memory. The tensor and its views stay valid. No other
            thread may use the tensor during the move. Memory that is already shared (``share_memory_()``) is not moved.
        :param read: whether other endpoints may read the region.
        :param write: whether other endpoints may write the region.
        :param lifetime: the seconds for which other endpoints may use the region; None: until the region is revoked.
        :raises ArgumentError: an argument is wrong.
        """
        self._check("register")
        try:
            return self._registered(tensor, read, write, lifetime)
        except CommError as error:
            raise error.about(comm=self.name, op="register") from None

    def _registered(self, tensor: TensorLike, read: bool, write: bool, lifetime: Timeout) -> Region:
        memory = fitting("tensor", tensor, self.device, write=True)
        checks.writable("tensor", memory, self._alone)
        for name, value in (("read", read), ("write", write)):
            if not isinstance(value, bool):
                raise arguments.wrong_type(name, value, "a bool")
        if not (read or write):
            raise ArgumentError("read and write are both False, wanted at least one of them")
        expires = expiry("lifetime", lifetime)
        number = next(self._numbers)
        says = Descriptor(self._address.endpoint, number, str(memory.dtype), memory.numel(), read, write, expires)
        region = Region(tensor, memory, says, self._key, lambda: self._regions.pop(number, None))
        self._regions[number] = region
        return region

    def new_pool(self, tensor: TensorLike) -> Pool:
        """Make a pool of memory blocks of equal size. Tasks lease blocks, and hand them over to other endpoints.

        :param tensor: the memory, of shape ``[blocks, ...]`` with at least two dimensions. The conditions for
            ``tensor`` in :meth:`register` also apply here.
        :raises ArgumentError: the tensor is not as described above, or has no elements.
        :raises UnsupportedOperation: the endpoint's device is a GPU.
        """
        self._check("new_pool")
        try:
            if self.device.type != "cpu":
                raise UnsupportedOperation(f"pools are on the CPU, and this endpoint's tensors on {self.device}")
            region = self._registered(tensor, read=True, write=True, lifetime=None)
            memory = region._memory
            if memory.dim() < 2 or not memory.numel():
                self._regions.pop(region._number)
                raise ArgumentError(f"tensor is {arguments.describe(memory)}, wanted [blocks, ...] with elements")
            self._counter.ledger.open(self.register)
        except CommError as error:
            raise error.about(comm=self.name, op="new_pool") from None
        pool = Pool(region, self._counter.ledger, self._driver, self._seconds, self.name)
        self._pools.append(pool)
        return pool

    def handed(self) -> HandedLeases:
        """Return an iterator of the leases that other endpoints hand over to this endpoint, in the order of arrival.

        Several tasks may run the loop ``async for handed in here.handed():``. Each lease goes to one of these tasks.
        The loops end when this endpoint is closed. The iterator skips a lease if the owner has taken the lease back, or
        if the connection with the owner is over. An owner has at most 1,024 pending hand-overs. If no task takes a
        lease, the owner takes the lease back at the deadline of the hand-over.
        """
        return HandedLeases(self._counter)

    async def aclose(self) -> None:
        """Close the endpoint: stop listening, and close all connections. Idempotent.

        :raises RuntimeError: the caller is not on the endpoint's thread.
        """
        if get_ident() != self._thread:
            raise wrong_thread(f"aclose on '{self.name}'")
        if self._closed is not None:
            return await self._closed
        self._closed = Promise(self._driver)
        try:
            self._reception.close()
            for pool in self._pools:
                pool._close()
            await self._connections.close(CommClosedError("the endpoint is closed"))
        finally:
            self._counter.close()
            self._regions.clear()
            self._pools.clear()
            self._guard.dismiss()
            self._closed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for peer in self.peers:
                peer.abort(error)
        await self.aclose()

    def _disown(self) -> None:
        """Mark the endpoint as unusable in a forked child, which must neither use nor close its parent's sockets."""
        self._closed = Promise(self._driver)
        self._closed.set()
        self._connections.disown()

    def _grant(self, descriptor: bytes) -> Region:
        """Return the region to which a descriptor belongs.

        :raises RegionError: the descriptor is not valid, the region is revoked, or its memory was freed or resized.
        """
        region = self._regions.get(check_descriptor(descriptor, self._key).number)
        if region is None:
            raise RegionError(REVOKED)
        if not checks.has_memory(region._memory):
            raise RegionError("its owner has freed or resized the memory of the region")
        return region

    def _check(self, op: str) -> None:
        if get_ident() != self._thread:
            raise wrong_thread(f"{op} on '{self.name}'")
        if self._closed is not None:
            raise CommClosedError("the endpoint is closed", comm=self.name, op=op)
