"""Functions that a program has asked to have called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiocomms.driver import Driver


class Hook:
    """A registered hook; :meth:`remove` undoes the registration."""

    def __init__(self, hooks: Hooks, fn: Callable[..., object]) -> None:
        self._hooks = hooks
        self._fn = fn

    def __call__(self, *about: Any) -> None:
        """Call what was registered."""
        self._fn(*about)

    def __repr__(self) -> str:
        return repr(self._fn)

    def remove(self) -> None:
        """Do not call the hook any more. Twice is once."""
        if self in self._hooks:
            self._hooks.remove(self)


class Hooks(list[Hook]):
    """The hooks for one kind of event, called in the order registered."""

    def register(self, fn: Callable[..., object]) -> Hook:
        """Add a hook."""
        hook = Hook(self, fn)
        self.append(hook)
        return hook

    def call(self, driver: Driver, *about: Any) -> None:
        """Call them; no caller stands behind who could handle what they raise, so that is reported."""
        for hook in list(self):
            try:
                hook(*about)
            except Exception as error:
                driver.report(f"the hook {hook!r} raised", error)
