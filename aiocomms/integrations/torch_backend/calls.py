"""The decorator by which each method of a group takes every form in which torch calls that method."""

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
    """Make a method that torch calls in any of torch's forms of one that has one form, with :class:`How` at its end.

    It raises what torch's users expect, and is a range of torch's profiler.

    :param given: which of its arguments are the tensors that the profiler shows; None: there are none.
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

        # By its name, pybind11 knows that it calls the method of its base, and does not call it again for that.
        function: Any = call
        function.__code__ = function.__code__.replace(co_name=method.__name__)
        function.begin = begin
        started: _Method = function
        return started

    return of
