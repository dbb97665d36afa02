"""The works of a process group, which are works of ``torch.distributed`` that a coroutine can await."""

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
    """Convert errors within the block to :class:`torch.distributed.DistBackendError`, except errors about arguments."""
    try:
        yield
    except (ArgumentError, UnsupportedOperation):
        raise
    except CommTimeoutError as error:
        raise dist.DistBackendError(f"[{BACKEND}] Timed out in {error}") from error  # Programs look for these words.
    except (CommError, TimeoutError) as error:
        raise dist.DistBackendError(str(error)) from error


class GroupWork(CompoundWork):
    """The work of one call of ``torch.distributed``, for which aiocomms has started one or several operations.

    The work completes even if no thread waits for it. Any number of threads may wait for it, any number of times. If
    the work fails, each wait raises a :class:`torch.distributed.DistBackendError`. The ``__cause__`` of this error is
    the error of aiocomms.
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
        """Create the work of a call from the parts of the work.

        :param outputs: the tensors that the call writes.
        :param completer: the threads that complete the future, if the program requests a future.
        :param source: a function that returns the source rank of a message, once the work is done.
        :param ordered: True if :meth:`wait` makes the thread's current CUDA stream wait for the work, and does not
            block the thread until the work is done.
        """
        super().__init__()
        self._ordered = ordered
        self._parts, self._outputs, self._completer, self._source = parts, outputs, completer, source
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Tensor]] | None = None

    @classmethod
    def of_all(cls, works: Sequence[GroupWork], completer: Completer) -> Self:
        """Return a work that is done when all given works are done."""
        outputs = [tensor for work in works for tensor in work._outputs]
        ordered = any(work._ordered for work in works)
        return cls([part for work in works for part in work._parts], outputs, completer, ordered=ordered)

    def within(self, span: WorkRange) -> Self:
        """End a profiler's range when the work ends. Call this method before any thread waits for the work."""
        if self._ordered:  # The work need not wait for the end of the range.
            when_done(self._parts, lambda: self._completer.submit(span.end), waits=False)
        else:
            self._parts = span.around(list(self._parts), self._completer)
        return self

    # ---------------------------------------------------------------------------------------- as torch calls them

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block this thread until the work is done.

        With GPU tensors, make the thread's current CUDA stream wait for the work. The thread itself waits only until
        the operation is launched on the GPU. For some operations, the thread waits until the work is done: messages,
        barriers, operations with non-contiguous tensors, and collectives that aiocomms builds from messages.

        :param timeout: the longest time to wait. With a timeout above 0, the thread waits until the GPU has executed
            the operation. With a timeout of 0 or less, the group's deadline applies.
        :returns: True.
        :raises torch.distributed.DistBackendError: the work failed, or was not done within ``timeout``. In the second
            case, the work continues.
        """
        patience = timeout.total_seconds()
        with raising_as_torch_does():
            if self._ordered and patience <= 0:
                order_stream(self._parts)
            else:
                wait_for(self._parts, patience if patience > 0 else None)
        return True

    def result(self) -> list[Tensor]:
        """Block until the work is done, and return the written tensors."""
        with raising_as_torch_does():
            wait_for(self._parts, None)
        return self._outputs

    def source_rank(self) -> int:
        """Return the source rank of the received message."""
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the written tensors.

        The future completes on a thread of the group, or during this call. So the completion does not depend on the
        caller's event loop.
        If the work fails, a wait for the future raises ``RuntimeError`` with the error's text, as for torch's other
        futures.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            gpus: list[int | str | torch.device] = [*{tensor.device for tensor in self._outputs if tensor.is_cuda}]
            ended: torch.futures.Future[None] = torch.futures.Future(devices=gpus)
            # torch's C++ takes an exception of a callback for an error, but one from set_exception for a value.
            self._future = ended.then(lambda _: self.result())
        if self.is_completed():
            ended.set_result(None)
        else:
            when_done(self._parts, lambda: self._completer.submit(lambda: ended.set_result(None)))
        return self._future

    # ------------------------------------------------------------------------------------------ as aiocomms has it

    def __await__(self) -> Generator[Any, Any, list[Tensor]]:
        """Suspend the asyncio or trio task until the work is done, and return the written tensors.

        The cancellation of a task does not affect the work.
        """
        if not self.is_completed():
            loop, over = running_loop(), _Over()
            when_done(self._parts, lambda: loop.call_threadsafe(over.come))
            yield from loop.park(over)
        return self.result()


class _Over:
    """The object on which a task waits for a work's end; see :class:`aiocomms.progress.loops.Parkable`."""

    def __init__(self) -> None:
        self.waiting: list[Waiter] = []

    def come(self) -> None:
        """Resume the task. Call this method on the event loop's thread."""
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    def detach(self, waiter: Waiter) -> None:
        """See :meth:`aiocomms.progress.loops.Parkable.detach`."""
        self.waiting.remove(waiter)
