"""Awaitables with the methods of coroutines, which notice if a task is cancelled before it starts them.

A task drives a coroutine by ``send``. If the task is cancelled before its first step, it calls ``throw``.
``ensure_future`` wraps any other awaitable into a coroutine, which then never begins. Such an awaitable would not
notice that its awaiter is cancelled, and its receive would take the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

Steps = dict[object, Generator[Any, Any, Any]]
"""The generators of an awaitable by task: several tasks may drive one awaitable."""


class Handed(Generic[T_co]):
    """An awaitable that asyncio tasks can drive as a coroutine. Neither ``await`` nor trio uses these methods."""

    __slots__ = ()

    if TYPE_CHECKING:
        _steps: Steps | None

    def __await__(self) -> Generator[Any, Any, T_co]:
        raise NotImplementedError

    def _never_awaited(self) -> None:
        """Note that a task was cancelled before it began to await this object."""
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
        """Resume the current task's generator with an error, in most cases a cancellation."""
        task = _task()
        steps = None if self._steps is None else self._steps.get(task)
        if steps is None:
            self._never_awaited()
            raise error
        return self._go_on(task, steps.throw, error)

    def close(self) -> None:
        """Record that no task will drive this object.

        :class:`asyncio.TaskGroup` calls this for a coroutine that it refuses.
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
