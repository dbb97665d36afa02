"""The background tasks of an object, which run until the object is closed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

import anyio

from aiocomms.errors import CommError, ProtocolError
from aiocomms.lowlevel.shielding import shielded
from aiocomms.progress.driver import Bell, LoopDriver


class Background:
    """A set of background tasks that are cancelled together."""

    def __init__(self, of: str) -> None:
        """Create an empty set of tasks.

        :param of: a phrase that describes the owner of the tasks. Reports of errors contain this phrase.
        """
        self._of, self._driver = of, LoopDriver.current()
        self._scopes: set[anyio.CancelScope] = set()
        self._ended = Bell(self._driver)
        self._closed, self._running = False, 0

    def start(self, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine in a task.

        If the task fails because the communicator or connection of the owner was lost or closed, no error is reported.
        All other errors are reported.
        """

        async def run() -> None:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    if not self._closed:
                        await call()
                except Exception as error:
                    if isinstance(error, CommError) and not isinstance(error, ProtocolError):
                        return  # Waiting tasks learn of the loss in another way.
                    self._driver.report(f"a task of {self._of} failed", error)
                finally:
                    self._scopes.discard(scope)
                    self._running -= 1
                    self._ended.ring()

        self._running += 1
        self._driver.spawn(run, Context())

    async def aclose(self) -> None:
        """Cancel all tasks, and wait until they have ended. Idempotent."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()
        await shielded(self._all_ended)

    async def _all_ended(self) -> None:
        while self._running:
            await self._ended
