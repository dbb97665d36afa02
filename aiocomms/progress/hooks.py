"""The methods that register hooks: functions of the program that are called before an op, after it, or on abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiocomms.arguments import wrong_type
from aiocomms.errors import CommError
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import Op
from aiocomms.progress.driver import LoopDriver
from aiocomms.progress.work import Work


class Hook(Handle):
    """The handle of a registered hook; :meth:`remove` ends the registration."""

    def __init__(self, hooks: Hooks, fn: Callable[..., object]) -> None:
        self._hooks = hooks
        self._fn = fn

    def __repr__(self) -> str:
        return repr(self._fn)

    def remove(self) -> None:
        """Do not call the hook any more. Idempotent."""
        if self in self._hooks:
            self._hooks.remove(self)


class Hooks(list[Hook]):
    """The hooks for one kind of event. They are called in the order in which they were registered."""

    def register(self, fn: Callable[..., object]) -> Hook:
        """Add a hook.

        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        if not callable(fn):
            raise wrong_type("fn", fn, "a function")
        hook = Hook(self, fn)
        self.append(hook)
        return hook

    def ask(self, *args: Any) -> None:
        """Call the hooks. What a hook raises is raised to the caller."""
        for hook in list(self):
            hook._fn(*args)

    def call(self, driver: LoopDriver, *args: Any) -> None:
        """Call the hooks, and leave what a hook raises to the event loop: the caller has another op to see to.

        The loop reports it, or ends by it: as it does with what a callback of its own raises.
        """
        for hook in list(self):
            try:
                hook._fn(*args)
            except (KeyboardInterrupt, SystemExit) as error:
                driver.call_soon(_raise, error)
            except BaseException as error:
                driver.report(f"the hook {hook!r} raised", error)


def _raise(error: BaseException) -> None:
    raise error


class Hooked:
    """The methods through which a program registers its hooks."""

    _pre_hooks: Hooks
    _post_hooks: Hooks
    _abort_hooks: Hooks

    def register_pre_hook(self, fn: Callable[[Op, int], object]) -> Hook:
        """Have ``fn(op, seq)`` called after the checks of each op and before it is posted. What it raises stops the op.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._pre_hooks.register(fn)

    def register_post_hook(self, fn: Callable[[Work[Any]], object]) -> Hook:
        """Have ``fn(work)`` called on the loop's thread when an op has ended, before the tasks that await it resume.

        ``work.called`` is when it was called, by ``time.monotonic()``, and ``work.error`` how it failed. It is called
        once for each op that pre-hooks were called for, also where the op could not be posted, and in the context of
        the op's call: its context variables are the caller's.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._post_hooks.register(fn)

    def register_abort_hook(self, fn: Callable[[CommError], object]) -> Hook:
        """Have ``fn(error)`` called on the loop's thread when the communicator is lost; ``error`` is the first cause.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._abort_hooks.register(fn)
