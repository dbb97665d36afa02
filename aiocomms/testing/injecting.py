"""The layer that injects faults into the ops between a communicator and its transports.

A transport starts ops only in its ``post``, so this layer wraps ``post``. Native shortcuts (native methods that start
an op) would bypass the layer. These shortcuts are off while a hook is registered, so the layer registers a hook.
"""

from __future__ import annotations

import functools
import math
import os
import random
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio
import msgspec
import torch
from torch.distributed import HashStore, PrefixStore

from aiocomms import ops
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import CommAbortedError, CommError, PeerDiedError, UnsupportedOperation
from aiocomms.lowering.runs import RunPart
from aiocomms.lowering.windows import TwoSided
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.handles import Handle
from aiocomms.progress.guard import broken, guarded
from aiocomms.progress.inflight import StartedWork
from aiocomms.transport import Completion, LaneTransport, Transport, conclude

if TYPE_CHECKING:
    from aiocomms.testing.simulation.world import SimulatedWorld

Kind = Literal["delay", "drop", "kill", "mismatch", "slow_link"]
Differs = Literal["dtype", "size", "root"]
Post = Callable[[Any, Any], float | None]

STREAM = "stream"
"""The name that stands for messages of streams in :attr:`Fault.op`."""


class Fault(msgspec.Struct, frozen=True, eq=False):
    """A fault, and the calls that the fault affects. The functions of :mod:`aiocomms.testing.faults` create faults."""

    kind: Kind
    ranks: tuple[int, ...] | None
    op: frozenset[str]
    """The names of the ops that the fault affects."""
    nth: int | None
    probability: float
    seconds: float = 0.0
    until: anyio.Event | None = None
    differs: Differs = "dtype"
    bytes_per_second: float = math.inf


class Injected(NamedTuple):
    """A fault that was injected into a call of an op."""

    kind: Kind
    rank: int
    op: str
    call: int
    """The number of this call, counted from 1. Only this rank's calls of the ops in :attr:`Fault.op` are counted."""


class Injection(Handle):
    """The faults of one call of :func:`aiocomms.testing.faults.inject` on one rank."""

    def __init__(self, faults: Sequence[Fault], seed: int, comm: Communicator, log: list[Injected]) -> None:
        self.since: int = comm._core.ledger.issued
        """The number of the first op that the faults may affect."""
        self._rank, self._log = comm.rank, log
        self.faults: list[Fault] = [fault for fault in faults if fault.ranks is None or comm.rank in fault.ranks]
        self._calls = [0] * len(self.faults)
        self._random = [random.Random(f"{seed} {comm.rank} {i}") for i in range(len(self.faults))]  # noqa: S311

    def hits(self, name: str) -> Iterator[Fault]:
        """Yield the faults that affect a call, and record them as injected."""
        for i, fault in enumerate(self.faults):
            if name not in fault.op:
                continue
            self._calls[i] += 1
            lucky = fault.probability < 1 and self._random[i].random() >= fault.probability
            if not lucky and fault.nth in (None, self._calls[i]):
                self._log.append(Injected(fault.kind, self._rank, name, self._calls[i]))
                yield fault


class _Held(msgspec.Struct, eq=False):
    """An op that waits to be posted."""

    work: Completion
    post: Callable[[], float | None]
    transport: Transport
    faults: list[Fault]
    waits: list[Callable[[], Awaitable[object]]]
    scope: anyio.CancelScope | None = None

    def release(self) -> None:
        """End the wait, so that the op is posted."""
        self.waits = []
        if self.scope is not None:
            self.scope.cancel()


class _Otherwise:
    """The object that a transport gets in place of a work if a fault has changed the op."""

    __slots__ = ("__weakref__", "_work", "op")

    def __init__(self, op: ops.Op, work: Completion) -> None:
        self.op, self._work = op, work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Link:
    """The object through which all ops of one rank reach the rank's transports. The object injects the faults."""

    def __init__(self, comm: Communicator) -> None:
        self._core = comm._core
        self._injections: list[Injection] = []
        self._faults: WeakKeyDictionary[Completion, list[Fault]] = WeakKeyDictionary()
        """The faults of each op that the program has called. A fault affects all messages of the op."""
        self._queues: dict[Hashable, deque[_Held]] = {}
        """The delayed ops, by the key that :func:`_order` returns."""
        self._stalled: set[Hashable] = set()
        """The keys of dropped collectives, as :func:`_order` returns them.

        No later op with such a key is posted, because the other ranks would match that op with the dropped collective.
        """
        self._dropped: set[Completion] = set()
        self._otherwise: WeakValueDictionary[int, _Otherwise] = WeakValueDictionary()  # The keys are the ids of works.
        self._pace = anyio.Lock()

    def begin(self, injection: Injection) -> None:
        """Inject faults from now on."""
        self._injections.append(injection)

    def end(self, injection: Injection) -> None:
        """Stop injecting these faults, and post the ops that the faults delay.

        Ops that were dropped or changed stay dropped or changed.
        """
        self._injections.remove(injection)
        for faults in self._faults.values():
            faults[:] = [f for f in faults if f not in injection.faults or f.kind in ("drop", "mismatch")]
        for held in [held for queue in self._queues.values() for held in queue]:
            if any(fault in injection.faults for fault in held.faults):
                held.release()

    def post(self, transport: Transport, send: Post, op: ops.Op, work: Completion, lane: int | None) -> float | None:
        """Post an op by ``send(op, work)``.

        The faults of the op decide whether the op is posted immediately, later, with changes, or never.
        """
        faults, key = self._faults_of(work), _order(op, lane)
        kinds = {fault.kind for fault in faults}
        if "kill" in kinds:
            self._kill()
            return None
        if "drop" in kinds or key in self._stalled:
            self._drop(key, op, work)
            return None
        posted = self._disguised(faults, op, work)
        post = functools.partial(send, posted.op, posted)
        waits = list(self._waits(faults, op, transport))
        if not waits and key not in self._queues:
            return post()
        self._hold(key, _Held(work, post, transport, list(faults), waits))
        faults[:] = [fault for fault in faults if fault.kind != "delay"]  # the op's other messages follow its first
        return None

    def carries(self, work: Completion) -> bool:
        """Return whether a fault has delayed or dropped an op, so that no transport has the op."""
        return work in self._dropped or any(held.work is work for queue in self._queues.values() for held in queue)

    def known_as(self, work: Completion) -> Any:
        """Return the object that the transport has for a work.

        If no fault has changed the op, this object is the work.
        """
        return self._otherwise.get(id(work), work)

    def _disguised(self, faults: Sequence[Fault], op: ops.Op, work: Completion) -> Any:
        wrong = [fault.differs for fault in faults if fault.kind == "mismatch"]
        if not wrong:
            return work
        for differs in wrong:
            op = different(op, differs, self._core.size)
        otherwise = self._otherwise[id(work)] = _Otherwise(op, work)
        return otherwise

    def _faults_of(self, work: Completion) -> list[Fault]:
        """Find the op of the program to which a work belongs, and return the faults of this op.

        Messages that the library itself sends have no faults.
        """
        while isinstance(work, RunPart):
            work = work._run.work
        if not isinstance(work, StartedWork):
            return []
        if work not in self._faults:
            name = _name(work.op)
            self._faults[work] = [
                fault for each in self._injections if work.seq >= each.since for fault in each.hits(name)
            ]
        return self._faults[work]

    def _waits(
        self, faults: Sequence[Fault], op: ops.Op, transport: Transport
    ) -> Iterator[Callable[[], Awaitable[object]]]:
        for fault in faults:
            if fault.kind == "delay":
                yield functools.partial(anyio.sleep, fault.seconds) if fault.until is None else fault.until.wait
            elif fault.kind == "slow_link" and not isinstance(transport, TwoSided) and (nbytes := _nbytes(op)):
                yield functools.partial(self._transmit, nbytes / fault.bytes_per_second)

    async def _transmit(self, seconds: float) -> None:
        async with self._pace:
            await anyio.sleep(seconds)

    def _kill(self) -> None:
        """Kill this process or simulated process.

        If several ranks share the process, simulate the death of this rank instead.
        """
        core = self._core
        if not _in_memory(core._rendezvous.root):
            world = cast("SimulatedWorld | None", clock.simulation)
            if world is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                world.kill(world.process.rank)
                return
        death = PeerDiedError(f"rank {core.rank} was killed by a fault of the test", peer=core.rank)
        for transport in core.transports:
            guarded(None, transport.abort, death)
        core.lose(CommAbortedError(f"this rank was killed by a fault of the test: {death.message}", peer=core.rank))

    def _drop(self, key: Hashable, op: ops.Op, work: Completion) -> None:
        self._dropped = {old for old in self._dropped if not old.done()} | {work}
        if op.family == "collectives":
            self._stalled.add(key)

    def _hold(self, key: Hashable, held: _Held) -> None:
        if key in self._queues:
            self._queues[key].append(held)
            return
        self._queues[key] = deque([held])
        self._core.driver.spawn(functools.partial(self._serve, key), copy_context())

    async def _serve(self, key: Hashable) -> None:
        """Post the delayed ops of a key in order, each after its delay."""
        queue = self._queues[key]
        while queue:
            held = queue[0]
            with anyio.CancelScope() as held.scope:
                for wait in held.waits:
                    await wait()
            queue.popleft()
            self._go(held)
        del self._queues[key]

    def _go(self, held: _Held) -> None:
        if held.work.done():  # The op was withdrawn, or the communicator is lost.
            return
        try:
            held.post()
        except CommError as error:
            conclude(held.work, error)
        except Exception as error:
            held.transport.on_failure(broken(held.transport, "post", error))
        self._core.driver.poll_soon(held.transport)


class Between:
    """The wrapper of one transport, through which a communicator posts its ops.

    Attributes that this class does not define are those of the transport.
    """

    link: Link

    def __init__(self, transport: Transport, link: Link) -> None:
        self._transport, self.link = transport, link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post(self, op: ops.Op, work: Completion) -> float | None:
        """See :meth:`Transport.post`."""
        return self.link.post(self._transport, self._transport.post, op, work, None)

    def post_in_lane(self, op: ops.Op, lane: int, work: Completion) -> float | None:
        """See :meth:`LaneTransport.post_in_lane`."""

        def send(op: ops.Op, work: Completion) -> float | None:
            return cast("LaneTransport", self._transport).post_in_lane(op, lane, work)

        return self.link.post(self._transport, send, op, work, lane)

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`."""
        return self.link.carries(work) or self._transport.try_cancel(self.link.known_as(work))

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """See :meth:`Transport.waiting_for`."""
        return () if self.link.carries(work) else self._transport.waiting_for(self.link.known_as(work))


def link_of(comm: Communicator) -> Link:
    """Return the link of a communicator.

    After the first call for a communicator, all ops of that communicator go through the link.
    """
    core = comm._core
    for known in core.by_family.values():
        if isinstance(known, Between):
            return known.link
    link = Link(comm)
    between: dict[Transport, Any] = {
        transport: type(type(transport).__name__, (Between,), {})(transport, link) for transport in core.transports
    }  # Errors quote the name of the class.
    core.by_family.update({family: between[transport] for family, transport in core.by_family.items()})
    core.router.decide_anew()
    comm.register_pre_hook(lambda op, seq: None)  # Native code starts no op while there is a hook.
    return link


def different(op: ops.Op, differs: Differs, size: int) -> ops.Op:
    """Return a changed op that does not match the op of the other ranks.

    If the dtype or size changes, the changed op has copies of the tensors.

    :raises UnsupportedOperation: ``differs`` is ``"root"``, but the op has no root. Such an op is one of the messages
        of a collective.
    """
    if isinstance(op, ops.CollectiveBatch):
        *others, last = op.parts
        return ops.CollectiveBatch((*others, different(last, differs, size)))
    fields = {name: getattr(op, name) for name in op.__struct_fields__}
    if differs == "root":
        if "root" not in fields:
            raise UnsupportedOperation("mismatch(differs='root'): no transport of this communicator carries the op "
                                       "itself, and a message that it is made of has no root")  # fmt: skip
        return msgspec.structs.replace(op, root=(fields["root"] + 1) % size)
    change = _of_other_dtype if differs == "dtype" else _of_other_size
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            changed[name] = change(value.detach())
        elif isinstance(value, tuple) and any(isinstance(item, torch.Tensor) for item in value):
            changed[name] = tuple(change(tensor.detach()) for tensor in value)
    return msgspec.structs.replace(op, **changed)


def _of_other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex64 if tensor.dtype == torch.complex128 else torch.complex128)
    if tensor.is_floating_point():
        return tensor.to(torch.float32 if tensor.dtype == torch.float64 else torch.float64)
    return tensor.to(torch.int32 if tensor.dtype == torch.int64 else torch.int64)


def _of_other_size(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).repeat(2) if tensor.numel() else tensor.new_zeros(1)


def _name(op: ops.Op) -> str:
    return STREAM if getattr(op, "channel", ops.USER) in (ops.STREAM, ops.STREAM_DATA) else op.name


def _order(op: ops.Op, lane: int | None) -> Hashable:
    """Return a key for an op; ops with the same key must not overtake each other."""
    if isinstance(op, (ops.Send, ops.Recv)):
        return op.name, op.dst if isinstance(op, ops.Send) else op.src, op.channel, op.tag
    return op.family, lane


def _nbytes(op: ops.Op) -> int:
    """Return the number of bytes that a rank sends for an op.

    For an op that works in place, return the number of bytes of the op's tensors.
    """
    if isinstance(op, ops.CollectiveBatch):
        return sum(map(_nbytes, op.parts))
    buffers = op.reads() or ([] if isinstance(op, ops.Recv) else op.writes())
    return sum(tensor.nbytes for _, tensor in buffers)


def _in_memory(store: Any) -> bool:
    """Return whether the ranks that use a store share one process."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store is None or isinstance(store, HashStore)
