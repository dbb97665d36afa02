"""Modes of torch that a program has switched on, and that no code of ours may run in.

Modes belong to a thread, and the tasks of a loop share theirs. Where a task awaits within ``with FakeTensorMode():`` or
``with torch.inference_mode():``, everything else that the loop runs meanwhile runs in that mode. A buffer of ours would
be a fake one, or one that may not be written later.
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
"""Return the number of dispatch modes that are on in this thread. It takes some 30 ns."""
in_inference_mode: Callable[[], bool] = torch.is_inference_mode_enabled
"""Return whether inference mode is on in this thread. It takes some 30 ns, too."""


def set_aside() -> ExitStack:
    """Switch these modes off in this thread, until what is returned is closed."""
    stack = ExitStack()
    stack.enter_context(torch._C._DisableTorchDispatch())
    stack.enter_context(torch.inference_mode(False))
    return stack


def unaffected(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function run outside of these modes."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not dispatch_modes() and not in_inference_mode():
            return function(*args, **kwargs)
        with set_aside():
            return function(*args, **kwargs)

    return call


def stands_for_others(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is, in words, if it stands for others and has no memory; None if it is none of these."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor within torch.func.vmap, grad or the like"
    return "a tensor of functionalization" if torch._is_functional_tensor(tensor) else None
