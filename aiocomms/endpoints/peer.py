"""The other endpoint, as one that is connected with it sees it."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self, TypeVar, overload

import anyio
import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.rma import Window
from aiocomms.communicator.streams import ItemStream, TensorStream
from aiocomms.core.core import CLOSE_GRACE
from aiocomms.diagnosis.statistics import Statistics
from aiocomms.endpoints.attachments import Attachments
from aiocomms.endpoints.credentials import Address, Descriptor, expired, read_descriptor
from aiocomms.endpoints.handovers import Counter, HandOvers
from aiocomms.endpoints.pools import Lease
from aiocomms.endpoints.regions import Region, RemoteRegion
from aiocomms.endpoints.words import OfLeases
from aiocomms.errors import CommAbortedError, CommClosedError, CommError, CommTimeoutError, RegionError, closed_by
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.shielding import shielded
from aiocomms.ops import TensorLike, buffers
from aiocomms.progress.driver import Promise
from aiocomms.progress.hooks import Hook
from aiocomms.progress.work import Work

Given = TypeVar("Given", bound=TensorLike)
T = TypeVar("T")
_LEFT: Final = "the other endpoint has closed the connection"
_RANK: Final = re.compile(r"\brank ([01])\b(?: of 2\b)?")


class End(enum.Enum):
    """The end of a connection."""

    CLOSED = enum.auto()
    """The connection was closed on this side; everything is released."""
    LEFT = enum.auto()
    """The other side has closed the connection."""
    LOST = enum.auto()


class Peer(Handle):
    """Another endpoint that this one is connected with; made by :meth:`Endpoint.connect` and :meth:`Endpoint.accept`.

    The two are a communicator of two ranks, with its deadlines, errors, records and rules: what ends it ends nothing of
    any other peer. ``async with`` closes the connection.
    """

    _signals: Window

    def __init__(
        self,
        comm: Communicator,
        address: Address,
        grant: Callable[[bytes], Region],
        ended: Callable[[Peer, End], object],
        counter: Counter,
        earlier: Callable[[Peer], Awaitable[None]],
        endpoint: str,
    ) -> None:
        """Begin with a communicator of two.

        :param counter: this endpoint's.
        :param earlier: waits until this end of each earlier connection with that endpoint is closed.
        :param endpoint: the name of this endpoint.
        """
        self._comm, self._address, self._ended = comm, address, ended
        self._where = f"{endpoint}, peer {address.name}"
        comm._core.worded = self._worded
        self._counter = counter
        self._attachments = Attachments(comm, grant, self._left, self._hear_of_leases)
        self._hand_overs = HandOvers(
            counter, self, comm._core.driver, address.endpoint, self._attachments.say, self._arrived,
            lambda: earlier(self), comm._core.lose,
        )  # fmt: skip
        self._released = Promise(comm._core.driver)
        """The promise that is set once this end of the connection is closed."""
        self._other = 1 - comm.rank
        self._over, self._why = Promise(comm._core.driver), CommClosedError("the connection was closed")
        self._remotes: dict[bytes, RemoteRegion] = {}
        """The regions that are open, by their descriptors."""
        comm.register_abort_hook(self._lost)

    def __repr__(self) -> str:
        return f"<Peer {self.name} of {self._comm!r}>"

    async def _begin(self) -> None:
        """Meet the other end, so that each hears all that the other one says from now on."""
        # The window for signals has one element: signals of an empty one would not come behind what was put.
        memory = buffers.zeros(1, dtype=torch.uint8, device=self._comm.device)
        self._signals = await self._comm._begin_window(memory, name="")
        # The other end has taken part, and so it hears from now on what is said.
        self._attachments.say_here(self._counter.place, self._counter.process)
        self._hand_overs.begin()

    @property
    def name(self) -> str:
        """The name that the other endpoint was opened with and the beginning of its number, as ``decode@1f60c2b7``.

        Of an endpoint without a name it is these 8 hexadecimal digits alone.
        """
        return self._address.name

    @property
    def address(self) -> bytes:
        """The other endpoint's address, as it has given it when they connected."""
        return self._address.pack()

    @property
    def transports(self) -> dict[str, str]:
        """The name of the transport that carries each family."""
        return self._comm.transports

    @property
    def closed(self) -> bool:
        """True once the connection is over: closed on either side, or lost.

        Where the other side has closed it, messages that it had sent by then can still be received.
        """
        return self._over.is_set

    def statistics(self) -> Statistics:
        """Return what the connection is doing and has done at this end; see :meth:`Communicator.statistics`.

        Its windows are the regions that are open: ``bytes`` of this endpoint's, ``peer_bytes`` of the other one's.
        """
        return self._comm.statistics()

    # ------------------------------------------------------------------------------------------------------ messages

    def send(
        self, tensor: Given, tag: int = 0, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Work[Given]:
        """Send a tensor; see :meth:`Communicator.send`."""
        return self._comm.send(tensor, self._other, tag, hints=hints, timeout=timeout)

    def recv(
        self, tensor: Given, tag: int = 0, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Work[Given]:
        """Receive a tensor; see :meth:`Communicator.recv`."""
        return self._comm.recv(tensor, self._other, tag, hints=hints, timeout=timeout)

    def send_object(
        self,
        obj: Any,
        tag: int = 0,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[None]:
        """Send an object; see :meth:`Communicator.send_object`."""
        return self._comm.send_object(obj, self._other, tag, pickle=pickle, hints=hints, timeout=timeout)

    def recv_object(
        self,
        tag: int = 0,
        *,
        pickle: bool = False,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Any]:
        """Receive an object; see :meth:`Communicator.recv_object`."""
        return self._comm.recv_object(self._other, tag, pickle=pickle, hints=hints, timeout=timeout)

    @overload
    async def open_stream(
        self, capacity: int = 8, name: str = "", *, capacity_bytes: int | None = None
    ) -> TensorStream: ...

    @overload
    async def open_stream(
        self, capacity: int = 8, name: str = "", *, items: type[T], capacity_bytes: int | None = None
    ) -> ItemStream[T]: ...

    async def open_stream(
        self, capacity: int = 8, name: str = "", *, items: Any = Tensor, capacity_bytes: int | None = None
    ) -> ItemStream[Any]:
        """Open a stream to the other endpoint, which opens one, too; see :meth:`Communicator.open_stream`."""
        return await self._comm.open_stream(self._other, capacity, name, items=items, capacity_bytes=capacity_bytes)

    # ------------------------------------------------------------------------------------------------------- regions

    async def attach(self, descriptor: bytes, *, timeout: OpTimeout = COMM_TIMEOUT) -> RemoteRegion:
        """Open a region of the other endpoint; the same one again where it is open.

        :param descriptor: what :attr:`Region.descriptor` says there.
        :param timeout: the deadline in seconds, None for no deadline; by default the endpoint's.
        :raises ArgumentTypeError: it is not bytes.
        :raises RegionError: the other endpoint has not made it, or has revoked it; it was changed, or has expired.
        :raises CommTimeoutError: the other endpoint has not answered by then; the connection stays usable.
        :raises CommError: the connection is lost or closed.
        """
        self._attachments.check_thread("attach")
        try:
            seconds = arguments.op_deadline(timeout, self._comm._seconds)
            says = self._checked(descriptor)
            with anyio.move_on_after(seconds) as late:
                key = bytes(descriptor)
                attachment = await self._attachments.attach(key, says)
            if late.cancelled_caught:
                raise CommTimeoutError(f"the other endpoint has not opened the region within {seconds:g} s")
        except CommError as error:
            raise error.about(comm=self._where, op="attach") from error.__cause__
        remote = self._remotes.get(key)
        if remote is None or not remote._is_of(attachment):
            self._remotes = {of: it for of, it in self._remotes.items() if not it.closed or not it._settled}
            remote = self._remotes[key] = RemoteRegion(says, attachment, self._attachments.close)
        return remote

    async def _attached(self, descriptor: bytes, timeout: OpTimeout) -> tuple[RemoteRegion, OpTimeout]:
        """Return the region, and what is left of a deadline."""
        remote = self._remotes.get(descriptor) if type(descriptor) is bytes else None
        if remote is not None and not remote.closed:
            return remote, timeout
        began = clock.now()
        remote = await self.attach(descriptor, timeout=timeout)
        if timeout is None or timeout is COMM_TIMEOUT:
            return remote, timeout
        return remote, max(0.001, arguments.deadline("timeout", timeout) - (clock.now() - began))

    async def put(
        self, tensor: Given, descriptor: bytes, offset: int = 0, *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Given:
        """Write a tensor into a region: :meth:`attach`, if that is not done, and :meth:`RemoteRegion.put`.

        :returns: ``tensor``, which may be changed again.
        :raises CommError: as these two do.
        """
        remote, left = await self._attached(descriptor, timeout)
        return await remote.put(tensor, offset, timeout=left)

    async def get(
        self, tensor: Given, descriptor: bytes, offset: int = 0, *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Given:
        """Read from a region into a tensor: :meth:`attach`, if that is not done, and :meth:`RemoteRegion.get`.

        :returns: ``tensor``.
        :raises CommError: as these two do.
        """
        remote, left = await self._attached(descriptor, timeout)
        return await remote.get(tensor, offset, timeout=left)

    async def signal(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Tell the other endpoint that all that was put so far has arrived; it waits by :meth:`wait_signal`.

        :param timeout: the deadline in seconds, None for no deadline; by default the endpoint's.
        :raises CommError: the connection is lost or closed.
        """
        seconds = arguments.op_deadline(timeout, self._comm._seconds)
        with anyio.move_on_after(seconds) as late:
            await self._settle(timeout)
        if late.cancelled_caught:
            raise CommTimeoutError(f"what was put has not arrived within {seconds:g} s", comm=self._where, op="signal")
        await self._signals.signal(self._other, timeout=timeout)

    def wait_signal(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> Work[None]:
        """Wait for one signal of the other endpoint, and consume it; see :meth:`Window.wait_signal`."""
        return self._signals.wait_signal(self._other, timeout=timeout)

    # -------------------------------------------------------------------------------------------------------- leases

    async def hand_over(
        self, lease: Lease, meta: Any = None, *, write: bool = False, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Any:
        """Lend the blocks of a lease to the other endpoint, until that gives them back; see :meth:`Endpoint.handed`.

        Where this raises, or is cancelled, the other endpoint has let go of the blocks by then; or the connection is
        lost, and blocks into which it may still write are :attr:`Pool.held` when the lease ends. It waits up to 5 s
        for that.

        :param lease: a lease of a pool of this endpoint's. It may be handed over several times, also at once.
        :param meta: what the other program is told, as of :meth:`send_object`: 256 KiB at most.
        :param write: the other endpoint is to fill the blocks; else it reads them. Do not use them meanwhile, but for
            reading what is read.
        :param timeout: the seconds until it must have given them back, None for no deadline; by default the
            endpoint's.
        :returns: the other program's answer, as it has called :meth:`HandedLease.give_back`; what it has written is
            there.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises LeaseError: the other program has dropped the blocks; or the lease has ended.
        :raises CommTimeoutError: they were not given back in time, or nobody took them. The connection is lost only if
            the other endpoint did not let go of them either.
        :raises CommError: the connection is lost or closed.
        """
        self._attachments.check_thread("hand_over")
        try:
            seconds = arguments.op_deadline(timeout, self._comm._seconds)
            return await self._hand_overs.hand_over(lease, meta, write, seconds)
        except CommError as error:
            raise error.about(comm=self._where, op="hand_over") from error.__cause__

    async def _arrived(self, descriptor: bytes) -> None:
        """Wait until what was put into a region is visible to its owner."""
        remote = self._remotes.get(descriptor)
        if remote is not None:
            await self._settle_one(*remote._settling(COMM_TIMEOUT))

    # ------------------------------------------------------------------------------------------------------- the end

    def register_abort_hook(self, fn: Callable[[CommError], object]) -> Hook:
        """Have ``fn(error)`` called on the loop's thread when the connection is lost, the other process's death say.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._comm.register_abort_hook(fn if not callable(fn) else lambda error: fn(self._worded(error)))

    async def lost(self) -> CommError:
        """Wait until the connection is lost: a death, an abort, a deadline.

        :returns: why, as :meth:`Communicator.lost` does.
        :raises CommClosedError: it was closed on either side.
        """
        await self._over
        if self._comm.aborted:
            return self._worded(await self._comm.lost())
        raise self._why.about(comm=self._where, op="lost")

    def abort(self, reason: str | BaseException) -> None:
        """Give the connection up, on both sides; see :meth:`Communicator.abort`."""
        self._comm.abort(reason)

    async def aclose(self) -> None:
        """Close the connection: ops under way end, and everything is released. Idempotent.

        The other side can still receive messages whose sends are done.

        :raises CommError: a transport broke while it closed; everything else is released.
        """
        self._attachments.check_thread("aclose")
        # True once all that was put has arrived: the other end may use its memory for something else from then on.
        arrived = self.closed
        try:
            if not arrived:
                self._attachments.stop("the connection was closed")
                with anyio.move_on_after(CLOSE_GRACE), contextlib.suppress(CommError):
                    await self._hand_overs.settle("the connection was closed")
                    await self._settle(COMM_TIMEOUT)
                    arrived = True
                    await self._attachments.settle()
        except anyio.get_cancelled_exc_class():
            # The owner of memory may use it for something else as soon as it has heard of the end.
            await shielded(self._settle_for_a_while)
            raise
        finally:
            if not self._comm.closed and not self._comm.aborted:
                if arrived:
                    self._attachments.say_bye()
                else:
                    self._comm.abort("closed before all that was put had arrived")
            self._end(self._why, End.CLOSED)
            self._remotes.clear()
            await self._release()

    async def _release(self) -> None:
        """Close this end, once both have said of what they were lent that they have let go."""
        try:
            await self._hand_overs.part()
            self._attachments.hear_no_more()
            await self._comm.aclose()
        finally:
            self._hand_overs.close()
            self._released.set()

    async def _settle_for_a_while(self) -> None:
        with anyio.move_on_after(CLOSE_GRACE), contextlib.suppress(CommError):
            await self._settle(COMM_TIMEOUT)

    async def _settle(self, timeout: OpTimeout) -> None:
        """Wait until all that was put so far is visible."""
        settling = [remote._settling(timeout) for remote in self._remotes.values() if not remote._settled]
        for one in settling:
            await self._settle_one(*one)

    async def _settle_one(self, remote: RemoteRegion, puts: int, arrival: Awaitable[None]) -> None:
        await arrival
        remote._seen = max(remote._seen, puts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.abort(error)
        await self.aclose()

    def _worded(self, error: CommError) -> CommError:
        """Return an error of the communicator of two in words of endpoints, which have no ranks."""
        names = {self._comm.rank: "this endpoint", self._other: "the other endpoint"}
        if isinstance(error, CommAbortedError) and error.message == closed_by(self._other).message:
            return CommClosedError(_LEFT, comm=self._where, op=error.op, seq=error.seq)
        text = _RANK.sub(lambda found: names[int(found[1])], error.message.replace(f" on '{self._comm.name}'", ""))
        for ours, theirs in (("the communicator", "the connection"), ("this rank", "this endpoint")):
            text = text.replace(ours, theirs)
        said = type(error)(text, comm=self._where, op=error.op, seq=error.seq)
        said.__cause__ = error.__cause__
        return said

    def _hear_of_leases(self, word: OfLeases) -> None:
        self._hand_overs.hear(word)

    def _left(self) -> None:
        """Note that the other end has closed. What it sent may still be on its way, or wait for a receive."""
        self._why = CommClosedError(_LEFT)
        self._end(self._why, End.LEFT)

    def _lost(self, error: CommError) -> None:
        self._end(error, End.LOST)

    def _end(self, why: CommError, how: End) -> None:
        self._attachments.end(why)
        self._hand_overs.cut(self._worded(why), in_order=how is End.LEFT)
        self._ended(self, how)
        self._over.set()

    def _checked(self, descriptor: object) -> Descriptor:
        """Return what a descriptor says, if it can be one of the other endpoint's."""
        says = read_descriptor(descriptor)
        if says.endpoint != self._address.endpoint:
            raise RegionError(
                f"the descriptor is of a region of endpoint {says.endpoint.hex()[:8]}, and this peer is {self.name}"
            )
        if expired(says.expires):
            raise RegionError("the descriptor has expired")
        return says
