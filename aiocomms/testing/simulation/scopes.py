"""The order in which anyio cancels the scopes within a scope: that of a set, and so of addresses in memory.

Those differ from run to run. The scopes of simulated programs keep them in the order in which they were entered.
"""

from __future__ import annotations

from typing import Any

from anyio._backends._asyncio import CancelScope

from aiocomms.testing.simulation.refusing import watched

_begin = CancelScope.__init__
_installed: list[bool] = []


class _InOrder(dict[Any, None]):
    """The part of a set that anyio uses, in the order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def order_scopes() -> None:
    """Have the scopes of simulated programs keep that order from now on."""
    if not _installed:
        CancelScope.__init__ = _begin_in_order  # type: ignore[method-assign, assignment]
        _installed.append(True)


def _begin_in_order(scope: CancelScope, *args: Any, **options: Any) -> None:
    _begin(scope, *args, **options)
    if watched():
        scope._child_scopes = _InOrder()  # type: ignore[assignment]
