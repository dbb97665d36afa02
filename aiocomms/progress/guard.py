"""The one guard around calls into a transport: what a transport raises ends its communicator, and nothing else.

By contract only ``open``, ``split``, ``post`` and ``wait_stream`` may raise. Where another method does, its transport
is broken: nobody knows what it still does, so its communicator is lost, with an error that names the transport.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from aiocomms.errors import CommError

_log = logging.getLogger("aiocomms")
P = ParamSpec("P")
T = TypeVar("T")


def broken(transport: object, method: str, error: BaseException) -> CommError:
    """The error of a communicator whose transport has raised what it must not raise."""
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
        transport: Any = method.__self__  # type: ignore[attr-defined]  # it is a bound method
        failure = broken(transport, method.__name__, error)
        _log.error("%s", failure, exc_info=error)  # the communicator may be lost already, for another reason
        transport.on_failure(failure)
        return otherwise
