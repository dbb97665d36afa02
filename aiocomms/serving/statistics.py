"""The statistics of a service: plain counts of its plans, over recoveries, which any thread may read at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from aiocomms.diagnosis.durations import Durations
from aiocomms.errors import ServiceBusyError
from aiocomms.lowlevel import clock


class PlanFailures(msgspec.Struct, frozen=True):
    """The number of plans of a service that have failed on this rank by one class of errors."""

    error: str
    """The class of the error, as ``"PlanLostError"``."""
    count: int


class ServiceStatistics(msgspec.Struct, frozen=True):
    """One rank's view of a service at one time. Counts are of this process, over all of its communicators.

    Rank 0 counts the calls of :meth:`Driver.run` and its like, each once, also one that is carried out again after a
    loss. Every other rank counts the plans that it was given.
    """

    name: str
    """The communicator's, as it was before any reconfiguration."""
    rank: int
    done: int
    """Plans that have ended without an error."""
    failed: Sequence[PlanFailures]
    """Plans that have failed, by the class of the error that was raised; the most frequent first."""
    cancelled: int
    """Plans whose caller has left; on a rank that works, those that rank 0 has given up for whatever reason."""
    refused: int
    """Plans that were refused by a :class:`~aiocomms.errors.ServiceBusyError`; rank 0 alone refuses."""
    running: int
    """Plans under way, also those in order behind another one, and on rank 0 those that other ranks have not ended."""
    waiting: int
    """Plans that wait for their turn, on rank 0."""
    oldest: float | None
    """Seconds for which the oldest plan has been under way; None: there is none."""
    recoveries: int
    """The number of times that another communicator has taken the place of a lost one."""
    took: Durations
    """The seconds of the plans that are done: from the call to the end on all ranks, or, on a rank that works, from
    the plan's arrival to its end there."""
    waited: Durations
    """The seconds until ``execute`` was called here, from the same moment on; each attempt of a plan counts."""


class Counts:
    """The counts of one service on this rank. They are written on the loop's thread only, and read on any."""

    def __init__(self) -> None:
        self.done = self.cancelled = self.refused = self.waiting = self.recoveries = 0
        self.failed: dict[str, int] = {}
        self.took, self.waited = Durations(), Durations()

    def finish(self, called: float) -> None:
        """Count a plan that is done.

        :param called: when it was called or has arrived, by the clock.
        """
        self.done += 1
        self.took.note(clock.now() - called)

    def fail(self, error: BaseException) -> None:
        """Count a plan that has failed, or was refused."""
        if isinstance(error, ServiceBusyError):
            self.refused += 1
        else:
            name = type(error).__name__
            self.failed[name] = self.failed.get(name, 0) + 1

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of the driver by how the block ends."""
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
        """Count a plan that waits for its turn."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def failures(self) -> Sequence[PlanFailures]:
        """Return why plans have failed; any thread."""
        failed = [PlanFailures(*each) for each in dict(self.failed).items()]
        return sorted(failed, key=lambda each: -each.count)
