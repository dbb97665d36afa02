"""Guards around calls of foreign code: the methods of transports, and the program's async functions.

An exception of a transport ends only the transport's communicator.

Only ``open``, ``split``, ``post`` and ``wait_stream`` of a transport may raise. If another method raises an exception,
the transport's state is unknown. The communicator is then lost, with an error that names the transport.

A function of the program has failed if it raises an exception of any class, unless the exception ends the task.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import anyio

from aiocomms.errors import CommError, as_reason

_log = logging.getLogger("aiocomms")
P = ParamSpec("P")
T = TypeVar("T")


def broken(transport: object, method: str, error: BaseException) -> CommError:
    """Return the error for a communicator whose transport has raised ``error`` in a method that must not raise."""
    failure = CommError(f"the transport {type(transport).__name__} is broken: {method}() raised {as_reason(error)}")
    failure.__cause__ = error
    return failure


def guarded(otherwise: T, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a method of a transport that must not raise an exception. Any thread may call this function.

    :param otherwise: the value to return if the method raises an exception. In that case the communicator is lost.
    """
    try:
        return method(*args, **kwargs)
    except Exception as error:
        transport: Any = method.__self__  # type: ignore[attr-defined]  # The method is a bound one.
        failure = broken(transport, method.__name__, error)
        _log.error("%s", failure, exc_info=error)  # The communicator may already be lost for another reason.
        transport.on_failure(failure)
        return otherwise


def ends_task(error: BaseException) -> bool:
    """Return True if an exception from the program's function ends the current task, as an exit or a cancellation does.

    A ``CancelledError`` may come from a future that another task has cancelled. So this function checks the cancel
    scopes of the task. Call this function outside the cancel scopes of the program's function.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return True
    return not isinstance(error, Exception) and anyio.current_effective_deadline() == -math.inf
