"""The store at which simulated ranks meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, HashStore, Store

from aiocomms.lowlevel.jobstore import JobStore
from aiocomms.lowlevel.storeserver import perform


class SimulatedStore(JobStore):
    """The store of a world. It answers at once, or, when it has died, not any more."""

    def __init__(self) -> None:
        Store.__init__(self)
        self.host, self.port = "simulated", 1
        self._server = self._connection = None
        self._kept = HashStore()
        self.dead = False
        self.set_timeout(timedelta(seconds=300))

    def _ask(self, what: str, *args: Any) -> Any:
        if self.dead:
            raise DistNetworkError("the connection with it was lost")
        return perform(self._kept, what, args)
