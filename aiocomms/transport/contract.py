"""The contract of transport plug-ins: the methods of a transport, their arguments, and the guarantees of both sides.

The *core* is the part of this library that calls the transports.

``docs/transports.md`` builds a transport step by step. The package ``transports/local`` implements every op in four
small files.
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
"""The default argument of :meth:`Completion.complete`: the result of the work is then the value of ``op.result()``."""


class Completion(Protocol):
    """The object through which a transport reports the result or the error of an op.

    The object is a user's ``Work``, or a message of an op that the core executes as messages.
    """

    @property
    def op(self) -> ops.Op:
        """The record of the operation that was called."""

    @property
    def hints(self) -> Mapping[str, Any] | None:
        """The caller's hints for this op. A transport ignores unknown hints, as MPI ignores unknown keys of an Info."""

    def done(self) -> bool:
        """Return whether the op has completed, has failed, or was abandoned by the communicator."""

    def complete(self, value: Any = OP_RESULT) -> None:
        """Complete the op on this rank. Call this method once, on the loop's thread.

        :param value: the result of the work. By default, the result is the value of ``op.result()``.
        """

    def fail(self, error: CommError) -> None:
        """End the op with an error.

        Call this method once, on the loop's thread, when the network no longer uses the op's buffers.

        A :class:`~aiocomms.errors.CapturedWorkError` means that the op was captured into a CUDA graph. An op in a CUDA
        graph never completes.
        """


def conclude(work: Completion, outcome: Any = OP_RESULT) -> None:
    """End a work, if the work has not already ended.

    :param outcome: the error of the work, which is a :class:`CommError`, or the result of the work.
    """
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
    """The torch store through which the ranks form the communicator; None if no store exists, or none exists yet."""
    hosts: Sequence[str]
    """The known addresses of other ranks' hosts."""
    home: dict[Any, Any] | None
    """The state that all connections of an endpoint share, or None if the communicator does not belong to an endpoint.

    A transport stores its own data under its own key.
    """

    def left(self) -> float:
        """Return the remaining seconds of the timeout.

        The timeout starts when this rank starts to open the communicator. A negative result means that the timeout has
        passed.
        """

    async def exchange(self, key: str, value: bytes) -> list[bytes]:
        """Publish this rank's value, and return all ranks' values in rank order.

        The exchange does not block the loop, and ends at the latest when the timeout has passed.

        :param key: the name of the exchange. A communicator uses each name only once.
        :param value: this rank's value, which has at most 64 KiB.
        :raises CommTimeoutError: a rank did not publish its value before the timeout. The message names the rank.
        :raises StoreLostError: the store is lost.
        :raises AuthError: a rank's value is not signed with this job's token. The message names the rank.
        """

    def secret(self, purpose: str) -> bytes:
        """Return a key of 32 bytes. All ranks get the same key.

        If the job has no token, any process can compute the key.
        """

    async def run(self, what: str, call: Callable[[], Any]) -> Any:
        """Run a blocking call in a separate thread, and wait until the call returns or the timeout has passed.

        :param what: a description of the call, which the error's message contains.
        :raises CommTimeoutError: the call has not returned before the timeout. The thread continues to run.
        """


class SideChannel(Protocol):
    """The state of the connections through which :meth:`Transport.say` sends notes after the communicator is lost.

    Any thread may call the methods of this class.
    """

    def gone(self, rank: int) -> bool:
        """Return whether the connection to a rank has ended."""

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""


OpTypes = frozenset[type[ops.Op]]
"""A set of op types."""


class Capabilities(msgspec.Struct, frozen=True):
    """The operations that a transport supports.

    The core executes other operations by means of supported operations, or refuses them.

    :param ops: the op types that :meth:`Transport.post` accepts.
    :param devices: the types of devices whose tensors the transport accepts, such as ``{"cpu"}``.
    :param reductions: the names of the operators that the transport supports for each dtype. None: for each dtype, the
        transport supports all operators that are defined for the dtype.
    :param fifo: whether ops complete in the order in which they are posted, so that a waiting op delays later ops.
    :param in_process: whether all ranks may run as tasks of one process.
    :param simulated: whether the transport is the network of a simulation.
    :param detects_mismatch: whether the ranks get an error if they call different collectives. The ranks must get this
        error before any of these collectives completes.
    :param rounds_each_step: the dtypes whose sums the transport rounds after it has added each rank's contribution. For
        other dtypes, the transport rounds only the complete sum.
    :param lanes: the collectives that a :class:`~aiocomms.transport.LaneTransport` accepts in lanes. The core executes
        all other collectives of lanes as messages.
    :param spin: the number of loop iterations in which the core polls :meth:`Transport.progress` before the loop waits
        for the descriptor. Set 0 if another thread, or a peer in this process, completes the ops.
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
        """Return whether the transport itself can reduce tensors of ``dtype`` with ``op``."""
        return self.reductions is None or op.kind in self.reductions.get(dtype, ())


class Transport(ABC):
    """A plug-in that executes ops between the ranks of one communicator.

    Any thread may call :meth:`abort`, :meth:`waiting_for`, :meth:`last_heard`, :meth:`say` and :meth:`shared_memory`.
    All other methods of an instance are called on the thread of the loop that opened the instance.

    The description of each method states the effect of an exception that the method raises. If an exception means that
    the transport is *broken*, the communicator is lost, and the peers are notified. The :class:`CommError` that reports
    this loss names the transport, the method and the exception. The threads of the core and all other communicators
    continue. See ``aiocomms.progress.guard``.
    """

    capabilities: Capabilities
    """The operations that the transport supports.

    An instance may replace this class attribute by capabilities with fewer operations.
    """

    cuda: Any = None
    """The ``aiocomms.cuda.Cuda`` through which the transport calls CUDA, or None if its ops ignore CUDA streams.

    If this attribute is set, an op that another thread calls waits for that thread's current stream. The op starts
    after all work that the stream contains at the time of the call.
    """

    early_failure: CommError | None = None
    """The first error that :meth:`on_failure` got before the communicator was created.

    The new communicator reads this error.
    """

    def on_failure(self, error: CommError) -> None:
        """Report that the communicator is lost, because a peer died or aborted. A second call does nothing.

        The transport may call this method on any thread. When all transports are open, the communicator replaces this
        method with the communicator's own method.
        """
        self.early_failure = self.early_failure or error

    early_notes: Mapping[int, bytes] = {}
    """The last note of each rank that :meth:`on_note` got before the communicator was created.

    The new communicator reads the notes.
    """

    def on_note(self, rank: int, note: bytes) -> None:
        """Deliver a note to the communicator. Another rank has sent the note through :meth:`say`.

        The transport may call this method on any thread. The call never waits.
        """
        self.early_notes = {**self.early_notes, rank: note}

    @classmethod
    @abstractmethod
    def probe(cls, device: torch.device) -> str | None:
        """Return the reason why the transport cannot run for tensors on ``device``, or None if it can run.

        The call must be cheap. In error messages, "... is not available: " precedes the reason. Any thread may call the
        methods ``probe``, :meth:`preference`, :meth:`adopts` and :meth:`info`. If ``probe`` raises an exception, the
        transport is not available, and the exception is the reason.
        """

    @classmethod
    def preference(cls, device: torch.device, size: int, family: ops.Family) -> int:
        """Return the transport's priority for ops of ``family`` in a communicator of ``size`` ranks on ``device``.

        If the program selects the transport ``"auto"``, the core compares these priorities. The core never chooses a
        transport with priority 0.

        If this method raises an exception, the core logs the exception and assumes priority 0.
        """
        return 0

    @classmethod
    def info(cls) -> Mapping[str, str]:
        """Return additional facts about the transport, such as measured values. ``aiocomms info`` prints these facts.

        The keys are the names of the facts. If this method raises an exception, the core assumes an empty result.
        """
        return {}

    @classmethod
    def adopts(cls, foreign: object) -> bool:
        """Return whether the transport can use the communicator of another library, as the hint ``"adopt"`` requests.

        If this method raises an exception, the core assumes the result False.

        :param foreign: the communicator of the other library.
        """
        return False

    @classmethod
    @abstractmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """Connect to the other ranks, and return the open transport. The call is collective.

        If this method raises an exception or is cancelled, the communicator is not formed, and the program gets the
        exception. Before this method raises an exception, it must release everything that it has opened. After the
        exception, the core closes the communicator's other transports that are already open.

        :param options: the user's hints. A transport ignores unknown hints.
        """

    async def split_nobody(self, rendezvous: Rendezvous) -> None:  # noqa: B027 - A transport need not define it.
        """Take part in the :meth:`split` of the other ranks.

        A rank that joins none of the new communicators calls this method.

        An exception has the same effect as in :meth:`split`.

        :param rendezvous: a rendezvous whose only member is this rank. Its only useful method is ``run``.
        """

    async def split(self, rendezvous: Rendezvous, ranks: Sequence[int], options: Mapping[str, Any]) -> Self:
        """Open the transport for some ranks of this communicator, if possible over existing connections.

        By default this method calls :meth:`open`. The call is collective over ``ranks``. Ranks that join none of the
        new communicators call :meth:`split_nobody`. An exception has the same effect as in :meth:`open`. An exception
        also makes the existing communicator lost. So the other ranks get the error at once, and their calls of
        ``split`` are cancelled.

        :param rendezvous: the rendezvous of the new communicator.
        :param ranks: the members of the new communicator, as ranks of this communicator, in their new order.
        :param options: see :meth:`open`.
        """
        return await self.open(rendezvous, options)

    @abstractmethod
    def post(self, op: ops.Op, work: Completion) -> float | None:
        """Start an op whose arguments the core has checked. The call must not block.

        The transport must complete ``work`` once, during this call or later. The transport keeps ``op``, which refers
        to the tensors, until the network no longer uses the tensors.

        If this method raises a :class:`CommError`, nothing was sent. The program gets the error, and the communicator
        stays usable. The op then has no place in the order of collectives: this rank's next collective is matched as if
        the program had not called the op. Any other exception means that the transport is broken.

        If the core executes an op as messages, the core posts each message by a call of this method. Then a
        :class:`CommError` and any other exception have equal effects. If the post of the op's first message raises an
        exception, nothing was sent, and the program gets the exception. If the post of a later message raises an
        exception, the op cannot complete, and the communicator is lost.

        :returns: the time of the op's end, by :func:`time.monotonic`; None if the op has not ended or the transport
            does not know this time.
        """

    def post_at_once(self, op: ops.Recv, work: Completion) -> None:
        """Post an empty receive. Before this call returns, check whether the receive's message has arrived.

        In contrast, :meth:`post` may return before the transport checks this.
        """
        self.post(op, work)

    def wait_stream(self, work: Completion, stream: Any) -> None:
        """Make a CUDA stream wait for an op. The op may have been captured into a CUDA graph, or may already be done.

        The program gets any exception of this method, and the op continues.

        :param stream: a ``torch.cuda.Stream``; None: the current stream.
        :raises UnsupportedOperation: the op does not run on a CUDA stream.
        """
        raise UnsupportedOperation("wait_stream() orders a CUDA stream, and this op has none: await the work instead")

    def caller_stream(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Return a function that makes context managers for this thread's current CUDA stream.

        Within the block of such a context manager, this stream is the current stream on the thread that runs the block.
        Return None if the transport has no CUDA streams. Raise an error if the current stream is being captured into a
        CUDA graph.
        """
        return None

    @abstractmethod
    def progress(self) -> bool | None:
        """Advance pending ops without blocking.

        An exception means that the transport is broken. Then the core does not call this method again. An exception
        that a work's ``complete`` raises, such as the :class:`RuntimeError` of a second completion, has the same
        effect.

        :returns: True if an op completed, else False. None means that no op completed, and that the transport's own
            thread advances the ops. Then another call is useless until the descriptor is readable.
        """

    @abstractmethod
    def fileno(self) -> int | None:
        """Return a descriptor that is readable when :meth:`progress` has work; None if nothing needs :meth:`progress`.

        If transports of several communicators share one descriptor, the core calls :meth:`progress` of only one of
        these transports. If that call raises, all of these transports are broken.

        The core calls this method once, when the communicator is formed. The descriptor stays open until
        :meth:`aclose`. An exception means that the transport is broken. Then the communicator is lost as soon as the
        communicator is formed.
        """

    @abstractmethod
    def try_cancel(self, work: Completion) -> bool:
        """Withdraw an unmatched op, if the network no longer uses the op's buffer.

        The op is a receive, or an op that waits for a signal. If this method raises an exception, the transport is
        broken, and the core assumes the result False.

        :returns: True if the op is withdrawn and never has an effect. Then the transport does not complete ``work``.
            False if the op continues and completes by itself.
        """

    @abstractmethod
    def abort(self, error: CommError) -> None:
        """Abort the communicator on this rank, and try to notify the peers. The call never waits. Idempotent.

        Any thread may call this method. The transport of each notified peer calls its own :meth:`on_failure` with an
        equal error. An ``aiocomms.lowlevel.Reason`` contains the error's class, message and peer in the notification.
        The class is :class:`CommAbortedError`, ``CommTimeoutError``, ``MismatchError`` or ``PeerDiedError``.

        The transport need not complete pending works, because the communicator ends them. The transport keeps the
        tensors of these works until the network no longer uses the tensors.

        An exception means that the transport is broken. The exception is logged, and does not replace the first reason
        for the communicator's loss.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything. When this method returns, every work is complete or abandoned.

        Before this call, the communicator has waited for pending ops, and has abandoned the ops that did not end. The
        communicator does not call :meth:`progress` during or after this call.

        If this method raises an exception, ``Communicator.aclose`` raises a :class:`CommError` that names the
        transport. The communicator and its other transports are closed nevertheless.
        """

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """Return the ranks for which a pending op waits, if the transport knows these ranks.

        Any thread may call this method, even while the loop is busy. An exception means that the transport is broken.
        In this case, error messages name no rank.
        """
        return ()

    def last_heard(self) -> Sequence[float] | None:
        """Ask each rank for a new answer, and return the time of each rank's last answer by ``time.monotonic()``.

        The core calls this method from time to time, on any thread, while works are pending. Return None if the
        transport cannot ask the ranks, or detects deaths without asking. A rank must answer without its event loop and
        without the GIL. An exception means that the transport is broken.
        """
        return None

    def say(self, rank: int, note: bytes) -> bool:
        """Send a note to another rank. The call must not block.

        The other rank's transport gives the note to its own :meth:`on_note`. Any thread may call this method. Through
        notes, a rank asks another rank which ops are pending there. A rank should get a note even while its loop is
        busy, so a separate thread should receive notes. Delivery is not guaranteed. If the other rank is dead or
        closed, no error is raised. An exception means that the transport is broken.

        :param note: the note, which has at most 2 KiB.
        :returns: False if the transport does not support notes, or can no longer send notes.
        """
        return False

    def shared_memory(self) -> int | None:
        """Return how many bytes of memory the transport shares with other processes, or None if the number is unknown.

        Any thread may call this method. An exception means that the transport is broken.
        """
        return None

    def side_channel(self) -> SideChannel | None:
        """Return the side channel, if :meth:`say` can reach other ranks even after the communicator is lost.

        The channel is valid from :meth:`abort` to :meth:`aclose`. None or an exception means that the transport has no
        side channel.
        """
        return None
