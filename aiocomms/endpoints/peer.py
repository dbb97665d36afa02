"""The program's handle for a connection to another endpoint: messages, regions and hand-overs of leases."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
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
    """The way in which a connection ended."""

    CLOSED = enum.auto()
    """The program closed the connection on this side."""
    LEFT = enum.auto()
    """The other side closed the connection."""
    LOST = enum.auto()


class Peer(Handle):
    """A connected endpoint; made by :meth:`Endpoint.connect` and :meth:`Endpoint.accept`.

    The two endpoints form a communicator of two ranks, which has the same rules, deadlines, errors and flight recorder
    as any communicator. The loss of one connection does not affect connections to other endpoints. ``async with``
    closes the connection.
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
        """Start with a communicator of two ranks.

        :param grant: see :class:`Attachments`.
        :param ended: a function that is called when the connection ends.
        :param counter: the hand-over state that all connections of this endpoint share.
        :param earlier: a function that waits until this endpoint has closed its end of all earlier connections with the
            other endpoint.
        :param endpoint: the name of this endpoint.
        """
        self._comm, self._address, self._ended = comm, address, ended
        self._where = f"{endpoint}, peer {address.name} at {address.host}:{address.port}"
        comm._core.worded = self._worded
        self._counter = counter
        self._attachments = Attachments(comm, grant, self._left, self._hear_of_leases)
        self._hand_overs = HandOvers(
            counter, self, comm._core.driver, address.endpoint, self._attachments.say, self._arrived,
            lambda: earlier(self), comm._core.lose,
        )  # fmt: skip
        self._released = Promise(comm._core.driver)
        """A promise that is set once this end of the connection is closed."""
        self._other = 1 - comm.rank
        self._over, self._why = Promise(comm._core.driver), CommClosedError("the connection was closed")
        self._remotes: dict[bytes, RemoteRegion] = {}
        """The open regions, by descriptor."""
        comm.register_abort_hook(self._lost)

    def __repr__(self) -> str:
        return f"<Peer {self.name} of {self._comm!r}>"

    async def _begin(self) -> None:
        """Open the window that :meth:`signal` uses, together with the other end. Then both ends can receive notes."""
        # The window for signals has one element: signals of an empty window would not be ordered behind puts.
        memory = buffers.zeros(1, dtype=torch.uint8, device=self._comm.device)
        self._signals = await self._comm._begin_window(memory, name="")
        # The other end has taken part, so it receives notes from now on.
        self._attachments.say_here(self._counter.place, self._counter.process)
        self._hand_overs.begin()

    @property
    def name(self) -> str:
        """The other endpoint's name, then the beginning of that endpoint's number, for example ``decode@1f60c2b7``.

        If the other endpoint has no name, this property has only the first 8 hexadecimal digits of the number.
        """
        return self._address.name

    @property
    def address(self) -> bytes:
        """The other endpoint's address."""
        return self._address.pack()

    @property
    def transports(self) -> dict[str, str]:
        """The name of the transport for each family of operations."""
        return self._comm.transports

    @property
    def closed(self) -> bool:
        """True once the connection is over: closed on either side, or lost.

        If the other side closed the connection, this side can still receive messages that the other side sent before
        the close.
        """
        return self._over.is_set

    def statistics(self) -> Statistics:
        """Return the statistics of the connection at this end; see :meth:`Communicator.statistics`.

        The statistics list the open regions as windows. ``bytes`` counts the bytes of this endpoint's regions.
        ``peer_bytes`` counts the bytes of the other endpoint's regions.
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
        """Open a stream to the other endpoint; see :meth:`Communicator.open_stream`.

        The other endpoint must also call this method.
        """
        return await self._comm.open_stream(self._other, capacity, name, items=items, capacity_bytes=capacity_bytes)

    # ------------------------------------------------------------------------------------------------------- regions

    async def attach(self, descriptor: bytes, *, timeout: OpTimeout = COMM_TIMEOUT) -> RemoteRegion:
        """Open a region of the other endpoint. If the region is open already, return the same handle.

        :param descriptor: the :attr:`Region.descriptor` of the region.
        :param timeout: the deadline in seconds; None: no deadline. The default is the endpoint's timeout.
        :raises ArgumentTypeError: the descriptor is not bytes.
        :raises RegionError: the other endpoint did not make the descriptor, or the region has expired or is revoked.
        :raises CommTimeoutError: the other endpoint has not answered in time; the connection stays usable.
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
        """Open a region if it is not open. Return the region, and the time that remains for the operation."""
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
        """Write a tensor into a region: call :meth:`attach` if needed, then :meth:`RemoteRegion.put`.

        :returns: ``tensor``; the program may now change the tensor.
        :raises CommError: :meth:`attach` or :meth:`RemoteRegion.put` has failed.
        """
        remote, left = await self._attached(descriptor, timeout)
        return await remote.put(tensor, offset, timeout=left)

    async def get(
        self, tensor: Given, descriptor: bytes, offset: int = 0, *, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Given:
        """Read from a region into a tensor: call :meth:`attach` if needed, then :meth:`RemoteRegion.get`.

        :returns: ``tensor``.
        :raises CommError: :meth:`attach` or :meth:`RemoteRegion.get` has failed.
        """
        remote, left = await self._attached(descriptor, timeout)
        return await remote.get(tensor, offset, timeout=left)

    async def signal(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Wait until all puts so far have arrived, then send a signal.

        The other endpoint receives the signal with :meth:`wait_signal`.

        :param timeout: the deadline in seconds; None: no deadline. The default is the endpoint's timeout.
        :raises CommTimeoutError: the puts have not arrived in time.
        :raises CommError: the connection is lost or closed.
        """
        seconds = arguments.op_deadline(timeout, self._comm._seconds)
        with anyio.move_on_after(seconds) as late:
            await self._settle(timeout)
        if self.closed and not self._comm.aborted:  # The other end receives no signal any more.
            raise self._why.about(comm=self._where, op="signal")
        if late.cancelled_caught:
            raise CommTimeoutError(f"what was put has not arrived within {seconds:g} s", comm=self._where, op="signal")
        await self._signals.signal(self._other, timeout=timeout)

    def wait_signal(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> Work[None]:
        """Wait for one signal of the other endpoint, and consume the signal; see :meth:`Window.wait_signal`."""
        return self._signals.wait_signal(self._other, timeout=timeout)

    # -------------------------------------------------------------------------------------------------------- leases

    async def hand_over(
        self, lease: Lease, meta: Any = None, *, write: bool = False, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Any:
        """Lend the blocks of a lease to the other endpoint, and wait until that endpoint gives the blocks back.

        The other endpoint gets the blocks from :meth:`Endpoint.handed`. If this call fails or is cancelled, the call
        takes the blocks back, and waits up to 5 s for the other endpoint to release them. If the other endpoint does
        not release them, the connection is lost. After the end of the lease, :attr:`Pool.held` counts the blocks into
        which the other endpoint may still write.

        :param lease: a lease of a pool of this endpoint. A lease may be handed over several times, also concurrently.
        :param meta: an object for the other program. The object may have at most 256 KiB, and :meth:`send_object` must
            accept it.
        :param write: True if the other endpoint fills the blocks; this program must not use them meanwhile. False if
            the other endpoint reads the blocks; this program may only read them meanwhile.
        :param timeout: the deadline in seconds for the other endpoint to give the blocks back; None: no deadline. The
            default is the endpoint's timeout.
        :returns: the answer that the other program passed to :meth:`HandedLease.give_back`. All writes of the other
            program are visible when this call returns.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises LeaseError: the other program has released the blocks without an answer, or the lease has ended.
        :raises CommTimeoutError: the blocks were not given back in time. If the other endpoint does not release the
            blocks within 5 more seconds, the connection is lost.
        :raises CommError: the connection is lost or closed.
        """
        self._attachments.check_thread("hand_over")
        try:
            seconds = arguments.op_deadline(timeout, self._comm._seconds)
            return await self._hand_overs.hand_over(lease, meta, write, seconds)
        except CommError as error:
            raise error.about(comm=self._where, op="hand_over") from error.__cause__

    async def _arrived(self, descriptor: bytes) -> None:
        """Wait until the puts into a region are visible to its owner."""
        remote = self._remotes.get(descriptor)
        if remote is not None:
            await self._settle_one(*remote._settling(COMM_TIMEOUT))

    # ------------------------------------------------------------------------------------------------------- the end

    def register_abort_hook(self, fn: Callable[[CommError], object]) -> Hook:
        """Register ``fn(error)`` to run on the event loop's thread when the connection is lost.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` is not callable.
        """
        return self._comm.register_abort_hook(fn if not callable(fn) else lambda error: fn(self._worded(error)))

    async def lost(self) -> CommError:
        """Wait until the connection is lost, for example by the death of a process, an abort or a deadline.

        :returns: the error that caused the loss; see :meth:`Communicator.lost`.
        :raises CommClosedError: the connection was closed on either side.
        """
        await self._over
        if self._comm.aborted:
            return self._worded(await self._comm.lost())
        raise self._why.about(comm=self._where, op="lost")

    def abort(self, reason: str | BaseException) -> None:
        """Abort the connection on both sides; see :meth:`Communicator.abort`."""
        self._comm.abort(reason)

    async def aclose(self) -> None:
        """Close the connection: end pending ops, and release all resources. Idempotent.

        The other side can still receive messages whose sends are done.

        :raises CommError: a transport failed to close; all other resources are released.
        """
        self._attachments.check_thread("aclose")
        # True once all puts have arrived: the other end may then reuse its memory.
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
            # The owner of a region may reuse its memory as soon as it knows that the connection is over.
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
        """Release the borrowed blocks, wait up to 1 s until the lent blocks are released, and close this end."""
        try:
            await self._hand_overs.part()
        finally:  # The scope of ``part`` does not shield it from asyncio's own cancel().
            self._attachments.hear_no_more()
            try:
                await self._comm.aclose()
            finally:
                self._hand_overs.close()
                self._released.set()

    async def _still(self) -> None:
        """Wait until the failed operations of this connection move no more data."""
        if self._comm.aborted or self._comm.closed:
            await self._released

    def _when_still(self, call: Callable[[], object]) -> None:
        """Call a function once the failed operations of this connection move no more data.

        If the connection is not over, call the function at once.
        """

        async def run() -> None:
            await self._still()
            call()

        if self._comm.aborted or self._comm.closed:
            self._comm._core.driver.spawn(run, Context())
        else:
            call()

    async def _settle_for_a_while(self) -> None:
        with anyio.move_on_after(CLOSE_GRACE), contextlib.suppress(CommError):
            await self._settle(COMM_TIMEOUT)

    async def _settle(self, timeout: OpTimeout) -> None:
        """Wait until all puts so far are visible to the owners of the regions."""
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
        """Return a communicator's error with another message, which names endpoints instead of ranks."""
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
        """Record that the other end has closed the connection.

        The program can still receive the messages that the other end sent before.
        """
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
        """Return a decoded descriptor.

        :raises RegionError: the value is not a descriptor of the other endpoint, or has expired.
        """
        says = read_descriptor(descriptor)
        if says.endpoint != self._address.endpoint:
            raise RegionError(
                f"the descriptor is of a region of endpoint {says.endpoint.hex()[:8]}, and this peer is {self.name}"
            )
        if expired(says.expires):
            raise RegionError("the descriptor has expired: ask the owner of the region for a fresh one")
        return says
