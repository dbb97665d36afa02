"""The works of reads and writes: works of ``torch.distributed``, which the engine completes."""

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
    """A read or a write. It ends by itself, whether it is waited for twice, on several threads, or never.

    The deadline of a wait is the waiting thread's patience; the transfer goes on.
    """

    _parts: Sequence[BlockingWork[Any]]

    def __init__(self, steps: Sequence[BlockingWork[Any]], patience: float) -> None:
        """Note what it consists of.

        :param patience: of a wait that names none, in seconds.
        """
        super().__init__()
        self._parts, self._patience = steps, patience
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._settled = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block this thread until it has ended.

        :param timeout: the caller's patience; 0: that of the transfer.
        :returns: True.
        :raises TimeoutError: it has not ended by then, and goes on.
        :raises CommError: it has failed.
        """
        patience = timeout.total_seconds()
        self.wait_for(patience if patience > 0 else self._patience)
        return True

    def wait_for(self, patience: float) -> None:
        """Do that, with a patience in seconds, which may be 0."""
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
        """Block until it has ended, and return an empty list."""
        self.wait()
        return []

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of an empty list, or of the error.

        It ends within this call or on the transport's thread, on which its callbacks then run: they must not block.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        for step in self._parts:
            step.add_done_callback(self._settle)
        return self._future

    def _settle(self) -> None:
        """Note that a step has ended; with the last one the future does."""
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
