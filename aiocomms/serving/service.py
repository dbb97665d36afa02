"""The class ``Service``: one rank of a service, and what becomes of it when the communicator is lost."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

import anyio

from aiocomms.communicator import Communicator
from aiocomms.errors import ArgumentError, CommError
from aiocomms.serving.current import CurrentComm
from aiocomms.serving.driver import Driver
from aiocomms.serving.plans import Execute, Worker
from aiocomms.serving.signals import stop_signals

Recover = Callable[[Communicator], Awaitable[Communicator]]
"""Takes a lost communicator and returns the one that goes on in its place."""

_log = logging.getLogger("aiocomms")


class Service:
    """One rank of a service: rank 0 drives, every other rank works. ``async with`` closes the communicator at the end.

    :param comm: the communicator of all ranks; it is the service's from now on.
    :param recover: what to do when it is lost, on every rank that is left: an async function that is given the lost
        communicator and returns the new one, as ``lambda lost: lost.reconfigure(size=lost.size)`` does. Here a model
        takes its new part. None: the loss is the end, for a layer that is split over ranks is wrong with fewer.
    """

    def __init__(self, comm: Communicator, recover: Recover | None = None) -> None:
        self.comm = CurrentComm(comm)
        """What layers hold."""
        self._recover = recover
        self._numbers = itertools.count()

    @property
    def current(self) -> Communicator:
        """The communicator of the moment."""
        return self.comm.current

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.current.__aexit__(kind, error, trace)

    @contextlib.asynccontextmanager
    async def drive(self, execute: Execute) -> AsyncIterator[Driver]:
        """Give out plans, on rank 0. At the end of the block the plans under way end, and then the workers leave.

        If the block raises, or is cancelled, nobody is told, and nothing waited for: the end of the service does both.

        :param execute: an async function that carries out a plan here, as ``work`` is given on the other ranks.
        :raises ArgumentError: this is not rank 0.
        """
        if self.comm.rank != 0:
            raise ArgumentError("rank 0 drives, and the others work()", comm=self.comm.name, rank=self.comm.rank)
        failure: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            driver = Driver(self.comm, self._numbers, self._replace, execute, tasks)
            tasks.start_soon(driver._keep)
            try:
                yield driver
                await driver._drain()
            except (anyio.get_cancelled_exc_class(), GeneratorExit):
                raise
            except BaseException as error:  # raised below, for the group would put it into another
                failure = error
            finally:
                driver._end()
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def work(self, execute: Execute) -> None:
        """Carry out plans, on every rank but 0, until the driver ends; idle for hours, if there are none.

        Meanwhile SIGINT and SIGTERM do not end this process if this is the main thread: rank 0 got them, too, and
        ends the workers when it has drained. If it does not, its death is noticed.

        :param execute: an async function that carries out a plan. What it raises, its plan's ``run`` raises on rank 0.
        :raises ArgumentError: this is rank 0.
        :raises CommError: the communicator was lost, and there is no ``recover``; or what that raises.
        """
        with stop_signals():
            while True:
                comm = self.current
                if comm.rank == 0:
                    raise ArgumentError("rank 0 drives, and does not work()", comm=comm.name, rank=0)
                failure = await Worker(comm, execute).run()
                if failure is None:
                    return
                if not comm.aborted:
                    raise failure
                await self._replace(failure)

    async def _replace(self, failure: CommError) -> None:
        if self._recover is None:
            _log.error("the service cannot go on: %s", failure)
            raise failure
        _log.warning("recovering: %s", failure)
        self.comm.turn_to(await self._recover(self.current))
