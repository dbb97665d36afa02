"""The statistics of a service: counts of its plans over all recoveries, which any thread may read at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from aiocomms.diagnosis.durations import Durations
from aiocomms.errors import ServiceBusyError
from aiocomms.lowlevel import clock


class PlanFailures(msgspec.Struct, frozen=True):
    """The number of plans of a service that have failed on this rank with one class of error."""

    error: str
    """The name of the error's class, such as ``"PlanLostError"``."""
    count: int


class ServiceStatistics(msgspec.Struct, frozen=True):
    """One rank's view of a service at one time. The counts cover this process and all communicators of the service.

    Rank 0 counts each call of :meth:`Driver.run`, ``run_in_order`` and ``stream`` once, even if the plan needs several
    attempts. Every other rank counts the plans that it receives.
    """

    name: str
    """The communicator's name before any reconfiguration."""
    rank: int
    done: int
    """Plans that have ended without an error."""
    failed: Sequence[PlanFailures]
    """Plans that have failed, by the class of the error; the most frequent first."""
    cancelled: int
    """Plans whose caller was cancelled; on a worker, the plans that rank 0 has given up for any reason."""
    refused: int
    """Plans refused with a :class:`~aiocomms.errors.ServiceBusyError`; only rank 0 refuses."""
    running: int
    """Plans under way, also in-order plans behind another one, and on rank 0 plans that still run on other ranks."""
    waiting: int
    """Plans that wait for their turn, on rank 0."""
    oldest: float | None
    """Seconds for which the oldest plan has been under way; None: no plan is."""
    recoveries: int
    """The number of communicators that have replaced a lost one."""
    took: Durations
    """Durations of finished plans in seconds. On rank 0 they reach from the call to the end on all ranks, on a worker
    from the plan's arrival to its end there."""
    waited: Durations
    """Seconds from the call or arrival until ``execute`` was called here; each attempt of a plan counts."""


class Counts:
    """The counts of one service on this rank, written on the loop's thread only and read on any thread."""

    def __init__(self) -> None:
        self.done = self.cancelled = self.refused = self.waiting = self.recoveries = 0
        self.failed: dict[str, int] = {}
        self.took, self.waited = Durations(), Durations()

    def finish(self, called: float) -> None:
        """Count a finished plan.

        :param called: the time of the plan's call or arrival, by ``clock.now()``.
        """
        self.done += 1
        self.took.note(clock.now() - called)

    def fail(self, error: BaseException) -> None:
        """Count a failed or refused plan."""
        if isinstance(error, ServiceBusyError):
            self.refused += 1
        else:
            name = type(error).__name__
            self.failed[name] = self.failed.get(name, 0) + 1

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of a method of the driver. The outcome of the block decides which count grows."""
        called = clock.now()
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise
        except BaseException:
            self.cancelled += 1
            raise
        else:
            self.finish(called)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count a plan as waiting until the block ends."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def failures(self) -> Sequence[PlanFailures]:
        """Return the failures by class of error, the most frequent first. Safe on any thread."""
        failed = [PlanFailures(*each) for each in dict(self.failed).items()]
        return sorted(failed, key=lambda each: -each.count)
