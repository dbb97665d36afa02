"""An endpoint: where a process is reached by others that have its address, and what it opens to them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from math import inf
from threading import get_ident
from typing import Any, Self

import torch

from aiocomms.bootstrap.registry import Selection, advice, choose
from aiocomms.bootstrap.rendezvous import FORMING
from aiocomms.communicator.opening import Opening, device_of
from aiocomms.core.leak_guard import LeakGuard
from aiocomms.endpoints.connections import Connections
from aiocomms.endpoints.credentials import Address, Descriptor, check_descriptor, expiry, new_key
from aiocomms.endpoints.peer import Peer
from aiocomms.endpoints.reception import Reception
from aiocomms.endpoints.regions import REVOKED, Region
from aiocomms.errors import ArgumentError, CommClosedError, CommError, RegionError, wrong_thread
from aiocomms.lowlevel import LOOPBACK
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import TensorLike, checks
from aiocomms.ops.arrays import fitting
from aiocomms.ops.checks import COMM_TIMEOUT, OpTimeout, Timeout
from aiocomms.progress.driver import LoopDriver, Promise


class open_endpoint(Opening["Endpoint"]):  # noqa: N801 - it is called like a function, as new_comm is
    """Open an endpoint, by whose address other processes connect with this one: no ranks, no store, no launcher.

    Await it for an :class:`Endpoint`, or use it as ``async with open_endpoint(...) as here:``, which closes it.

    :param transport: a transport's name; ``"auto"`` for the best that is available; or a name for each of some of the
        families ``"collectives"``, ``"p2p"`` and ``"rma"``. The same on all endpoints that connect.
    :param device: the device of all tensors.
    :param host: the address of this host at which others connect. By default only processes of this host do. Where
        other hosts can, the job must have a token.
    :param lifetime: the seconds for which others may connect by its address; None: as long as it is open.
    :param name: what it is called in errors.
    :param timeout: the deadline in seconds for connecting, and afterwards that of ops that are given none. None: these
        have no deadline, and connecting has 600 s.
    :param hints: advice to the transports, and ``"heartbeat"``, as for :func:`aiocomms.new_comm`.
    :raises ArgumentError: an argument is wrong.
    :raises UnsupportedOperation: the transport is not available; says why, and what else there is.
    """

    _example = "here = await open_endpoint(...)"

    def __init__(
        self,
        transport: str | Mapping[str, str] = "auto",
        device: str | torch.device = "cpu",
        *,
        host: str = LOOPBACK,
        lifetime: Timeout = None,
        name: str = "endpoint",
        timeout: Timeout = FORMING,
        hints: Mapping[str, Any] | None = None,
    ) -> None:
        self._transport, self._device = transport, device_of(device)
        if not isinstance(host, str):
            raise checks.wrong_type("host", host, "an address of this host as a str")
        self._options = advice(hints)
        self._where = host, expiry("lifetime", lifetime), checks.label(name), checks.deadline("timeout", timeout)

    async def _open(self) -> Endpoint:
        return Endpoint(choose(self._transport, self._device, 2, self._options), self._device, *self._where)


class _Alone:
    """What the checks of tensors look at: no communicator, but its device."""

    rank, size = 0, 1
    fast_check: Callable[[object, bool], bool] | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Endpoint(Handle):
    """Where this process is reached by others that have its address; made by :func:`aiocomms.open_endpoint`.

    It belongs to the event loop, thread and process that made it. Nothing wakes up for it while nobody knocks.
    """

    name: str
    device: torch.device

    def __init__(
        self, plan: Selection, device: torch.device, host: str, expires: float, name: str, timeout: float
    ) -> None:
        self.name, self.device = name, device
        self._alone = _Alone(device)
        self._thread, self._seconds, self._key = get_ident(), timeout, new_key()
        self._numbers = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._closed: Promise | None = None
        self._driver = LoopDriver.current()
        self._reception = Reception(host, self._driver)
        self._address = Address(
            secrets.token_bytes(16), self._reception.host, self._reception.port,
            {str(family): transport for family, transport in plan.names.items()}, str(device), expires,
        )  # fmt: skip
        self._connections = Connections(self._address, name, device, plan, timeout, self._grant)
        self._reception.open(self._address.secret("connect"), self._connections.let_in)
        self._guard = LeakGuard(self)

    def __repr__(self) -> str:
        state = " (closed)" if self.closed else ""
        return f"<Endpoint '{self.name}' {self._address.name} at {self._address.host}:{self._address.port}{state}>"

    @property
    def address(self) -> bytes:
        """What others connect by: at most 1,024 bytes, signed with the job's token if it has one."""
        return self._address.pack()

    @property
    def peers(self) -> Sequence[Peer]:
        """The endpoints that this one is connected with."""
        return self._connections.peers

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed is not None

    async def connect(self, address: bytes, *, timeout: OpTimeout = COMM_TIMEOUT) -> Peer:
        """Connect with another endpoint, or find that this one is connected with it.

        :param address: that endpoint's.
        :param timeout: the deadline in seconds, None for 600; by default the endpoint's.
        :raises ArgumentError: it is no address, is this endpoint's own, or has expired; nothing was sent.
        :raises AuthError: it was not made with this job's token, or who answers there does not have that.
        :raises MismatchError: that endpoint has another transport or device.
        :raises PeerDiedError: nobody listens there any more.
        :raises CommTimeoutError: it took too long.
        :raises CommClosedError: this endpoint is closed.
        """
        self._check("connect")
        try:
            seconds = checks.op_deadline(timeout, self._seconds)
            return await self._connections.connect(address, FORMING if seconds == inf else seconds)
        except CommError as error:
            raise error.about(comm=self.name, op="connect") from error.__cause__

    async def accept(self) -> Peer:
        """Wait for the next endpoint that connects to this one. Each is handed out once, also if it is known already.

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
        """Open memory of this process to whoever is given its descriptor and is connected with this endpoint.

        :param tensor: the memory: a contiguous tensor of any shape and dtype. When the region is first opened its
            storage may be moved to memory that processes share, in place, so that it and its views go on being the
            same. No other thread may use it meanwhile; what is shared already (``share_memory_()``) stays.
        :param read: whether others may read it.
        :param write: whether others may write it.
        :param lifetime: the seconds for which they may; None: until it is revoked.
        :raises ArgumentError: an argument is wrong.
        """
        self._check("register")
        try:
            memory = fitting("tensor", tensor, self.device, write=True)
            checks.writable("tensor", memory, self._alone)
            for name, value in (("read", read), ("write", write)):
                if not isinstance(value, bool):
                    raise checks.wrong_type(name, value, "a bool")
            if not (read or write):
                raise ArgumentError("read and write are both False, wanted at least one of them")
            expires = expiry("lifetime", lifetime)
        except CommError as error:
            raise error.about(comm=self.name, op="register") from None
        number = next(self._numbers)
        says = Descriptor(self._address.endpoint, number, str(memory.dtype), memory.numel(), read, write, expires)
        region = Region(tensor, memory, says, self._key, lambda: self._regions.pop(number, None))
        self._regions[number] = region
        return region

    async def aclose(self) -> None:
        """Close it: every connection, and what listens. Idempotent.

        :raises RuntimeError: this is not the endpoint's thread.
        """
        if get_ident() != self._thread:
            raise wrong_thread(f"aclose on '{self.name}'")
        if self._closed is not None:
            return await self._closed
        self._closed = Promise(self._driver)
        try:
            self._reception.close()
            await self._connections.close(CommClosedError("the endpoint is closed"))
        finally:
            self._regions.clear()
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
        """Disown the endpoint in a forked child."""
        self._closed = Promise(self._driver)
        self._closed.set()
        self._connections.disown()

    def _grant(self, descriptor: bytes) -> Region:
        """Return the region that another endpoint may use by a descriptor.

        :raises RegionError: it may not.
        """
        region = self._regions.get(check_descriptor(descriptor, self._key).number)
        if region is None:
            raise RegionError(REVOKED)
        return region

    def _check(self, op: str) -> None:
        if get_ident() != self._thread:
            raise wrong_thread(f"{op} on '{self.name}'")
        if self._closed is not None:
            raise CommClosedError("the endpoint is closed", comm=self.name, op=op)
