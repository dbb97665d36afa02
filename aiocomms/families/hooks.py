"""Functions that a program has asked to have called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiocomms.errors import CommError
from aiocomms.ops import Op
from aiocomms.ops.checks import wrong_type
from aiocomms.progress.driver import Driver
from aiocomms.progress.work import Work


class Hook:
    """A registered hook; :meth:`remove` undoes the registration."""

    def __init__(self, hooks: Hooks, fn: Callable[..., object]) -> None:
        self._hooks = hooks
        self._fn = fn

    def __repr__(self) -> str:
        return repr(self._fn)

    def remove(self) -> None:
        """Do not call the hook any more. Twice is once."""
        if self in self._hooks:
            self._hooks.remove(self)


class Hooks(list[Hook]):
    """The hooks for one kind of event, called in the order registered."""

    def register(self, fn: Callable[..., object]) -> Hook:
        """Add a hook.

        :raises ArgumentTypeError: it cannot be called.
        """
        if not callable(fn):
            raise wrong_type("fn", fn, "a function")
        hook = Hook(self, fn)
        self.append(hook)
        return hook

    def ask(self, *about: Any) -> None:
        """Call them; what one raises goes to the caller."""
        for hook in list(self):
            hook._fn(*about)

    def call(self, driver: Driver, *about: Any) -> None:
        """Call them; no caller stands behind who could handle what they raise, so that is reported."""
        for hook in list(self):
            try:
                hook._fn(*about)
            except Exception as error:
                driver.report(f"the hook {hook!r} raised", error)


class Hooked:
    """The method family through which a program registers its hooks."""

    _pre_hooks: Hooks
    _post_hooks: Hooks
    _abort_hooks: Hooks

    def register_pre_hook(self, fn: Callable[[Op, int], object]) -> Hook:
        """Have ``fn(op, seq)`` called before each op is posted, after its checks; what it raises stops the op.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._pre_hooks.register(fn)

    def register_post_hook(self, fn: Callable[[Work[Any]], object]) -> Hook:
        """Have ``fn(work)`` called on the loop's thread when an op is done, before its awaiters go on.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._post_hooks.register(fn)

    def register_abort_hook(self, fn: Callable[[CommError], object]) -> Hook:
        """Have ``fn(error)`` called on the loop's thread when the communicator is lost; ``error`` is the first reason.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._abort_hooks.register(fn)
