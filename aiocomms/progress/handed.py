"""Awaitable objects that have the methods of coroutines.

Such an object is informed if its task is cancelled before the first step of the task.

A task runs a coroutine by calls of the coroutine's ``send``. If the task is cancelled before its first step, the task
calls ``throw``. ``ensure_future`` wraps an awaitable without these methods into a coroutine. If the task is cancelled
before its first step, this coroutine never begins. So the awaitable would not be informed of the cancellation. For
example, a receive would stay pending, and would take the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

Steps = dict[object, Generator[Any, Any, Any]]
"""A mapping from each task that awaits an awaitable to the generator that runs in this task."""


class Handed(Generic[T_co]):
    """An awaitable that asyncio tasks can run as a coroutine.

    An ``await`` expression and trio do not call the methods of this class.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _steps: Steps | None

    def __await__(self) -> Generator[Any, Any, T_co]:
        raise NotImplementedError

    def _never_awaited(self) -> None:
        """Record that a task was cancelled before the task began to await this object."""
        raise NotImplementedError

    def send(self, value: Any) -> Any:
        """Begin or resume the current task's generator."""
        task = _task()
        if self._steps is None:
            self._steps = {}  # type: ignore[misc]  # The class that inherits this has the attribute.
        steps = self._steps.get(task)
        if steps is None:
            steps = self._steps[task] = self.__await__()
        return self._go_on(task, steps.send, value)

    def throw(self, error: BaseException, *_: object) -> Any:
        """Resume the current task's generator with an error. In most cases the error is a cancellation."""
        task = _task()
        steps = None if self._steps is None else self._steps.get(task)
        if steps is None:
            self._never_awaited()
            raise error
        return self._go_on(task, steps.throw, error)

    def close(self) -> None:
        """Record that no task will run this object.

        :class:`asyncio.TaskGroup` calls this method for a coroutine that the group refuses.
        """
        self._never_awaited()

    def _go_on(self, task: object, step: Callable[[Any], Any], value: Any) -> Any:
        assert self._steps is not None
        try:
            return step(value)
        except BaseException:  # The exception is mostly StopIteration, with the result.
            del self._steps[task]
            raise


def _task() -> object:
    from asyncio import current_task

    return current_task()
