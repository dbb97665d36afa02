"""The guards around code that is not this library's: transports, and async functions of the program.

What a transport raises ends its communicator, and nothing else.

By contract only ``open``, ``split``, ``post`` and ``wait_stream`` may raise. Where another method does, its transport
is broken: its further behaviour is unknown, so its communicator is lost, with an error that names the transport.

What a function of the program raises, whatever it is, is that function's failure, unless it ends the task around it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import anyio

from aiocomms.errors import CommError

_log = logging.getLogger("aiocomms")
P = ParamSpec("P")
T = TypeVar("T")


def broken(transport: object, method: str, error: BaseException) -> CommError:
    """Return the error of a communicator whose transport has raised what it must not raise."""
    failure = CommError(
        f"the transport {type(transport).__name__} is broken: {method}() raised {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure


def guarded(otherwise: T, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a method of a transport that must not raise; on any thread.

    :param otherwise: what is returned if it raises all the same; the communicator is lost then.
    """
    try:
        return method(*args, **kwargs)
    except Exception as error:
        transport: Any = method.__self__  # type: ignore[attr-defined]  # The method is a bound one.
        failure = broken(transport, method.__name__, error)
        _log.error("%s", failure, exc_info=error)  # the communicator may be lost already, for another reason
        transport.on_failure(failure)
        return otherwise


def ends_task(error: BaseException) -> bool:
    """Return whether what the program's function raised ends the task around it: the process ends, or it is cancelled.

    A ``CancelledError`` may come from anywhere, as from a future that another task has cancelled. So this task's scopes
    are asked: call it outside of those that are the function's own.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return True
    return not isinstance(error, Exception) and anyio.current_effective_deadline() == -math.inf
