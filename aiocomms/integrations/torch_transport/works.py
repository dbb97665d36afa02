"""The ``torch.distributed`` works of reads and writes. The transport engine completes these works."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from aiocomms.blocking import BlockingWork
from aiocomms.blocking.compound import CompoundWork
from aiocomms.lowlevel import clock


class TransferWork(CompoundWork):
    """The work of a read or a write. Any number of threads may wait for the work, any number of times.

    The work completes even if no thread waits. After the timeout of a wait, the transfer continues.
    """

    _parts: Sequence[BlockingWork[Any]]

    def __init__(self, steps: Sequence[BlockingWork[Any]], patience: float) -> None:
        """Store the steps of the transfer.

        :param patience: the default timeout of a wait, in seconds.
        """
        super().__init__()
        self._parts, self._patience = steps, patience
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._settled = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block this thread until the transfer has ended.

        :param timeout: the longest time to wait. 0 stands for the transfer's default timeout.
        :returns: True.
        :raises TimeoutError: the transfer has not ended within the timeout. The transfer continues.
        :raises CommError: the transfer has failed.
        """
        patience = timeout.total_seconds()
        self.wait_for(patience if patience > 0 else self._patience)
        return True

    def wait_for(self, patience: float) -> None:
        """Block this thread until the transfer has ended, for at most ``patience`` seconds, which may be 0.

        This method raises the errors of :meth:`wait`.
        """
        ends, failure = clock.now() + patience, None
        for step in self._parts:
            try:
                step.wait(max(0.0, ends - clock.now()))
            except Exception as error:
                if not step.done():
                    raise
                failure = failure or error
        if failure is not None:
            raise failure

    def result(self) -> list[Tensor]:
        """Block until the transfer has ended, and return an empty list."""
        self.wait()
        return []

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future, whose value is an empty list. If the transfer fails, a wait for the future raises the error.

        The future completes during this call, or later on the transport's thread. The thread that completes the future
        also runs its callbacks, so the callbacks must not block.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        for step in self._parts:
            step.add_done_callback(self._settle)
        return self._future

    def _settle(self) -> None:
        """Record that a step has ended, and complete the future after the last step."""
        with self._lock:
            if self._settled or not self.is_completed():
                return
            self._settled = True
        assert self._future is not None
        error = self.exception()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is of a result
