"""The guards of communicators.

If a communicator is still open at the end of its event loop, its guard closes the communicator. The guard also issues a
warning. An event loop has no hook for its end. But before its end, a loop closes the remaining async generators that
were started in it. ``asyncio.run``, ``asyncio.Runner``, uvloop and trio close these generators. A program that closes a
loop itself must first call ``loop.shutdown_asyncgens()``. While a loop closes its generators, the loop still runs. So
the guard can close the communicator normally.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import anyio

from aiocomms.diagnosis.places import caller
from aiocomms.lowlevel.ending import at_end

_Comm = TypeVar("_Comm", bound="Closable")


class Closable(Protocol):
    """The part of a communicator that a guard uses."""

    @property
    def closed(self) -> bool:
        """True once the communicator was closed on this rank."""

    async def aclose(self) -> None:
        """Close the communicator, and release its resources."""

    def _disown(self) -> None:
        """Mark the communicator as unusable in a forked child."""


class LeakGuard(Generic[_Comm]):
    """The guard of one communicator, until :meth:`dismiss` is called. Create a guard on the loop's thread."""

    def __init__(self, comm: _Comm) -> None:
        self.comm = comm
        self.opened("use `async with`, or await its aclose()")
        self._ending = False  # True once the loop ends.
        self._generator = self._watch()
        self._step()
        _guards.add(self)

    def opened(self, advice: str) -> None:
        """Store the place where the caller opened the communicator, and the advice for a caller that leaves it open."""
        self._place, self._advice = caller(), advice

    def dismiss(self) -> None:
        """Record that the communicator is closed. A second call changes nothing."""
        _guards.discard(self)
        if not self._ending:
            self._step()

    def warn(self) -> None:
        """Warn that the communicator was left open."""
        message = f"unclosed {self.comm!r}, opened at {self._place}: {self._advice}"
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self.comm)

    def _step(self) -> None:
        step = self._generator.__anext__()
        try:
            step.send(None)
        except (StopIteration, StopAsyncIteration):  # The generator has yielded, or it has ended.
            pass

    async def _watch(self) -> AsyncGenerator[None, None]:
        try:
            yield
        except GeneratorExit:
            self._ending = True
            if not self.comm.closed:
                try:
                    self.warn()
                finally:
                    with anyio.CancelScope() as scope:
                        scope.cancel()  # The loop waits only for what must be released.
                        await self.comm.aclose()
            raise


_guards: weakref.WeakSet[LeakGuard[Any]] = weakref.WeakSet()


def guards() -> Sequence[LeakGuard[Any]]:
    """Return the guards of all communicators that are open in this process."""
    return list(_guards)


def _end_of_process() -> None:
    """Warn of open communicators at the end of the process.

    No communicator is closed, because the transports have stopped.
    """
    for guard in guards():
        try:
            guard.warn()
        finally:
            guard.dismiss()


at_end(_end_of_process)
