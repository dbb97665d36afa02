"""The ranges that torch's profiler shows of operations, as torch's own backends make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from aiocomms.torch_backend.completer import Completer
from aiocomms.torch_backend.parts import Part, Step, wait_for


def profiling() -> bool:
    """Whether a profiler of torch is on."""
    return profiler._is_profiler_enabled


def tensors(given: Any) -> Iterator[Tensor]:
    """The tensors of an argument, in whatever lists."""
    if isinstance(given, Tensor):
        yield given
    else:
        for each in given:
            yield from tensors(each)


class Range:
    """One range: from here until an operation has ended, on another thread."""

    def __init__(self, name: str, given: Any) -> None:
        """Begin it.

        :param given: the tensors that the operation reads or writes, whose shapes are shown.
        """
        self._record = torch.autograd._record_function_with_args_enter(name, *tensors(given))

    def end(self) -> None:
        """End it."""
        torch.autograd._record_function_with_args_exit(self._record)

    def around(self, parts: list[Part], completer: Completer) -> list[Part]:
        """What has been started, with the end of the range behind it, before whoever waits goes on."""

        def end() -> None:
            self.end()
            wait_for(parts, None)  # which raises why they failed

        return [Step(parts, end).after(completer, here=False)]
