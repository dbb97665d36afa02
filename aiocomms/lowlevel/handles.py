"""The base class of handles on objects of one process, such as a communicator. Handles are never copied or pickled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn, Self, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Make ``torch.compile`` leave a function uncompiled.

    The graph ends before a call of the function, and another graph begins after the call.

    ``torch.compiler.disable`` wraps a function, which costs time in every call. This decorator only marks the function.
    """
    if isinstance(function, FunctionType):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = "aiocomms calls other ranks"  # type: ignore[attr-defined]
        _skip(function)
    return function


def _skip(function: FunctionType) -> None:
    """Prevent torch from compiling a function, and the functions that this function calls."""
    # An older torch lacks this setting. It looks at each frame, and skips frames that it cannot compile.
    with contextlib.suppress(ImportError):
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        skip = _FrameAction.SKIP
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))


class Handle:
    """The base class of handles.

    If a program copies an object that has a handle, for example by ``copy.deepcopy``, the copy has the same handle.
    """

    __slots__ = ()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for member in vars(cls).values():
            function: Any = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            uncompiled(function)

    def __copy__(self) -> Self:
        """Return the handle itself."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the handle itself."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled.

        :raises TypeError: always.
        """
        raise TypeError(f"{type(self).__name__} cannot be pickled: it stands for something of this process alone")
