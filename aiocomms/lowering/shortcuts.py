"""Shortcuts: native code of a transport that starts plain ops, and which communicators have it."""

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
    """Return the shortcuts of a communicator; None: there are none, or ``AIOCOMMS_PURE`` turns them off.

    There are none but where one transport carries all messages and collectives: else it is Python's to decide what
    carries an op, or that nothing does. Windows have none where another transport carries them.

    :param by_family: the transports of the communicator.
    :param entries: how many the recorder's ring keeps.
    """
    transport = by_family.get("p2p")
    pure = os.environ.get("AIOCOMMS_PURE", "0") not in ("", "0")
    if pure or not isinstance(transport, NativeTransport) or by_family.get("collectives") is not transport:
        return None
    shortcuts = transport.shortcuts(line, entries)
    if shortcuts is not None:
        awaiting = shortcuts.awaiting
        shortcuts.use(
            _awaited(StartedWork, awaiting),
            _awaited(LaneWork, awaiting),
            RunPart,
            windows=by_family.get("rma") is transport,
        )
    return shortcuts


def find_check(transports: Iterable[Transport]) -> Callable[[object, bool], bool] | None:
    """Return the first native check of tensors that a transport has; None: there is none."""
    checks = (transport.fast_check for transport in transports if isinstance(transport, NativeTransport))
    return next((check for check in checks if check is not None), None)


def hastened(cls: type[T], members: Mapping[str, Any]) -> type[T]:
    """Return a class with members of native code in the place of its own, which looks as it does."""
    all_of_it = {"__doc__": cls.__doc__, "__module__": cls.__module__, **members}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(all_of_it))


@functools.cache
def with_shortcuts(cls: type[T], method: Callable[[type, Callable[..., Any]], Callable[..., Any]]) -> type[T]:
    """Return a class whose plain ops are started by native code; see :meth:`Shortcuts.method`."""
    found = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
    given = {name: method(cls, it) for name, it in found.items() if callable(it)}
    taken = {name: it for name, it in given.items() if it is not found[name]}
    for it in taken.values():
        # torch.compile calls a method without its object, unless it is Python's, or by this name Cython's.
        type(it).__name__ = "cython_function_or_method"
    return hastened(cls, taken)


@functools.cache
def _awaited(cls: type[T], awaiting: Callable[[type[Any], object], Callable[..., Any]]) -> type[T]:
    """Works that, awaited when they are done, go on without a generator."""
    return hastened(cls, {"__await__": awaiting(cls, OP_RESULT)})
