"""The stores through which simulated ranks connect. If the launcher's store dies, a rank serves another store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, HashStore, Store

from aiocomms.lowlevel import clock
from aiocomms.lowlevel.jobstore import JobStore
from aiocomms.lowlevel.storeserver import perform
from aiocomms.testing.simulation.clockwork import Timeline
from aiocomms.testing.simulation.network import KEEPALIVE, SimulatedNetwork


class StoreService:
    """The service of one store. The service answers at once until it dies."""

    def __init__(self, process: Timeline | None = None) -> None:
        """Begin with an empty store.

        :param process: the process that serves the store. The service ends with the process. None: the service runs on
            a host without ranks.
        """
        self.process = process
        self.dead = False
        self._kept = HashStore()

    @property
    def over(self) -> bool:
        """True if the service no longer answers."""
        return self.dead or (self.process is not None and self.process.over)

    def perform(self, what: str, args: tuple[Any, ...]) -> Any:
        """Execute a request of a client."""
        return perform(self._kept, what, args)


class SimulatedStore(JobStore):
    """The client of a store. A partition between the client's process and the store's process delays the answers."""

    def __init__(self, service: StoreService, network: SimulatedNetwork, running: Callable[[], Timeline]) -> None:
        """Connect to a service.

        :param running: a function that returns the process that currently runs.
        """
        Store.__init__(self)
        self._service, self._network, self._running = service, network, running
        self.host, self.port = "simulated", 1
        self._server = self._connection = None
        self.set_timeout(timedelta(seconds=300))

    def reach(self, seconds: float) -> bool:
        """Block until the service answers, and return True.

        :param seconds: the largest number of seconds to block.
        :returns: False if the service is dead or does not answer in this time.
        """
        there, ends = self._service.process, clock.now() + seconds
        while there is not None and not self._service.over:
            held = self._network.held(self._running(), there)
            if not held:
                break
            if (left := ends - clock.now()) <= 0:
                return False
            clock.sleep(min(held, left))
        return not self._service.over

    def _ask(self, what: str, *args: Any) -> Any:
        if not self.reach(KEEPALIVE):
            raise DistNetworkError("the connection with it was lost")
        return self._service.perform(what, args)
