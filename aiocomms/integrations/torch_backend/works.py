"""The works that a process group returns: works of ``torch.distributed`` that can be awaited, too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch import distributed as dist

from aiocomms.blocking.compound import CompoundWork
from aiocomms.errors import ArgumentError, CommError, CommTimeoutError, UnsupportedOperation
from aiocomms.integrations.torch_backend.completer import Completer
from aiocomms.integrations.torch_backend.parts import WorkPart, order_stream, wait_for, when_done
from aiocomms.integrations.torch_backend.ranges import WorkRange
from aiocomms.progress.loops import Waiter, running_loop

BACKEND: Final = "aiocomms"
"""The name of the backend."""


@contextlib.contextmanager
def raising_as_torch_does() -> Generator[None, None, None]:
    """Raise what ends a group as :class:`torch.distributed.DistBackendError`, and what is asked wrongly as it is."""
    try:
        yield
    except (ArgumentError, UnsupportedOperation):
        raise
    except CommTimeoutError as error:
        raise dist.DistBackendError(f"[{BACKEND}] Timed out in {error}") from error  # Programs look for these words.
    except (CommError, TimeoutError) as error:
        raise dist.DistBackendError(str(error)) from error


class GroupWork(CompoundWork):
    """One call of ``torch.distributed``, for which aiocomms has started one operation or several.

    It completes by itself, whether or not a thread waits. To wait for it twice, on several threads, or never is fine.
    What fails is raised by each way to wait, as :class:`torch.distributed.DistBackendError`, whose cause is the error
    of aiocomms.
    """

    _parts: Sequence[WorkPart]

    def __init__(
        self,
        parts: Sequence[WorkPart],
        outputs: list[Tensor],
        completer: Completer,
        source: Callable[[], int] = lambda: -1,
        *,
        ordered: bool = False,
    ) -> None:
        """Note what it consists of.

        :param outputs: the tensors that are written.
        :param completer: completes the future, if one is asked for.
        :param source: says, once it is done, which rank a message came from.
        :param ordered: whether the current stream of who waits waits in the place of the thread.
        """
        super().__init__()
        self._ordered = ordered
        self._parts, self._outputs, self._completer, self._source = parts, outputs, completer, source
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Tensor]] | None = None

    @classmethod
    def of_all(cls, works: Sequence[GroupWork], completer: Completer) -> Self:
        """One that is done when all of some are."""
        outputs = [tensor for work in works for tensor in work._outputs]
        ordered = any(work._ordered for work in works)
        return cls([part for work in works for part in work._parts], outputs, completer, ordered=ordered)

    def within(self, span: WorkRange) -> Self:
        """Have a profiler's range end with it; no thread has waited for it yet."""
        if self._ordered:  # No thread need wait for it.
            when_done(self._parts, lambda: self._completer.submit(span.end), waits=False)
        else:
            self._parts = span.around(list(self._parts), self._completer)
        return self

    # ---------------------------------------------------------------------------------------- as torch calls them

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block this thread until it is done; or, of tensors on a GPU, have its current stream wait until it is.

        Then the thread waits for no more than the launch, but for messages, barriers, tensors that are not contiguous,
        and what is made of messages: these have ended when this returns.

        :param timeout: the caller's patience, with which the thread waits for the GPU, too; 0, or less: the deadline of
            the group says.
        :returns: True.
        :raises torch.distributed.DistBackendError: it failed; or it was not done in time, and goes on.
        """
        patience = timeout.total_seconds()
        with raising_as_torch_does():
            if self._ordered and patience <= 0:
                order_stream(self._parts)
            else:
                wait_for(self._parts, patience if patience > 0 else None)
        return True

    def result(self) -> list[Tensor]:
        """Block until it is done, and return the tensors that it has written."""
        with raising_as_torch_does():
            wait_for(self._parts, None)
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors that are written.

        It ends by itself, on a thread of the group, or within this call. No loop of the caller's takes part. If the
        work fails, what waits for the future raises ``RuntimeError`` with the error's text, as torch's futures do.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            gpus: list[int | str | torch.device] = [*{tensor.device for tensor in self._outputs if tensor.is_cuda}]
            ended: torch.futures.Future[None] = torch.futures.Future(devices=gpus)
            # An exception that a callback raises is an error for torch's C++, too. One that set_exception sets is a
            # value there.
            self._future = ended.then(lambda _: self.result())
        if self.is_completed():
            ended.set_result(None)
        else:
            when_done(self._parts, lambda: self._completer.submit(lambda: ended.set_result(None)))
        return self._future

    # ------------------------------------------------------------------------------------------ as aiocomms has it

    def __await__(self) -> Generator[Any, Any, list[Tensor]]:
        """Suspend the task of asyncio or trio until it is done, and return the tensors that it has written.

        A task that is cancelled leaves it alone: it goes on, as it would without an awaiter.
        """
        if not self.is_completed():
            loop, over = running_loop(), _Over()
            when_done(self._parts, lambda: loop.call_threadsafe(over.come))
            yield from loop.park(over)
        return self.result()


class _Over:
    """The end of a work, for which a task waits; see :class:`aiocomms.progress.loops.Parkable`."""

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
