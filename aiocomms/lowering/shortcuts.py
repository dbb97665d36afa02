"""Shortcuts: native code of a transport that starts plain ops, which have no hints and no deadline of their own.

This module decides which communicators use shortcuts.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from aiocomms import ops
from aiocomms.lowering.runs import RunPart
from aiocomms.progress.inflight import LaneWork, StartedWork
from aiocomms.transport import OP_RESULT, Transport
from aiocomms.transport.native import Line, NativeTransport, Shortcuts

T = TypeVar("T")


def find_shortcuts(line: Line, by_family: Mapping[ops.Family, Transport], entries: int) -> Shortcuts | None:
    """Return the shortcuts of a communicator; None if it has no shortcuts, or if ``AIOCOMMS_PURE`` turns them off.

    A communicator has shortcuts only if one transport executes all messages and collectives. Otherwise, Python code
    chooses the transport of each op.

    :param by_family: the transports of the communicator.
    :param entries: the number of entries in the recorder's ring buffer.
    """
    transport = by_family.get("p2p")
    pure = os.environ.get("AIOCOMMS_PURE", "0") not in ("", "0")
    if pure or not isinstance(transport, NativeTransport) or by_family.get("collectives") is not transport:
        return None
    shortcuts = transport.shortcuts(line, entries)
    if shortcuts is not None:
        fields: Any = shortcuts.fields()
        shortcuts.use(_with_fields(StartedWork, fields), _with_fields(LaneWork, fields), RunPart, OP_RESULT)
    return shortcuts


def find_check(transports: Iterable[Transport]) -> Callable[[object, bool], bool] | None:
    """Return the native tensor check of the first transport that has one, or None."""
    checks = (transport.fast_check for transport in transports if isinstance(transport, NativeTransport))
    return next((check for check in checks if check is not None), None)


@functools.cache
def give_methods(cls: type[Any], method: Callable[[type, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace methods of a class by native methods. If an object has shortcuts, its native methods start plain ops.

    A repeated call with the same class and ``method`` has no effect.

    :param method: see :meth:`Shortcuts.method`.
    """
    for name in dir(cls):
        function = getattr(cls, name)
        if not name.startswith("_") and callable(function) and (native := method(cls, function)) is not function:
            # torch.compile omits the object in calls of a native method, unless the type has Cython's name.
            type(native).__name__ = "cython_function_or_method"
            setattr(cls, name, native)


@functools.cache
def _with_fields(cls: type[T], fields: type[Any]) -> type[T]:
    """Return a subclass of the work class ``cls``. Native code provides the fields of the subclass."""
    body = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (fields, cls), exec_body=lambda given: given.update(body))
