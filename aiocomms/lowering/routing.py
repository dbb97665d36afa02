"""The choice between a transport, a schedule of messages and an error for each op type on a communicator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

from aiocomms import ops
from aiocomms.errors import CommError, UnsupportedOperation
from aiocomms.lowering.arrivals import FROM_ANY, Arrivals
from aiocomms.lowering.lane_abort import LaneAborts
from aiocomms.lowering.lane_messages import Turns
from aiocomms.lowering.loopback import Loopback
from aiocomms.lowering.runs import BatchRun, Offload, Poster, Run, RunPart, Steps
from aiocomms.lowering.schedules import SCHEDULES, Context
from aiocomms.lowering.tags import collective_tag, within
from aiocomms.progress.guard import guarded
from aiocomms.progress.inflight import LaneWork
from aiocomms.transport import Capabilities, Completion, LaneTransport, Transport

Route = Callable[[ops.Op, Completion], float | None]
"""The type of a function that starts an op, as :meth:`aiocomms.transport.Transport.post` does."""


LaneRoute = Callable[[ops.Op, int, LaneWork[Any]], float | None]
"""The type of a function that starts an op of a lane, as :meth:`aiocomms.transport.LaneTransport.post_in_lane` does."""


class Router(dict[type[ops.Op], Route]):
    """The route of each op type on one communicator.

    The route of an op type is chosen at the first call of that type.
    """

    def __init__(self, comm: Poster, transports: Mapping[ops.Family, Transport]) -> None:
        self._comm = comm
        self._transports = transports
        self._runs: weakref.WeakKeyDictionary[Completion, weakref.ref[Run]] = weakref.WeakKeyDictionary()
        """The runs of batches, and of ops that are executed as messages and may be withdrawn or stopped.

        Only the parts of a run keep the run alive.
        """
        self.loopback: Loopback = Loopback(comm.rank)
        self.arrivals: Arrivals = Arrivals(comm)
        self.turns: Turns = Turns(comm)
        self.lane_aborts: LaneAborts = LaneAborts(comm, self)
        self.within: LaneRoutes = LaneRoutes(self.decide_within)
        self.decide_anew()

    def decide_anew(self) -> None:
        """Forget all routes, so that later ops can go to other transports."""
        self.clear()
        self.within.clear()
        self[Offload] = self._comm.offload  # type: ignore[assignment]

    def __missing__(self, cls: type[ops.Op]) -> Route:
        route = self[cls] = self._decide(cls)
        return route

    def withdraw(self, work: Completion) -> bool:
        """Withdraw an unmatched receive, probe or ``wait_signal``; return False if the op is no longer unmatched."""
        if type(work.op) in FROM_ANY:
            return self.arrivals.withdraw(work)
        lowered = self._runs.get(work)
        if lowered is None:
            if self.loopback.carries(work.op):
                return self.loopback.withdraw(work)
            return guarded(False, self._transports[work.op.family].try_cancel, work)
        run = lowered()
        return run is not None and run.withdraw()

    def stop(self, number: int, error: CommError) -> list[ops.Send]:
        """End all pending ops of a lane; see :meth:`Run.stop` and :meth:`LaneTransport.give_up_lane`.

        :returns: the sends that may still be unmatched.
        """
        left = self.turns.stop(number, error)
        for work, ref in list(self._runs.items()):
            if isinstance(work, LaneWork) and work.number == number and (run := ref()) is not None:
                left += run.unfinished_sends()
                run.stop(error)
        self.arrivals.stop(number, error)
        if (transport := self._lane_carrier()) is not None:
            guarded(None, transport.give_up_lane, number, error)
        return left

    def post_at_once(self, op: ops.Recv, work: Completion) -> None:
        """See :meth:`Transport.post_at_once`."""
        if self.loopback.carries(op):
            self.loopback.recv(op, work)
        else:
            self._transports["p2p"].post_at_once(op, work)

    def forget(self, number: int, rank: int) -> None:
        """Forget a lane's messages from a rank; see :meth:`LaneTransport.forget_lane`."""
        if (transport := self._lane_carrier()) is not None:
            guarded(None, transport.forget_lane, number, rank)

    def _lane_carrier(self) -> LaneTransport | None:
        """Return the transport that executes the collectives of lanes natively; None if there is no such transport."""
        transport = self._transports.get("collectives")
        return cast("LaneTransport", transport) if transport is not None and transport.capabilities.lanes else None

    def carrier(self, op: ops.Op) -> Transport | None:
        """Return the transport that executes an op natively; None if there is no such transport."""
        transport = self._transports.get(op.family)
        return transport if transport is not None and type(op) in transport.capabilities.ops else None

    def _decide(self, cls: type[ops.Op]) -> Route:
        transport = self._transports.get(cls.family)
        if cls in FROM_ANY:
            return self.arrivals.call if self.carries_arrivals() else self._refuse
        lowers = cls in SCHEDULES and (cls in ops.RUNS or self._has_messages())
        fallback = self._lower if lowers else self._refuse
        if cls is ops.CollectiveBatch and transport is not None:
            post = transport.post if cls in transport.capabilities.ops else self._one_by_one
            return _where_it_batches(transport.capabilities, post, fallback)
        if transport is None or cls not in transport.capabilities.ops:
            return fallback
        if cls in (ops.Send, ops.Recv, ops.Probe, ops.Take):
            return self._unless_to_itself(cls, transport.post)
        if cls is ops.WindowClose:
            return self._without_waits(transport.post)
        return _where_it_reduces(cls, transport.capabilities, transport.post, fallback)

    def _one_by_one(self, op: ops.CollectiveBatch, work: Completion) -> None:
        """Start each collective of a batch."""
        self._run(_together(op), op, work)

    def awaited(self, work: Completion) -> Completion:
        """Return the object through which the transport completes an op.

        For a batch whose collectives run one by one, this is the object of the first pending collective. Any thread may
        call this method.
        """
        lowered = self._runs.get(work) if isinstance(work.op, ops.CollectiveBatch) else None
        run = None if lowered is None else lowered()
        return work if run is None else next(iter(run.unfinished()), work)

    def _without_waits(self, post: Route) -> Route:
        """Return the route of a window's close, which first withdraws this rank's waits for the window's signals."""

        def close(op: Any, work: Completion) -> float | None:
            window = op.window
            self._comm.withdraw_all("the window", lambda it: isinstance(it, ops.WaitSignal) and it.window is window)
            return post(op, work)

        return close

    def _unless_to_itself(self, cls: type[ops.Op], post: Route) -> Route:
        """Return a route for messages.

        Messages of this rank to itself use the loopback; all other messages use ``post``.
        """
        rank, loopback = self._comm.rank, self.loopback
        own: Callable[[Any, Completion], None] = loopback.recv
        if cls is not ops.Recv:
            own = loopback.probe if cls is ops.Probe else loopback.take

        def send(op: Any, work: Completion) -> float | None:
            return (post if op.dst != rank else loopback.send)(op, work)

        def recv(op: Any, work: Completion) -> float | None:
            return (post if op.src != rank else own)(op, work)

        return send if cls is ops.Send else recv

    def decide_within(self, cls: type[ops.Op]) -> LaneRoute:
        """Choose and return the route of an op type for ops on lanes."""
        if cls in FROM_ANY and not self.carries_arrivals():
            return self._refuse_within
        transport = self._lane_carrier()
        fallback = self._lower_within if self._has_messages() else self._refuse_within
        if transport is None or cls not in transport.capabilities.lanes:
            return fallback
        if cls is ops.CollectiveBatch:
            return _where_it_batches(transport.capabilities, transport.post_in_lane, fallback)
        return _where_it_reduces(cls, transport.capabilities, transport.post_in_lane, fallback)

    def _lower_within(self, op: ops.Op, lane: int, work: LaneWork[Any]) -> None:
        """Start an op of a lane as messages. A collective first waits for the lane's earlier collectives."""
        if op.family == "collectives":
            context = Context(self._comm, collective_tag(lane, op))
            self.turns.call(SCHEDULES[type(op)](context, op), work)
        elif type(op) in FROM_ANY:
            self.arrivals.call(within(op, lane), work)
        else:
            self._messages(within(op, lane), work)

    def adopt(self, work: LaneWork[Any], part: RunPart) -> None:
        """Continue a send or receive of a lane after native code has posted the message to the transport.

        :param part: the object through which the transport completes the message.
        """
        message = ops.Batch((within(work.op, work.number),))
        run = Run(self._comm, SCHEDULES[ops.Batch](Context(self._comm, 0), message), work)
        run.adopt(part)
        self._runs[work] = weakref.ref(run)

    def carries_arrivals(self) -> bool:
        """Return whether programs may probe and receive from any rank."""
        p2p = self._transports.get("p2p")
        return p2p is not None and p2p.capabilities.ops >= ops.ARRIVALS

    def _has_messages(self) -> bool:
        p2p = self._transports.get("p2p")
        return p2p is not None and ops.Send in p2p.capabilities.ops

    def _messages(self, op: Any, work: Completion) -> None:
        parts = ops.Batch((op,)) if isinstance(op, (ops.Send, ops.Recv)) else op
        self._run(SCHEDULES[type(parts)](Context(self._comm, 0), parts), op, work)

    def _lower(self, op: ops.Op, work: Completion) -> None:
        self._run(SCHEDULES[type(op)](Context(self._comm, collective_tag(self._comm.ledger.calls, op)), op), op, work)

    def _run(self, steps: Steps, op: ops.Op, work: Completion) -> None:
        run = (BatchRun if isinstance(op, ops.Batch) else Run)(self._comm, steps, work)
        if op.withdrawable or isinstance(op, ops.CollectiveBatch) or isinstance(work, LaneWork):
            self._runs[work] = weakref.ref(run)
        run.advance()

    def _refuse_within(self, op: ops.Op, lane: int, work: LaneWork[Any]) -> None:
        self._refuse(op, work)

    def _refuse(self, op: ops.Op, work: Completion) -> None:
        carriers = {family: type(transport).__name__ for family, transport in self._transports.items()}
        why = "no transport of this communicator carries it, nor can other ops express it"
        if isinstance(op, (ops.FetchAdd, ops.CompareSwap)):
            device = self._comm.device
            why = f"its transport has no atomics in windows on {device}"
            why += "" if device.type == "cpu" else "; a communicator on the CPU has windows with atomics"
        raise UnsupportedOperation(
            f"{why}; transports: {carriers}",
            comm=self._comm.name,
            op=op.name,
            rank=self._comm.rank,
        )


class LaneRoutes(dict[type[ops.Op], LaneRoute]):
    """The route of each op type on lanes: a transport with native lanes, or messages."""

    def __init__(self, decide: Callable[[type[ops.Op]], LaneRoute]) -> None:
        self._decide = decide

    def __missing__(self, cls: type[ops.Op]) -> LaneRoute:
        route = self[cls] = self._decide(cls)
        return route


def _where_it_reduces(
    cls: type[ops.Op],
    capabilities: Capabilities,
    post: Callable[..., float | None],
    fallback: Callable[..., float | None],
) -> Callable[..., float | None]:
    """Return a route that uses ``post`` if the transport supports the op's operator and dtype, and else ``fallback``.

    Return ``post`` itself if the transport supports every operator and dtype, or if the op type has no operator.
    """
    if capabilities.reductions is None or "op" not in cls.__struct_fields__:
        return post

    def reduce(op: Any, *rest: Any) -> float | None:
        return (post if _reduces(capabilities, op) else fallback)(op, *rest)

    return reduce


def _where_it_batches(
    capabilities: Capabilities, post: Callable[..., float | None], fallback: Callable[..., float | None]
) -> Callable[..., float | None]:
    """Return a route that uses ``post`` if the transport supports all collectives of the batch, else ``fallback``."""

    def batch(op: Any, *rest: Any) -> float | None:
        native = all(type(part) in capabilities.ops and _reduces(capabilities, part) for part in op.parts)
        return (post if native else fallback)(op, *rest)

    return batch


def _reduces(capabilities: Capabilities, op: Any) -> bool:
    """Return whether a transport supports the op's operator and dtype, or the op has no operator."""
    operator = getattr(op, "op", None)
    return operator is None or capabilities.reduces(operator, op.writes()[0][1].dtype)


def _together(op: ops.CollectiveBatch) -> Steps:
    """Post all collectives of a batch in one step."""
    yield list(op.parts)
