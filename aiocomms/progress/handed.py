"""Awaitables with the methods of coroutines. They notice if their task is cancelled before its first step.

A task runs a coroutine by ``send``. If the task is cancelled before its first step, the task calls ``throw``.
``ensure_future`` wraps any other awaitable into a coroutine, which then never begins. So another awaitable would not
notice the cancellation. If that awaitable were a receive, the receive would still take the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

Steps = dict[object, Generator[Any, Any, Any]]
"""The generators of an awaitable, by task, because several tasks may await one awaitable."""


class Handed(Generic[T_co]):
    """An awaitable that asyncio tasks can run as a coroutine. ``await`` and trio do not use these methods."""

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
        """Resume the current task's generator with an error, in most cases a cancellation."""
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
