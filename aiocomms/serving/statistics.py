"""The statistics of a service: counts of its plans, also from before recoveries. Any thread may read them."""

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
    """The statistics of a service on one rank. The counts include all communicators of the service in this process.

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
    """Plans whose caller was cancelled; on a worker, the plans that rank 0 has cancelled for any reason."""
    refused: int
    """Calls that raised a :class:`~aiocomms.errors.ServiceBusyError`; 0 on workers."""
    running: int
    """Running plans, including in-order plans that wait for an earlier one. On rank 0 also plans that still run on
    other ranks."""
    waiting: int
    """Plans that wait on rank 0 until they may begin; 0 on workers."""
    oldest: float | None
    """Seconds since the start of the oldest running plan; None if no plan runs."""
    recoveries: int
    """The number of communicators that have replaced a lost communicator."""
    took: Durations
    """Durations of successful plans in seconds. On rank 0, a duration lasts from the call to the end on all ranks. On a
    worker, it lasts from the plan's arrival to the plan's end on this worker."""
    waited: Durations
    """Seconds from a plan's call (on a worker: its arrival) until the call of ``execute`` on this rank. Each attempt of
    a plan counts separately."""


class Counts:
    """The counts of one service on this rank. Only the loop's thread changes them, and any thread may read them."""

    def __init__(self) -> None:
        self.done = self.cancelled = self.refused = self.waiting = self.recoveries = 0
        self.failed: dict[str, int] = {}
        self.took, self.waited = Durations(), Durations()

    def finish(self, called: float) -> None:
        """Count a finished plan.

        :param called: the ``clock.now()`` at the plan's call, or at its arrival on a worker.
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
        """Return the failures by class of error, the most frequent first. Thread-safe."""
        failed = [PlanFailures(*each) for each in dict(self.failed).items()]
        return sorted(failed, key=lambda each: -each.count)
