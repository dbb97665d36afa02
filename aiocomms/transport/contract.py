"""The plug-in contract: what a transport is, what it is given and what it promises.

``docs/transports.md`` builds a transport piece by piece; ``transports/local`` carries every op in four small files.
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
"""The argument of :meth:`Completion.complete` in place of a value: the result is the op's own."""


class Completion(Protocol):
    """The receiver of an op's outcome, which a transport completes: a user's ``Work``, or one step of a lowered op."""

    @property
    def op(self) -> ops.Op:
        """The record of the operation that was called."""

    @property
    def hints(self) -> Mapping[str, Any] | None:
        """The caller's advice for this op; a transport ignores what it does not know, as MPI does with its Info."""

    def done(self) -> bool:
        """Return whether it was completed, failed, or given up by the communicator."""

    def complete(self, value: Any = OP_RESULT) -> None:
        """Complete the op on this rank. Call it once, on the loop's thread.

        :param value: what awaiting it returns, where that is not one of the op's own tensors.
        """

    def fail(self, error: CommError) -> None:
        """Fail the op, whose buffers the wire no longer uses. Call it once, on the loop's thread.

        With a :class:`~aiocomms.errors.CapturedWorkError` it is part of a CUDA graph instead, and has no end.
        """


def conclude(work: Completion, outcome: Any = OP_RESULT) -> None:
    """End a work with a value or with the :class:`CommError` that it failed with, unless it was given up before."""
    if work.done():
        return
    if isinstance(outcome, CommError):
        work.fail(outcome)
    else:
        work.complete(outcome)


class Rendezvous(Protocol):
    """The way by which the ranks of one communicator find each other while its transports open."""

    rank: int
    size: int
    name: str
    device: torch.device
    timeout: float
    store: Store | None
    """The store at which the ranks met, as torch has it; None: there is none, or not yet."""
    hosts: Sequence[str]
    """Addresses of other ranks' hosts that are known already."""
    home: dict[Any, Any] | None
    """The state that the connections of an endpoint share, where a transport keeps its part under a key of its own.

    None: the communicator is not of an endpoint.
    """

    def left(self) -> float:
        """Return the seconds of the timeout that are left, from when this rank began; negative once time is up."""

    async def exchange(self, key: str, value: bytes) -> list[bytes]:
        """Give one value per rank and get every rank's, in rank order; off the loop and within the timeout.

        :param key: what is exchanged; each key once per communicator.
        :param value: at most 64 KiB.
        :raises CommTimeoutError: some rank did not come; says which.
        :raises StoreLostError: the store is gone.
        :raises AuthError: a rank's value is not signed with this job's token; says which.
        """

    def secret(self, purpose: str) -> bytes:
        """32 bytes that its ranks alone know, if the job has a token; else any process can compute them."""

    async def run(self, what: str, call: Callable[[], Any]) -> Any:
        """Run a blocking call in a thread of its own, off the loop, within the timeout.

        :param what: what the call does, for the error's message.
        :raises CommTimeoutError: it took longer; the thread is left behind.
        """


class SideChannel(Protocol):
    """The knowledge of the ranks of a lost communicator that :meth:`Transport.say` still reaches; any thread."""

    def gone(self, rank: int) -> bool:
        """Return whether the connection to a rank has ended."""

    def far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""


OpTypes = frozenset[type[ops.Op]]
"""Some types of ops."""


class Capabilities(msgspec.Struct, frozen=True):
    """The operations that a transport can carry. The core lowers any other to these, or refuses it.

    :param ops: the op types it takes in :meth:`Transport.post`.
    :param devices: device types whose tensors it takes, such as ``{"cpu"}``.
    :param reductions: for each dtype that it reduces natively, the operators' names; None: all that are defined.
    :param fifo: whether ops complete in the order posted, so that one that waits holds up those behind it.
    :param in_process: whether all ranks may be tasks of one process.
    :param simulated: whether it is the network of a simulation.
    :param detects_mismatch: whether ranks that call different collectives are told so before any of them completes one.
    :param rounds_each_step: dtypes whose sums it rounds after each rank's contribution, and not only at the end.
    :param lanes: the collectives that a :class:`~aiocomms.transport.LaneTransport` takes in lanes; the others go by
        messages.
    :param spin: how many turns of the loop it is worth asking :meth:`Transport.progress` before parking on the
        descriptor; 0 where completions come from another thread or from the peer's own call.
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
        """Return whether it reduces ``dtype`` with ``op`` natively."""
        return self.reductions is None or op.kind in self.reductions.get(dtype, ())


class Transport(ABC):
    """A plug-in that carries ops between the ranks of one communicator.

    :meth:`abort`, :meth:`waiting_for`, :meth:`last_heard`, :meth:`say` and :meth:`shared_memory` are called on any
    thread, everything else on the thread of the loop that opened it.

    Each method says what raising from it means. Where it says that the transport is *broken*, the communicator is lost
    with a :class:`CommError` that names the transport, the method and what was raised, and the peers are told; no
    thread of the core ends, and no other communicator. See ``aiocomms.progress.guard``.
    """

    capabilities: Capabilities
    """The operations that it can carry; a class attribute, which an instance may narrow."""

    cuda: Any = None
    """The layer by which it calls CUDA, an ``aiocomms.cuda.Cuda``; None: its ops come after no stream of that layer.

    By it another thread's ops come after that thread's current stream, as it is at the call.
    """

    early_failure: CommError | None = None
    """The error that :meth:`on_failure` was given before there was a communicator, which reads it when it is made."""

    def on_failure(self, error: CommError) -> None:
        """Tell the communicator, from any thread, that it is lost: a peer died or aborted. A second call does nothing.

        The communicator puts its own in this one's place when all transports are open.
        """
        self.early_failure = self.early_failure or error

    early_notes: Mapping[int, bytes] = {}
    """The last note of each rank that :meth:`on_note` was given before there was a communicator.

    The communicator reads them when it is made.
    """

    def on_note(self, rank: int, note: bytes) -> None:
        """Give the communicator, from any thread, a note that another rank has given to its :meth:`say`.

        This call does not wait for anything.

        It waits for nothing.
        """
        self.early_notes = {**self.early_notes, rank: note}

    @classmethod
    @abstractmethod
    def probe(cls, device: torch.device) -> str | None:
        """Return why it cannot run for tensors on ``device``, as the end of "... is not available: ", or None. Cheap.

        Any thread may call this, :meth:`preference`, :meth:`adopts` and :meth:`info`.
        Raising: it is not available, and what was raised is the reason.
        """

    @classmethod
    def preference(cls, device: torch.device, size: int, family: ops.Family) -> int:
        """Return how much ``"auto"`` should prefer it for a family of ops of ``size`` ranks on ``device``; 0: never.

        Raising: it counts as 0, and the log says so.
        """
        return 0

    @classmethod
    def info(cls) -> Mapping[str, str]:
        """Return what ``aiocomms info`` prints of it besides, by name: what it has measured, say. Raising: nothing."""
        return {}

    @classmethod
    def adopts(cls, foreign: object) -> bool:
        """Return whether it can run over ``foreign``, another library's communicator, hint ``"adopt"``. Raising: no."""
        return False

    @classmethod
    @abstractmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """Meet the other ranks. Collective.

        Raising, or being cancelled: the communicator is not formed, and what was raised is the caller's. The transport
        has released what it has opened; the core closes those that were opened before it.

        :param options: the user's hints; those it does not know are not meant for it.
        """

    async def split_nobody(self, rendezvous: Rendezvous) -> None:  # noqa: B027 - A transport need not define it.
        """Take part in others' :meth:`split` on a rank that joins none of the new communicators. Raising: as there.

        :param rendezvous: for its ``run``; this rank is alone in it.
        """

    async def split(self, rendezvous: Rendezvous, ranks: Sequence[int], options: Mapping[str, Any]) -> Self:
        """Open it for some of these ranks, over what the ranks already have; else everything is opened anew.

        Collective over the ranks named. Raising: as from :meth:`open`. This communicator is lost then, so that the
        other ranks hear of it at once, and their calls of this method are cancelled.

        :param rendezvous: the new communicator's.
        :param ranks: its members, as ranks of this one, in their new order.
        :param options: as for :meth:`open`.
        """
        return await self.open(rendezvous, options)

    @abstractmethod
    def post(self, op: ops.Op, work: Completion) -> float | None:
        """Start an op whose arguments are checked. Never blocks; completes ``work`` once, now or later.

        The transport keeps ``op``, and with it the tensors, until the wire does not use them any more.

        Raising a :class:`CommError`: nothing was sent, the error is the caller's, and the communicator goes on; the
        other ranks' next collective is this one's next, too. Raising anything else: the transport is broken. If ``op``
        is a message of a lowered op, either means the same: for the first message that nothing was sent, and what was
        raised is the caller's; for a later one that the op has broken off, and the communicator is lost.

        :returns: when it ended, by :func:`time.monotonic`, if it has, and the transport knows without a look.
        """

    def post_at_once(self, op: ops.Recv, work: Completion) -> None:
        """Post a receive of no bytes, and look within the call for what it throws away, where ``post`` looks later."""
        self.post(op, work)

    def wait_stream(self, work: Completion, stream: Any) -> None:
        """Make a CUDA stream wait for an op, which may be captured, or done already.

        :param stream: a ``torch.cuda.Stream``; None: the current one.
        :raises UnsupportedOperation: the op runs on no stream. Whatever is raised is the caller's, and the op goes on.
        """
        raise UnsupportedOperation("wait_stream() orders a CUDA stream, and this op has none: await the work instead")

    def caller_stream(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Return what makes the CUDA stream of now the current one again; None: no streams. It refuses a capture."""
        return None

    @abstractmethod
    def progress(self) -> bool | None:
        """Move things on without blocking.

        Raising: the transport is broken, and is not asked again. That holds for what completing a work raises in here,
        such as the :class:`RuntimeError` of a work that is completed twice.

        :returns: whether anything completed. None: nothing did, and it is of no use to ask again before the descriptor
            is readable, for the transport's own thread is at it.
        """

    @abstractmethod
    def fileno(self) -> int | None:
        """Return a descriptor, readable when :meth:`progress` has something to do; None if nothing comes by itself.

        Transports of several communicators that have one descriptor are moved on as one: only one of them is asked for
        progress, and if that raises, all are broken.

        Asked once, when the communicator is formed; it stays open until :meth:`aclose`. Raising: the
        transport is broken, and the communicator is lost as soon as it is formed.
        """

    @abstractmethod
    def try_cancel(self, work: Completion) -> bool:
        """Withdraw an unmatched receive or wait, if the wire does not use its buffer any more.

        Raising: the transport is broken; the op counts as under way.

        :returns: True: it has not happened and never will, and the transport does not complete ``work``. False: it is
            under way and completes by itself.
        """

    @abstractmethod
    def abort(self, error: CommError) -> None:
        """Give up: tell the peers, best effort, and stop. Synchronous, on any thread, idempotent.

        Each peer's transport gives to its :meth:`on_failure` what it is told: an error of the same class, which is
        :class:`CommAbortedError`, ``CommTimeoutError``, ``MismatchError`` or ``PeerDiedError``, with its message and
        its peer, as ``aiocomms.lowlevel.Reason`` carries them.

        Works in flight need not be completed (the communicator ends them), but their tensors are kept until the wire is
        quiet.

        Raising: the transport is broken, as the log says. Of a communicator that is lost the first reason stays.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything. On return every work is complete or given up.

        The communicator has let ops under way end, and given up the rest; :meth:`progress` is not called any more.

        Raising: ``Communicator.aclose`` raises a :class:`CommError` that names the transport; the communicator is
        closed all the same, and so are its other transports.
        """

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """Return the ranks a pending op waits for, where the transport can tell. On any thread: the loop may be busy.

        Raising: the transport is broken. No rank is named.
        """
        return ()

    def last_heard(self) -> Sequence[float] | None:
        """Return when each rank last gave a sign of life, of ``time.monotonic()``; each is asked for another.

        Called every now and then while works are pending, on any thread. None: there is no need, or no way, to ask.
        The answer may wait neither for a rank's loop nor for its interpreter's lock. Raising: the transport is broken.
        """
        return None

    def say(self, rank: int, note: bytes) -> bool:
        """Give a note to another rank, for its :meth:`on_note`; on any thread, and never blocking.

        So a rank is asked what it is doing. It should hear that also while its loop is busy, and no thread of it may
        wake before. Best effort: no error says that the rank is gone. Raising: the transport is broken.

        :param note: at most 2 KiB.
        :returns: False: the transport carries no notes, or none any more.
        """
        return False

    def shared_memory(self) -> int | None:
        """Bytes of memory that it shares with other processes, if it can say; any thread. Raising: it is broken."""
        return None

    def side_channel(self) -> SideChannel | None:
        """Return the side channel, from :meth:`abort` to :meth:`aclose`, if :meth:`say` still reaches ranks.

        None or raising: there is none.
        """
        return None
