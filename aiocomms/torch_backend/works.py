"""What the operations of a process group return: works of ``torch.distributed`` that can be awaited, too."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from aiocomms.errors import ArgumentError, CommError, UnsupportedOperation
from aiocomms.portal.works import BlockingWork
from aiocomms.progress.loops import Waiter, running_loop

logger = logging.getLogger("aiocomms")


@contextlib.contextmanager
def raising_as_torch_does() -> Generator[None, None, None]:
    """Raise what ends a group as :class:`torch.distributed.DistBackendError`, and what is asked wrongly as it is."""
    try:
        yield
    except (ArgumentError, UnsupportedOperation):
        raise
    except (CommError, TimeoutError) as error:
        raise dist.DistBackendError(str(error)) from error


class Completer:
    """A thread that calls what is to be done when works have ended, in their order; there once somebody has asked.

    It is a daemon: what it calls is the program's, and may wait for a rank that never comes.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Be there."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="aiocomms torch", daemon=True)
                self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """Have something called; on any thread, which it does not keep."""
        self._calls.put(call)

    def close(self) -> None:
        """End, after what is still to be called."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("%r raised", call)


class GroupWork(dist.Work):
    """One call of ``torch.distributed``, of which aiocomms has started one operation or several.

    It completes by itself, whoever waits. To wait for it twice, on several threads, or never is fine. What fails is
    raised by each way to wait, as :class:`torch.distributed.DistBackendError`, whose cause is the error of aiocomms.
    """

    def __init__(
        self,
        parts: Sequence[BlockingWork[Any]],
        outputs: list[Tensor],
        finish: Callable[[], None] | None,
        completer: Completer,
        source: int = -1,
    ) -> None:
        """Note what it consists of.

        :param outputs: the tensors that are written.
        :param finish: what remains to be done once, when all parts have ended well.
        :param completer: calls what is done when all have ended, if somebody asks for a future.
        :param source: the rank that a message is received from.
        """
        super().__init__()
        self._parts, self._outputs, self._finish = parts, outputs, finish
        self._completer, self._source = completer, source
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Tensor]] | None = None

    # ---------------------------------------------------------------------------------------- as torch calls them

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block this thread until it is done.

        :param timeout: the caller's patience; 0, or less: the deadline of the group says.
        :returns: True.
        :raises DistBackendError: it failed; or it was not done in time, and goes on.
        """
        patience = timeout.total_seconds()
        with raising_as_torch_does():
            for part in self._parts:
                part.wait(patience if patience > 0 else None)
        if self._finish is not None:
            self._end()
        return True

    def synchronize(self) -> None:
        """Block this thread until it is done."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return all(part.done() for part in self._parts)

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return why it has failed; None: it has not, or is not done."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        """Block until it is done, and return the tensors that it has written."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return self._source

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors that are written.

        It ends by itself, on a thread of the group, or within this call. No loop of the caller's takes part.
        """
        with self._lock:
            asked, self._future = self._future, self._future or torch.futures.Future()
        if asked is None and self.is_completed():
            self._fulfil()
        elif asked is None:
            self._completer.start()
            self._when_done(lambda: self._completer.submit(self._fulfil))
        return self._future

    # ------------------------------------------------------------------------------------------ as aiocomms has it

    def __await__(self) -> Generator[Any, Any, list[Tensor]]:
        """Suspend the task of asyncio or trio until it is done, and return the tensors that it has written.

        A task that is cancelled leaves it alone: it goes on, as it would without anybody.
        """
        if not self.is_completed():
            loop, over = running_loop(), _Over()
            self._when_done(lambda: loop.call_threadsafe(over.come))
            yield from loop.park(over)
        return self.result()

    # ---------------------------------------------------------------------------------------------------- inside

    def _end(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def _when_done(self, call: Callable[[], object]) -> None:
        """Call it when all parts have ended: here and now, or on the thread that ends the last."""
        left = [part for part in self._parts if not part.done()]
        if not left:
            call()
            return
        count, lock = len(left), threading.Lock()

        def one_less() -> None:
            nonlocal count
            with lock:
                count -= 1
                last = not count
            if last:
                call()

        for part in left:
            part.add_done_callback(one_less)

    def _fulfil(self) -> None:
        assert self._future is not None
        try:
            self._future.set_result(self.result())
        except Exception as error:
            self._future.set_exception(error)  # type: ignore[arg-type] # torch checks for an Exception


class _Over:
    """What a task waits for; see :class:`aiocomms.progress.loops.Parkable`."""

    def __init__(self) -> None:
        self.waiting: list[Waiter] = []

    def come(self) -> None:
        """Resume the task; on its loop's thread."""
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    def detach(self, waiter: Waiter) -> None:
        """See :meth:`aiocomms.progress.loops.Parkable.detach`."""
        self.waiting.remove(waiter)
