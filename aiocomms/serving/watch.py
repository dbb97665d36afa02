"""The hooks of a service, which outlive its communicators, and its counts: what plans tell those who look on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple, cast

from aiocomms.communicator.communicator import Communicator
from aiocomms.progress.hooks import Hooks
from aiocomms.serving.statistics import Counts

Carrier = dict[str, str]
"""Texts by their keys that travel with a plan, whose meaning is that of the hooks."""


class PlanStart(NamedTuple):
    """A plan that is about to be carried out on this rank, for plan hooks."""

    number: int
    """The same on all ranks."""
    comm: Communicator
    waited: float
    """Seconds from the call on rank 0, or from the arrival on another rank."""
    carrier: Carrier
    """The texts that the carrier hooks of rank 0 have given it; empty: none have."""


CarrierHook = Callable[[Carrier], object]
"""A function that adds to the texts that travel with a plan."""
PlanHook = Callable[[PlanStart], AbstractContextManager[object]]
"""A function that returns what a plan is carried out within."""
CommHook = Callable[[Communicator], object]
"""A function that is given the communicator of a service, and each one that follows."""


class Watch:
    """The counts and hooks of one service, for its plans."""

    def __init__(self) -> None:
        self.counts: Counts = Counts()
        self.carrier_hooks: Hooks = Hooks()
        self.plan_hooks: Hooks = Hooks()
        self.comm_hooks: Hooks = Hooks()

    def carrier(self) -> Carrier:
        """Return what travels with a plan that is called now."""
        carrier: Carrier = {}
        self.carrier_hooks.ask(carrier)
        return carrier

    def begin(self, start: PlanStart) -> AbstractContextManager[object]:
        """Count that a plan begins, and return what it is carried out within."""
        self.counts.waited.note(start.waited)
        if not self.plan_hooks:
            return nullcontext()
        with ExitStack() as stack:
            for hook in list(self.plan_hooks):
                stack.enter_context(cast("AbstractContextManager[object]", hook._fn(start)))
            return stack.pop_all()
        raise AssertionError

    def follow(self, comm: Communicator) -> None:
        """Count a recovery, and tell that another communicator has taken the place of the lost one."""
        self.counts.recoveries += 1
        self.comm_hooks.call(comm._core.driver, comm)
