"""Functions that run blocking calls in threads, so that the event loop continues.

Another function copies containers.
"""

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
"""The time in seconds for which the end of the interpreter waits for running calls."""

_under_way: set[_thread.LockType] = set()


async def run_in_thread(call: Callable[[], _T], *, anyhow: bool = False) -> _T:
    """Run a blocking call in a separate daemon thread.

    If the await is cancelled, the thread continues, and the result or error of the call is dropped. Some calls return
    long after their timeout, for example a call to a store whose server has stopped. The event loop does not wait for a
    call whose await was cancelled. The exit of the interpreter waits for the call for at most 1 s.

    :param call: a function without arguments. The result and the errors of ``call`` are also those of
        :func:`run_in_thread`.
    :param anyhow: True if the call must run, for example because it releases resources. If no thread can be started,
        the call then runs in this thread.
    :raises CommError: no thread can be started, or no descriptor is left for the wait.
    """
    call = _apart(call, anyio.get_cancelled_exc_class())
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
        waker.wake()  # If no task waits any more, the descriptor is closed, and this does nothing.

    try:
        try:
            thread = _start(target, refused)
        except RuntimeError as error:
            return _no_thread(call, anyhow, error)
        await anyio.wait_readable(waker.fileno())
    finally:
        waker.close()  # This side closes the waker, because the thread may never return.
    if refused:
        return _no_thread(call, anyhow, refused.pop())
    thread.join()  # The thread has nothing left to do but to end.
    return _concluded(outcome)  # type: ignore[no-any-return]


def _apart(call: Callable[[], _T], cancelled: type[BaseException]) -> Callable[[], _T]:
    """Return a function that makes a call.

    The function raises a RuntimeError in place of a StopIteration or a cancellation's error.
    """

    def apart() -> _T:
        try:
            return call()
        except (cancelled, StopIteration) as error:
            raise RuntimeError(f"a call in a thread raised {type(error).__name__}") from error

    return apart


def _concluded(outcome: list[Any]) -> Any:
    """Return the result of a call, or raise the error of the call."""
    result, raised = outcome
    outcome.clear()
    if raised is None:
        return result
    try:
        raise raised
    finally:
        # The error refers to this frame. If the frame also referred to the error, only a garbage collection would free
        # both.
        del raised


def call_in_thread(call: Callable[[], object], then: Callable[[Exception | None], object]) -> None:
    """Make a blocking call in a daemon thread, or in this thread if no other thread can be started.

    :param then: a function that the thread calls after ``call``, with the error of ``call`` or None.
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
    """Start a daemon thread.

    The exit of the interpreter waits for this thread for at most 1 s. The caller continues without a wait for the
    thread.

    ``threading.Thread.start`` waits until the thread runs. On busy cores this wait blocks the event loop for some
    milliseconds. The method also takes a lock. Code that a signal has interrupted may hold this lock.

    :raises RuntimeError: no thread can be started.
    """
    if clock.simulation is not None:
        clock.simulation.start_thread(target)
    else:
        _awaited(lambda run: _thread.start_new_thread(run, ()), target)


def _start(target: Callable[[], None], refused: list[RuntimeError]) -> threading.Thread:
    """Start a daemon thread that can be joined.

    A helper thread calls ``Thread.start`` and waits until the new thread runs, so that the caller does not wait.

    :param refused: a list to which the error is added if the new thread cannot be started. In this case the helper
        thread calls ``target``.
    :raises RuntimeError: the helper thread cannot be started.
    """

    def start(run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="aiocomms blocking call", daemon=True)

        # The starter may end late. It keeps no object of the call alive, because a thread drops its target once it
        # has run.
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
    """Start a daemon thread. The end of the interpreter waits for the thread for at most 1 s.

    Before Python 3.14, the end of the interpreter unwinds the stack of each thread that returns from C++ code. If this
    stack has C++ code that cannot be unwound, the process ends by SIGABRT. Most calls that are still running at the
    exit return soon, so a short wait is enough.

    :param start: a function that starts a thread. The thread runs the function that ``start`` gets as its argument. The
        result and the errors of ``start`` are also those of :func:`_awaited`.
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
    """Copy a container that another thread or a finalizer may change during the copy."""
    while True:
        try:
            return list(source)
        except RuntimeError:  # Another thread has changed it meanwhile.
            continue
