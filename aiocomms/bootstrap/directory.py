"""The directory of the open communicators, which finds them by name."""

from __future__ import annotations

import contextvars
import weakref
from typing import TYPE_CHECKING

from aiocomms.errors import ArgumentError

if TYPE_CHECKING:
    from aiocomms.communicator.communicator import Communicator

DEFAULT = "world"
"""The name of the default communicator."""


_open: dict[str, list[Communicator]] = {}
# Ranks that are tasks of one process have communicators of the same names; each task sees those it opened itself first.
_mine: contextvars.ContextVar[dict[str, weakref.ref[Communicator]]] = contextvars.ContextVar("aiocomms_groups")


def register(comm: Communicator) -> None:
    """Make a communicator findable by its name."""
    _open.setdefault(comm.name, []).append(comm)
    enter(comm)


def enter(comm: Communicator) -> None:
    """Let the current task, and those it starts, find this one among communicators of the same name."""
    still = {name: ref for name, ref in _mine.get({}).items() if name in _open}
    _mine.set({**still, comm.name: weakref.ref(comm)})


def unregister(comm: Communicator) -> None:
    """Undo :func:`register`. Idempotent."""
    same = _open.get(comm.name, [])
    if comm in same:
        same.remove(comm)
    if not same:
        _open.pop(comm.name, None)


def find(name: str) -> Communicator:
    """Find an open communicator by its name.

    :raises ArgumentError: there is none of that name, or several and this task opened none of them.
    """
    same = _open.get(name, [])
    mine = _mine.get({}).get(name, lambda: None)()
    if mine is not None and mine in same:
        return mine
    if len(same) == 1:
        return same[0]
    if same:
        raise ArgumentError(
            f"group is {name!r}, and this process has {len(same)} communicators of that name; give the one you mean"
        )
    known = ", ".join(map(repr, sorted(_open))) or "none"
    raise ArgumentError(f"group is {name!r}, and no open communicator has that name; open ones: {known}")
