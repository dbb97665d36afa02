"""Registration of hooks: functions of the program that are called before an op, after an op, or on abort."""

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
    """The handle of a registered hook. Its method :meth:`remove` ends the registration."""

    def __init__(self, hooks: Hooks, fn: Callable[..., object]) -> None:
        self._hooks = hooks
        self._fn = fn

    def __repr__(self) -> str:
        return repr(self._fn)

    def remove(self) -> None:
        """Stop calling the hook. Idempotent."""
        if self in self._hooks:
            self._hooks.remove(self)


class Hooks(list[Hook]):
    """The hooks for one kind of event, which are called in the order of their registration."""

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
        """Call the hooks. If a hook raises an exception, this method raises the exception."""
        for hook in list(self):
            hook._fn(*args)

    def call(self, driver: LoopDriver, *args: Any) -> None:
        """Call the hooks, and pass exceptions of hooks to the event loop, so that the caller can continue.

        The event loop reports the exceptions. A :class:`KeyboardInterrupt` or :class:`SystemExit` stops the loop.
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
    """The methods with which a program registers its hooks."""

    _pre_hooks: Hooks
    _post_hooks: Hooks
    _abort_hooks: Hooks

    def register_pre_hook(self, fn: Callable[[Op, int], object]) -> Hook:
        """Call ``fn(op, seq)`` after the checks of each op, and before the op starts.

        If ``fn`` raises an exception, the op does not start, and the op's caller gets the exception.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._pre_hooks.register(fn)

    def register_post_hook(self, fn: Callable[[Work[Any]], object]) -> Hook:
        """Call ``fn(work)`` on the event loop's thread when an op has ended, before the tasks that await the op resume.

        ``work.called`` is the time of the op's call, by ``time.monotonic()``; ``work.error`` is the op's error or None.
        ``fn`` is called once for each op whose pre-hooks were called, even if the op then could not start. ``fn`` runs
        in the context of the op's call, so it can read the context variables of the caller.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._post_hooks.register(fn)

    def register_abort_hook(self, fn: Callable[[CommError], object]) -> Hook:
        """Call ``fn(error)`` on the loop's thread when the communicator is lost.

        ``error`` is the first cause of the loss.

        :returns: a handle with ``.remove()``.
        :raises ArgumentTypeError: ``fn`` cannot be called.
        """
        return self._abort_hooks.register(fn)
