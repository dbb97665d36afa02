"""Blocking calls off the event loop, and copies of containers that other threads may be changing."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import anyio

from aiocomms.errors import CommError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.ending import at_end
from aiocomms.lowlevel.waker import Waker

_T = TypeVar("_T")
_AT_END = 1.0
"""Seconds for which the interpreter's end waits for calls that are under way."""

_under_way: set[_thread.LockType] = set()


async def run_in_thread(call: Callable[[], _T], *, anyhow: bool = False) -> _T:
    """Run a blocking call in a daemon thread of its own.

    A cancelled wait leaves the thread behind: some calls, such as those of a store whose server has stopped, come back
    long after their own timeout, and neither the loop nor the interpreter's exit may wait for them. The
    result or error of such a thread is dropped.

    :param call: a function without arguments. Its result is returned, and its error raised.
    :param anyhow: whether to run the call here where no thread can be started, because it releases something.
    :raises CommError: no thread can be started, or there is no descriptor left to wait for it with.
    """
    if clock.simulation is not None:
        return await clock.simulation.run_in_thread(call)
    outcome: list[Any] = [None, None]
    refused: list[RuntimeError] = []
    try:
        waker = Waker()
    except OSError as error:
        return _no_thread(call, anyhow, error)

    def target() -> None:
        try:
            if not refused:
                outcome[0] = call()
        except BaseException as error:  # The awaiting task raises it.
            outcome[1] = error
        waker.wake()  # The call does nothing if no task waits any more, and the descriptor is closed.

    try:
        try:
            thread = _start(target, refused)
        except RuntimeError as error:
            return _no_thread(call, anyhow, error)
        await anyio.wait_readable(waker.fileno())
    finally:
        waker.close()  # The waker is closed on this side, for the thread may never come back.
    if refused:
        return _no_thread(call, anyhow, refused.pop())
    thread.join()  # The thread has nothing left to do but to end.
    return _concluded(outcome)  # type: ignore[no-any-return]


def _concluded(outcome: list[Any]) -> Any:
    """Return what a call has returned, or raise what it has raised."""
    result, raised = outcome
    outcome.clear()
    if raised is None:
        return result
    try:
        raise raised
    finally:
        # The error holds this frame. If the frame held the error, its objects would stay until a collection.
        del raised


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
        start_awaited(target)
    except RuntimeError:
        target()


def start_awaited(target: Callable[[], None]) -> None:
    """Start a daemon thread that the interpreter's end waits for, if only for a moment. The caller goes on at once.

    ``threading.Thread`` would keep the caller until the thread has run, and where others want the cores a new thread
    waits for one: that held the event loop for some milliseconds. And its ``start`` takes a lock that the code which a
    signal has interrupted may hold.

    :raises RuntimeError: none can be started.
    """
    if clock.simulation is not None:
        clock.simulation.start_thread(target)
    else:
        _awaited(lambda run: _thread.start_new_thread(run, ()), target)


def _start(target: Callable[[], None], refused: list[RuntimeError]) -> threading.Thread:
    """Start such a thread as one that can be joined. Who waits until it has run is another thread, and not the caller.

    :param refused: gets the reason if none can be started; then ``target`` is called all the same.
    :raises RuntimeError: none can be started.
    """

    def start(run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="aiocomms blocking call", daemon=True)

        # The starter may end late. It keeps nothing of the call, because a thread that has run holds it no more.
        def begin() -> None:
            try:
                thread.start()
            except RuntimeError as error:
                refused.append(error)
                thread.run()

        _thread.start_new_thread(begin, ())
        return thread

    return _awaited(start, target)


def _awaited(start: Callable[[Callable[[], None]], _T], target: Callable[[], None]) -> _T:
    """Have the interpreter's end wait, for a moment, for a daemon thread that is started here.

    Before Python 3.14, a thread that comes back from C++ once the interpreter is ending is unwound, and C++ that cannot
    be unwound ends the process by SIGABRT. Most calls come back soon after they were given up.

    :param start: starts a thread that runs the given function. Its result or error is passed on.
    """
    running = _thread.allocate_lock()
    running.acquire()

    def run() -> None:
        try:
            target()
        finally:
            _under_way.discard(running)
            running.release()

    _under_way.add(running)
    try:
        return start(run)
    except BaseException:
        _under_way.discard(running)
        raise


def _finish() -> None:
    ends = clock.now() + _AT_END
    for running in copied(_under_way):
        running.acquire(timeout=max(0.0, ends - clock.now()))


at_end(_finish)
os.register_at_fork(after_in_child=_under_way.clear)


def _no_thread(call: Callable[[], _T], anyhow: bool, error: Exception) -> _T:
    if anyhow:
        return call()
    raise CommError(f"no thread can be started: {error}") from error


def copied(source: Iterable[_T]) -> list[_T]:
    """Copy a container that another thread, or a finalizer during the copy, may be changing."""
    while True:
        try:
            return list(source)
        except RuntimeError:  # Another thread has changed it meanwhile.
            continue
