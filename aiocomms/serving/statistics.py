"""The statistics of a service: counts of plans.

The counts cover all communicators that the service has had in this process. Any thread may read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from aiocomms.diagnosis.durations import Durations
from aiocomms.errors import ServiceBusyError
from aiocomms.lowlevel import clock


class PlanFailures(msgspec.Struct, frozen=True):
    """An error class, and the number of a service's plans that have failed on this rank with an error of this class."""

    error: str
    """The name of the error's class, such as ``"PlanLostError"``."""
    count: int


class ServiceStatistics(msgspec.Struct, frozen=True):
    """The statistics of a service on one rank.

    The counts cover all communicators that the service has had in this process.

    Rank 0 counts each call of :meth:`Driver.run`, ``run_in_order`` and ``stream`` once, even if the plan needs several
    attempts. Every other rank counts the plans that it receives.
    """

    name: str
    """The communicator's name before any reconfiguration."""
    rank: int
    done: int
    """The number of plans that have ended without an error."""
    failed: Sequence[PlanFailures]
    """The failed plans: one entry for each class of error. The most frequent class is first."""
    cancelled: int
    """The number of cancelled plans.

    Rank 0 counts the plans whose caller was cancelled. A worker counts the plans that rank 0 has cancelled for any
    reason.
    """
    refused: int
    """The number of calls that raised a :class:`~aiocomms.errors.ServiceBusyError`; 0 on workers."""
    running: int
    """The number of running plans, including in-order plans that wait for an earlier in-order plan.

    Rank 0 also counts the plans that have ended on rank 0 but still run on other ranks.
    """
    waiting: int
    """The number of plans that wait on rank 0 until they may begin; 0 on workers."""
    oldest: float | None
    """The seconds since the start of the oldest running plan; None if no plan runs."""
    recoveries: int
    """The number of communicators that have replaced a lost communicator."""
    took: Durations
    """The durations of successful plans, in seconds.

    On rank 0, a duration is the time from the plan's call to the plan's end on all ranks. On a worker, a duration is
    the time from the plan's arrival to the plan's end on this worker.
    """
    waited: Durations
    """The times for which plans waited before ``execute`` was called on this rank, in seconds.

    Such a time begins with the plan's call on rank 0, and with the plan's arrival on a worker. Each attempt of a plan
    counts separately.
    """


class Counts:
    """The counts of one service on this rank. Only the loop's thread changes them, and any thread may read them."""

    def __init__(self) -> None:
        self.done = self.cancelled = self.refused = self.waiting = self.recoveries = 0
        self.failed: dict[str, int] = {}
        self.took, self.waited = Durations(), Durations()

    def finish(self, called: float) -> None:
        """Count a finished plan.

        :param called: the value of ``clock.now()`` at the plan's call on rank 0, or at the plan's arrival on a worker.
        """
        self.done += 1
        self.took.note(clock.now() - called)

    def fail(self, error: BaseException) -> None:
        """Count a failed plan, or a call that raised a ``ServiceBusyError``."""
        if isinstance(error, ServiceBusyError):
            self.refused += 1
        else:
            name = type(error).__name__
            self.failed[name] = self.failed.get(name, 0) + 1

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of a driver's method. The outcome of the ``with`` block decides which counter is incremented."""
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
        """Count a plan as waiting until the ``with`` block ends."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def failures(self) -> Sequence[PlanFailures]:
        """Return the number of failures for each class of error, with the most frequent class first. Thread-safe."""
        failed = [PlanFailures(*each) for each in dict(self.failed).items()]
        return sorted(failed, key=lambda each: -each.count)
