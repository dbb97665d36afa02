"""The hooks and counts of a service, which outlive its communicators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple, cast

from aiocomms.communicator.communicator import Communicator
from aiocomms.progress.hooks import Hooks
from aiocomms.serving.statistics import Counts

Carrier = dict[str, str]
"""Texts that travel with a plan, by keys that the hooks choose."""


class PlanStart(NamedTuple):
    """A plan that is about to be carried out on this rank, for plan hooks."""

    number: int
    """The number of the plan, the same on all ranks."""
    comm: Communicator
    waited: float
    """Seconds since the call on rank 0, or since the arrival on another rank."""
    carrier: Carrier
    """The texts from the carrier hooks of rank 0; empty without such hooks."""


CarrierHook = Callable[[Carrier], object]
"""A function that adds texts to the carrier of a plan."""
PlanHook = Callable[[PlanStart], AbstractContextManager[object]]
"""A function that returns the context manager around a plan."""
CommHook = Callable[[Communicator], object]
"""A function that takes the communicator of a service, and each later one."""


class Watch:
    """The counts and hooks of one service."""

    def __init__(self) -> None:
        self.counts: Counts = Counts()
        self.carrier_hooks: Hooks = Hooks()
        self.plan_hooks: Hooks = Hooks()
        self.comm_hooks: Hooks = Hooks()

    def carrier(self) -> Carrier:
        """Return the carrier, filled by the carrier hooks, for a new plan."""
        carrier: Carrier = {}
        self.carrier_hooks.ask(carrier)
        return carrier

    def begin(self, start: PlanStart) -> AbstractContextManager[object]:
        """Count the start of a plan, and return the context manager within which the plan runs."""
        self.counts.waited.note(start.waited)
        if not self.plan_hooks:
            return nullcontext()
        with ExitStack() as stack:
            for hook in list(self.plan_hooks):
                stack.enter_context(cast("AbstractContextManager[object]", hook._fn(start)))
            return stack.pop_all()
        raise AssertionError

    def follow(self, comm: Communicator) -> None:
        """Count a recovery, and call the hooks with the communicator that replaces the lost one."""
        self.counts.recoveries += 1
        self.comm_hooks.call(comm._core.driver, comm)
