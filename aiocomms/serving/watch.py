"""The hooks and counts of a service. A recovery replaces the communicator, but not the hooks and counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple, cast

from aiocomms.communicator.communicator import Communicator
from aiocomms.progress.hooks import Hooks
from aiocomms.serving.statistics import Counts

Carrier = dict[str, str]
"""A dictionary of strings that rank 0 sends with a plan. The carrier hooks choose the keys."""


class PlanStart(NamedTuple):
    """A plan that is about to run on this rank. Each plan hook gets this object as its argument."""

    number: int
    """The number of the plan. All ranks use the same number."""
    comm: Communicator
    waited: float
    """The seconds since the plan's call (on rank 0) or since the plan's arrival (on another rank)."""
    carrier: Carrier
    """The strings from the carrier hooks of rank 0; empty if rank 0 has no carrier hooks."""


CarrierHook = Callable[[Carrier], object]
"""A function that adds strings to the carrier of a plan."""
PlanHook = Callable[[PlanStart], AbstractContextManager[object]]
"""A function that returns the context manager within which a plan runs."""
CommHook = Callable[[Communicator], object]
"""A function that gets the communicator of a service, and later each communicator that replaces a lost one."""


class Watch:
    """The counts and hooks of one service."""

    def __init__(self) -> None:
        self.counts: Counts = Counts()
        self.carrier_hooks: Hooks = Hooks()
        self.plan_hooks: Hooks = Hooks()
        self.comm_hooks: Hooks = Hooks()

    def carrier(self) -> Carrier:
        """Return a carrier for a new plan, with the strings that the carrier hooks add."""
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
