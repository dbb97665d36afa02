"""Protection of the library's code against modes of torch that a program has switched on.

A mode belongs to a thread, so all tasks of a loop share the mode. While a task awaits within ``with FakeTensorMode():``
or ``with torch.inference_mode():``, the loop runs all other tasks in that mode. A buffer that the library makes in such
a mode would be a fake tensor, or would not be writable later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of dispatch modes that are on in this thread. The call takes about 30 ns."""
in_inference_mode: Callable[[], bool] = torch.is_inference_mode_enabled
"""Return whether inference mode is on in this thread. The call takes about 30 ns."""


def set_aside() -> ExitStack:
    """Switch dispatch modes and inference mode off in this thread until the returned stack is closed."""
    stack = ExitStack()
    stack.enter_context(torch._C._DisableTorchDispatch())
    stack.enter_context(torch.inference_mode(False))
    return stack


def unaffected(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that the function runs without dispatch modes and inference mode."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not dispatch_modes() and not in_inference_mode():
            return function(*args, **kwargs)
        with set_aside():
            return function(*args, **kwargs)

    return call


def stands_for_others(tensor: torch.Tensor) -> str | None:
    """Return a description of a tensor that only wraps other tensors; return None for any other tensor.

    A wrapper has no memory of its own.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor within torch.func.vmap, grad or the like"
    return "a tensor of functionalization" if torch._is_functional_tensor(tensor) else None
