"""Blocking calls off the event loop, and what other threads may be changing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import anyio

from aiocomms.errors import CommError
from aiocomms.lowlevel.waker import Waker

_T = TypeVar("_T")


async def run_in_thread(call: Callable[[], _T], *, anyhow: bool = False) -> _T:
    """Run a blocking call in a daemon thread of its own.

    A cancelled wait leaves the thread behind: some calls, such as those of a store whose server has stopped, come back
    long after their own timeout, and neither the loop nor the interpreter's exit may wait for them. Nobody hears what
    such a thread returns or raises.

    :param call: takes nothing; what it returns or raises, this returns or raises.
    :param anyhow: where no thread can be started, run it here: it releases something.
    :raises CommError: no thread can be started, or there is no descriptor left to wait for it with.
    """
    outcome: list[Any] = [None, None]
    try:
        waker = Waker()
    except OSError as error:
        return _no_thread(call, anyhow, error)

    def target() -> None:
        try:
            outcome[0] = call()
        except BaseException as error:  # it is raised where it is awaited
            outcome[1] = error
        waker.wake()  # does nothing if nobody waits any more, and the descriptor is closed

    thread = threading.Thread(target=target, name="aiocomms blocking call", daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError as error:
            return _no_thread(call, anyhow, error)
        await anyio.wait_readable(waker.fileno())
    finally:
        waker.close()  # on this side, for the thread may never come back
    thread.join()  # all it has left to do is to end
    if outcome[1] is not None:
        raise outcome[1]
    result: _T = outcome[0]
    return result


def call_in_thread(call: Callable[[], object], then: Callable[[Exception | None], object]) -> None:
    """Have a daemon thread make a blocking call. Where none can be started, it is made here.

    :param then: called in that thread with what the call has raised.
    """

    def target() -> None:
        try:
            call()
        except Exception as error:
            then(error)
        else:
            then(None)

    try:
        threading.Thread(target=target, name="aiocomms blocking call", daemon=True).start()
    except RuntimeError:
        target()


def _no_thread(call: Callable[[], _T], anyhow: bool, error: Exception) -> _T:
    if anyhow:
        return call()
    raise CommError(f"no thread can be started: {error}") from error


def copied(source: Iterable[_T]) -> list[_T]:
    """Copy a container that another thread, or a finalizer that runs amid the copy, may be changing."""
    while True:
        try:
            return list(source)
        except RuntimeError:  # it changed meanwhile
            continue
