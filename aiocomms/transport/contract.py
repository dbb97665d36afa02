"""The plug-in contract: the methods of a transport, their arguments, and the guarantees of both sides.

``docs/transports.md`` builds a transport step by step. The package ``transports/local`` carries every op in four small
files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import msgspec
import torch
from torch.distributed import Store

from aiocomms import ops
from aiocomms.errors import CommError, UnsupportedOperation
from aiocomms.ops.reductions import ReduceOp

OP_RESULT = object()
"""The argument of :meth:`Completion.complete` that means the op's own result."""


class Completion(Protocol):
    """The object that a transport completes with an op's outcome: a user's ``Work``, or a step of a lowered op."""

    @property
    def op(self) -> ops.Op:
        """The record of the operation that was called."""

    @property
    def hints(self) -> Mapping[str, Any] | None:
        """The caller's hints for this op. A transport ignores unknown hints, as MPI ignores unknown keys of an Info."""

    def done(self) -> bool:
        """Return whether the op has completed, has failed, or was abandoned by the communicator."""

    def complete(self, value: Any = OP_RESULT) -> None:
        """Complete the op on this rank. Call this once, on the loop's thread.

        :param value: the result of the work; by default the op's own result.
        """

    def fail(self, error: CommError) -> None:
        """Fail the op. Call this once, on the loop's thread, when the network no longer uses the op's buffers.

        With a :class:`~aiocomms.errors.CapturedWorkError`, the op is a part of a CUDA graph, and never completes.
        """


def conclude(work: Completion, outcome: Any = OP_RESULT) -> None:
    """End a work with its value or with its error, a :class:`CommError`, unless the work has already ended."""
    if work.done():
        return
    if isinstance(outcome, CommError):
        work.fail(outcome)
    else:
        work.complete(outcome)


class Rendezvous(Protocol):
    """The interface through which the ranks of one communicator exchange data while its transports open."""

    rank: int
    size: int
    name: str
    device: torch.device
    timeout: float
    store: Store | None
    """The torch store in which the ranks met; None: there is no store, or not yet."""
    hosts: Sequence[str]
    """The known addresses of other ranks' hosts."""
    home: dict[Any, Any] | None
    """The state that all connections of an endpoint share. A transport keeps its own data under its own key.

    None: the communicator belongs to no endpoint.
    """

    def left(self) -> float:
        """Return the seconds that are left of the timeout.

        The timeout starts when this rank starts to open the communicator. A negative result means that the timeout has
        passed.
        """

    async def exchange(self, key: str, value: bytes) -> list[bytes]:
        """Publish this rank's value, and return all ranks' values in rank order.

        The exchange does not block the loop, and takes at most the timeout.

        :param key: the name of the exchange, used once per communicator.
        :param value: this rank's value, at most 64 KiB.
        :raises CommTimeoutError: a rank did not arrive; the message names the rank.
        :raises StoreLostError: the store is lost.
        :raises AuthError: a rank's value is not signed with this job's token; the message names the rank.
        """

    def secret(self, purpose: str) -> bytes:
        """Return a key of 32 bytes, the same on all ranks. If the job has no token, any process can compute the key."""

    async def run(self, what: str, call: Callable[[], Any]) -> Any:
        """Run a blocking call in a separate thread, and wait for the call at most the timeout.

        :param what: a description of the call, for the error's message.
        :raises CommTimeoutError: the call takes longer than the timeout. The thread keeps running.
        """


class SideChannel(Protocol):
    """The state of the connections that :meth:`Transport.say` can still use after the communicator is lost.

    Any thread may call these methods.
    """

    def gone(self, rank: int) -> bool:
        """Return whether the connection to a rank has ended."""

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""


OpTypes = frozenset[type[ops.Op]]
"""Some types of ops."""


class Capabilities(msgspec.Struct, frozen=True):
    """The operations that a transport can carry. The core lowers other operations to these, or refuses them.

    :param ops: the op types that :meth:`Transport.post` takes.
    :param devices: the types of devices whose tensors the transport takes, such as ``{"cpu"}``.
    :param reductions: for each dtype that the transport reduces natively, the operators' names; None: all operators
        that are defined for the dtype.
    :param fifo: whether ops complete in the order in which they are posted, so that a waiting op delays later ops.
    :param in_process: whether all ranks may be tasks of one process.
    :param simulated: whether the transport is the network of a simulation.
    :param detects_mismatch: whether ranks whose collectives differ get an error before any of these collectives
        completes.
    :param rounds_each_step: dtypes whose sums the transport rounds after each rank's contribution, and not only at the
        end.
    :param lanes: the collectives that a :class:`~aiocomms.transport.LaneTransport` takes in lanes; the core lowers all
        other collectives of lanes to messages.
    :param spin: the number of turns of the loop for which :meth:`Transport.progress` is polled before the loop waits
        for the descriptor; 0 if another thread, or the call of a peer in this process, completes the ops.
    """

    ops: OpTypes
    devices: frozenset[str] = frozenset({"cpu"})
    reductions: Mapping[torch.dtype, frozenset[str]] | None = None
    fifo: bool = False
    in_process: bool = False
    simulated: bool = False
    detects_mismatch: bool = True
    rounds_each_step: frozenset[torch.dtype] = frozenset()
    lanes: OpTypes = frozenset()
    spin: int = 0

    def reduces(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Return whether the transport reduces ``dtype`` with ``op`` natively."""
        return self.reductions is None or op.kind in self.reductions.get(dtype, ())


class Transport(ABC):
    """A plug-in that carries ops between the ranks of one communicator.

    Any thread may call :meth:`abort`, :meth:`waiting_for`, :meth:`last_heard`, :meth:`say` and :meth:`shared_memory`.
    All other methods of an instance are called on the thread of the loop that opened the instance.

    The description of each method states the effect of an exception. If an exception means that the transport is
    *broken*, the communicator is lost, and the peers are notified. The :class:`CommError` of the loss names the
    transport, the method and the exception. The threads of the core and all other communicators continue. See
    ``aiocomms.progress.guard``.
    """

    capabilities: Capabilities
    """The operations that the transport can carry.

    This is a class attribute. An instance may replace it by a smaller set.
    """

    cuda: Any = None
    """The ``aiocomms.cuda.Cuda`` through which the transport calls CUDA; None: the transport's ops ignore CUDA streams.

    If it is set, an op that another thread calls starts after the work on that thread's current stream at the call.
    """

    early_failure: CommError | None = None
    """The first error that :meth:`on_failure` got before the communicator was created.

    The new communicator reads it.
    """

    def on_failure(self, error: CommError) -> None:
        """Report that the communicator is lost, because a peer died or aborted. A second call does nothing.

        Any thread may call this. When all transports are open, the communicator replaces this method with its own
        method.
        """
        self.early_failure = self.early_failure or error

    early_notes: Mapping[int, bytes] = {}
    """The last note of each rank that :meth:`on_note` got before the communicator was created.

    The new communicator reads the notes.
    """

    def on_note(self, rank: int, note: bytes) -> None:
        """Pass a note that another rank has sent through :meth:`say` to the communicator.

        Any thread may call this. The call never waits.
        """
        self.early_notes = {**self.early_notes, rank: note}

    @classmethod
    @abstractmethod
    def probe(cls, device: torch.device) -> str | None:
        """Return why the transport cannot run for tensors on ``device``, or None if it can. The call must be cheap.

        Error messages have the reason after "... is not available: ". Any thread may call this, :meth:`preference`,
        :meth:`adopts` and :meth:`info`. If this raises, the transport is not available, and the exception is the
        reason.
        """

    @classmethod
    def preference(cls, device: torch.device, size: int, family: ops.Family) -> int:
        """Return the transport's priority in ``"auto"`` for a family of ops of ``size`` ranks on ``device``.

        With priority 0, ``"auto"`` never chooses the transport.

        An exception is logged, and counts as priority 0.
        """
        return 0

    @classmethod
    def info(cls) -> Mapping[str, str]:
        """Return further facts by name for ``aiocomms info``, such as measured values.

        An exception counts as an empty result.
        """
        return {}

    @classmethod
    def adopts(cls, foreign: object) -> bool:
        """Return whether the transport can run over ``foreign``, another library's communicator (hint ``"adopt"``).

        An exception counts as False.
        """
        return False

    @classmethod
    @abstractmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """Meet the other ranks, and return the open transport. Collective.

        If this raises or is cancelled, the communicator is not formed, and the caller gets the exception. Before this
        method raises, it must release everything that it has opened. The core closes the transports that were opened
        earlier.

        :param options: the user's hints; a transport ignores unknown ones.
        """

    async def split_nobody(self, rendezvous: Rendezvous) -> None:  # noqa: B027 - A transport need not define it.
        """Take part in the :meth:`split` of other ranks, on a rank that joins no new communicator.

        An exception has the same effect as in :meth:`split`.

        :param rendezvous: a rendezvous whose only member is this rank, so that only ``run`` is useful.
        """

    async def split(self, rendezvous: Rendezvous, ranks: Sequence[int], options: Mapping[str, Any]) -> Self:
        """Open the transport for some ranks of this communicator, over existing connections if the transport can.

        By default this calls :meth:`open`. Collective over ``ranks``. Ranks that join no new communicator call
        :meth:`split_nobody`. An exception has the same effect as in :meth:`open`. This communicator is then lost, too.
        So the other ranks learn of the failure at once, and their calls of ``split`` are cancelled.

        :param rendezvous: the rendezvous of the new communicator.
        :param ranks: the members of the new communicator, as ranks of this communicator, in their new order.
        :param options: see :meth:`open`.
        """
        return await self.open(rendezvous, options)

    @abstractmethod
    def post(self, op: ops.Op, work: Completion) -> float | None:
        """Start an op whose arguments the core has checked. Never block; complete ``work`` once, now or later.

        The transport keeps ``op``, which refers to the tensors, until the network no longer uses the tensors.

        A :class:`CommError` means that nothing was sent: the caller gets the error, and the communicator stays usable.
        The op then does not count: the next collective of this rank matches the next collective of the other ranks. Any
        other exception means that the transport is broken. For a message of a lowered op, all exceptions have the same
        effect. If the post of the op's first message raises, nothing was sent, and the caller gets the exception. If
        the post of a later message raises, the op stops halfway, and the communicator is lost.

        :returns: the time of the op's end, by :func:`time.monotonic`, if the op has already ended and the transport
            knows the time; otherwise None.
        """

    def post_at_once(self, op: ops.Recv, work: Completion) -> None:
        """Post an empty receive, and look for its message before the call returns. ``post`` may look later."""
        self.post(op, work)

    def wait_stream(self, work: Completion, stream: Any) -> None:
        """Make a CUDA stream wait for an op. The op may be captured or already done.

        :param stream: a ``torch.cuda.Stream``; None: the current one.
        :raises UnsupportedOperation: the op runs on no stream. Any exception goes to the caller, and the op continues.
        """
        raise UnsupportedOperation("wait_stream() orders a CUDA stream, and this op has none: await the work instead")

    def caller_stream(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Return a function that makes contexts in which this call's current CUDA stream is current again.

        Return None if there are no streams. Raise an error if the current stream is being captured into a CUDA graph.
        """
        return None

    @abstractmethod
    def progress(self) -> bool | None:
        """Advance pending ops without blocking.

        An exception means that the transport is broken. The core does not call this again. This also holds for
        exceptions of a work's ``complete``, such as the :class:`RuntimeError` of a second completion.

        :returns: whether anything completed. None: nothing completed, and another call is useless until the descriptor
            is readable, because the transport's own thread does the work.
        """

    @abstractmethod
    def fileno(self) -> int | None:
        """Return a descriptor that is readable when :meth:`progress` has work; None if nothing needs :meth:`progress`.

        If transports of several communicators share one descriptor, the core calls :meth:`progress` of only one of
        these transports. If that call raises, all of these transports are broken.

        The core calls this once, when the communicator is formed. The descriptor stays open until :meth:`aclose`. An
        exception means that the transport is broken. The communicator is then lost as soon as it is formed.
        """

    @abstractmethod
    def try_cancel(self, work: Completion) -> bool:
        """Withdraw an unmatched receive or wait for a signal, if the network no longer uses the buffer.

        An exception means that the transport is broken. The op then counts as under way.

        :returns: True: the op did not happen and never will, and the transport does not complete ``work``. False: the
            op is under way and completes by itself.
        """

    @abstractmethod
    def abort(self, error: CommError) -> None:
        """Abort: try to notify the peers, and stop. The call never waits. Idempotent; any thread may call this.

        Each peer's transport passes an equal error to its :meth:`on_failure`. ``aiocomms.lowlevel.Reason`` carries the
        error's class, message and peer. The class is :class:`CommAbortedError`, ``CommTimeoutError``, ``MismatchError``
        or ``PeerDiedError``.

        The transport need not complete pending works, because the communicator ends them. The transport keeps the
        tensors of these works until the network no longer uses the tensors.

        An exception means that the transport is broken. The exception is logged, and the communicator keeps the first
        reason for its loss.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything. On return every work is complete or abandoned.

        Before this call, the communicator has waited for pending ops, and has abandoned those that did not end. From
        this call on, the communicator does not call :meth:`progress`.

        If this raises, ``Communicator.aclose`` raises a :class:`CommError` that names the transport. The communicator
        and its other transports are closed nevertheless.
        """

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """Return the ranks for which a pending op waits, if the transport knows them.

        Any thread may call this, also while the loop is busy. An exception means that the transport is broken. Then
        error messages name no rank.
        """
        return ()

    def last_heard(self) -> Sequence[float] | None:
        """Return the time of each rank's last answer, by ``time.monotonic()``, and ask each rank for a new answer.

        The core calls this from time to time, on any thread, while works are pending. The result is None if the
        transport need not ask, or cannot ask. A rank must answer without its event loop and without the GIL. An
        exception means that the transport is broken.
        """
        return None

    def say(self, rank: int, note: bytes) -> bool:
        """Send a note to another rank, whose :meth:`on_note` gets the note. Never block.

        Any thread may call this. A note asks a rank what it is doing. A rank should get a note even while its loop is
        busy, so a separate thread should receive notes. Delivery is not guaranteed: if the other rank is gone, no error
        is raised. An exception means that the transport is broken.

        :param note: the note, at most 2 KiB.
        :returns: False if the transport carries no notes, or no longer carries notes.
        """
        return False

    def shared_memory(self) -> int | None:
        """Return the size in bytes of the memory that is shared with other processes, or None if it is unknown.

        Any thread may call this. An exception means that the transport is broken.
        """
        return None

    def side_channel(self) -> SideChannel | None:
        """Return the side channel if :meth:`say` can still reach other ranks.

        The channel is valid from :meth:`abort` to :meth:`aclose`. None or an exception means that there is no channel.
        """
        return None
