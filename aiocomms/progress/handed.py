"""Awaitables like coroutines, which learn when a task that was given them never starts them.

A task drives a coroutine by ``send``, and begins one that was cancelled before its first step with ``throw``. Any
other awaitable is wrapped into a coroutine, by ``ensure_future``, which never begins then. The awaitable would not
learn that the awaiter is gone, and the receive that it was to wait for would take the next message.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

Steps = dict[object, Generator[Any, Any, Any]]
"""The generator of each task that drives an awaitable, which may be handed to several tasks."""


class Handed(Generic[T_co]):
    """An awaitable that is handed to tasks of asyncio. ``await`` uses none of this, nor does trio."""

    __slots__ = ()

    if TYPE_CHECKING:
        _steps: Steps | None

    def __await__(self) -> Generator[Any, Any, T_co]:
        raise NotImplementedError

    def _never_awaited(self) -> None:
        """Note that a task which was to await it has gone before it began."""
        raise NotImplementedError

    def send(self, value: Any) -> Any:
        """Begin, or go on."""
        task = _task()
        if self._steps is None:
            self._steps = {}  # type: ignore[misc]  # The class that inherits this has the attribute.
        steps = self._steps.get(task)
        if steps is None:
            steps = self._steps[task] = self.__await__()
        return self._go_on(task, steps.send, value)

    def throw(self, error: BaseException, *_: object) -> Any:
        """Go on with an error; most often the task was cancelled."""
        task = _task()
        steps = None if self._steps is None else self._steps.get(task)
        if steps is None:
            self._never_awaited()
            raise error
        return self._go_on(task, steps.throw, error)

    def close(self) -> None:
        """No task will drive it: as :class:`asyncio.TaskGroup` does where it refuses one, since Python 3.13."""
        self._never_awaited()

    def _go_on(self, task: object, step: Callable[[Any], Any], value: Any) -> Any:
        assert self._steps is not None
        try:
            return step(value)
        except BaseException:  # The exception is most often StopIteration, which has the result.
            del self._steps[task]
            raise


def _task() -> object:
    from asyncio import current_task

    return current_task()
