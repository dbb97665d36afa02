"""The decorator that lets a group's methods accept their arguments in each form in which torch passes arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import distributed as dist

from aiocomms.integrations.profiler import profiling
from aiocomms.integrations.torch_backend.dispatcher import is_seen, seen
from aiocomms.integrations.torch_backend.forms import one_form
from aiocomms.integrations.torch_backend.ranges import WorkRange
from aiocomms.integrations.torch_backend.works import BACKEND, GroupWork, raising_as_torch_does

_Method = Callable[..., GroupWork]


def operation(name: str, given: int | None = 0) -> Callable[[_Method], _Method]:
    """Wrap a method so that it accepts its arguments in each form in which torch passes arguments.

    The method's last parameter is a :class:`How`, which the wrapper makes from the caller's arguments.

    The wrapped method raises torch's error classes, and torch's profiler shows the call as a time range.

    :param given: the index of the argument whose tensors the profiler shows. If None, the profiler shows no tensors.
    """

    def of(method: _Method) -> _Method:
        def begin(self: Any, *arguments: Any) -> GroupWork:
            if not profiling():
                return method(self, *arguments)
            span = WorkRange(f"{BACKEND}:{name}", () if given is None else arguments[given : given + 1])
            try:
                return method(self, *arguments).within(span)
            except BaseException:
                span.end()
                raise

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with raising_as_torch_does():
                arguments = one_form(method.__name__, args, kwargs)
                if not is_seen(arguments):
                    return begin(self, *arguments)
            with seen() as works:
                work = getattr(dist.ProcessGroup, method.__name__)(self, *args, **kwargs)
            return GroupWork.of_all(works, self.completer) if works else work

        # pybind11 recognises by this name that the method calls its base, and does not call the override again.
        function: Any = call
        function.__code__ = function.__code__.replace(co_name=method.__name__)
        function.begin = begin
        started: _Method = function
        return started

    return of
