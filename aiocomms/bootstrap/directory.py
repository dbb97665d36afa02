"""The directory that finds an open communicator by its name."""

from __future__ import annotations

import contextvars
import weakref
from typing import TYPE_CHECKING

from aiocomms.errors import ArgumentError
from aiocomms.lowlevel import clock

if TYPE_CHECKING:
    from aiocomms.communicator.communicator import Communicator

_OPEN = "communicators"
# Ranks that are tasks of one process have communicators of the same names. Each task finds its own communicators first.
_mine: contextvars.ContextVar[dict[str, weakref.ref[Communicator]]] = contextvars.ContextVar("aiocomms_groups")


def _opened() -> dict[str, list[Communicator]]:
    """Return the open communicators of this process by name."""
    found: dict[str, list[Communicator]] = clock.state().setdefault(_OPEN, {})
    return found


def register(comm: Communicator) -> None:
    """Register a communicator, so that :func:`find` can find it by its name."""
    _opened().setdefault(comm.name, []).append(comm)
    enter(comm)


def every_open() -> list[Communicator]:
    """Return the open communicators of this process."""
    return [comm for same in _opened().values() for comm in same]


def enter(comm: Communicator) -> None:
    """Make :func:`find` return ``comm`` for its name in the current task, and in the tasks that this task starts."""
    opened = _opened()
    still = {name: ref for name, ref in _mine.get({}).items() if name in opened}
    _mine.set({**still, comm.name: weakref.ref(comm)})


def unregister(comm: Communicator) -> None:
    """Undo :func:`register`. Idempotent."""
    opened = _opened()
    same = opened.get(comm.name, [])
    if comm in same:
        same.remove(comm)
    if not same:
        opened.pop(comm.name, None)


def find(name: str) -> Communicator:
    """Find an open communicator by its name.

    :raises ArgumentError: no communicator has that name, or several communicators have that name and this task opened
        none of them.
    """
    opened = _opened()
    same = opened.get(name, [])
    mine = _mine.get({}).get(name, lambda: None)()
    if mine is not None and mine in same:
        return mine
    if len(same) == 1:
        return same[0]
    if same:
        raise ArgumentError(
            f"group is {name!r}, and this process has {len(same)} communicators of that name; give the one you mean"
        )
    known = ", ".join(map(repr, sorted(opened))) or "none"
    raise ArgumentError(f"group is {name!r}, and no open communicator has that name; open ones: {known}")
