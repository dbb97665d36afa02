"""Time ranges of ops in torch's profiler. See ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from aiocomms.diagnosis.recorder import window_of
from aiocomms.integrations.metrics import Traceable, instrumentable, part_of
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import Op
from aiocomms.progress.work import Work


def profiling() -> bool:
    """Return whether torch's profiler runs."""
    return profiler._is_profiler_enabled


def tensors(given: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument, including the tensors in nested lists."""
    if isinstance(given, Tensor):
        yield given
    else:
        for each in given:
            yield from tensors(each)


class Range:
    """A time range in the profiler, from the object's creation to the call of :meth:`end`, which is thread-safe."""

    def __init__(self, name: str, given: Any) -> None:
        """Begin the range.

        :param given: the tensors that the operation reads or writes. The profiler shows their shapes.
        """
        self._record = torch.autograd._record_function_with_args_enter(name, *tensors(given))

    def end(self) -> None:
        """End the range."""
        torch.autograd._record_function_with_args_exit(self._record)


class Recording(Handle):
    """The hooks that make a range for each op while a profiler runs; :meth:`remove` removes the hooks."""

    def __init__(self, comm: Traceable) -> None:
        self._ranges: dict[int, Range] = {}  # The ranges of ops under way, by their numbers.
        self._hooks = [comm.register_post_hook(self._ended), comm.register_pre_hook(self._called)]

    def remove(self) -> None:
        """Stop making ranges, and end the ranges of pending ops now. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        while self._ranges:
            self._ranges.popitem()[1].end()

    def _called(self, op: Op, seq: int) -> None:
        if profiling():
            given = [tensor for _, tensor in (*op.reads(), *op.writes())]
            window = window_of(op)
            name = f"aiocomms:{part_of(op)}{op.name}{f' of {window}' if window else ''}"
            self._ranges[seq] = Range(name, given)

    def _ended(self, work: Work[Any]) -> None:
        span = self._ranges.pop(work.seq, None)
        if span is not None:
            span.end()


def record_ops(comm: Traceable) -> Recording:
    """Show the ops of a communicator as ranges in torch's profiler, such as ``aiocomms:all_reduce``.

    A range appears for each op that is called after this call and while the profiler runs. A range lasts from the op's
    call to the op's end, and ends before the awaiting tasks resume. So the range has the duration of the op even if the
    event loop is busy.

    :param comm: a :class:`~aiocomms.Communicator`, :class:`~aiocomms.Portal` or blocking communicator.
    :returns: a handle with ``.remove()``.
    :raises ArgumentTypeError: ``comm`` has another type.
    """
    instrumentable(comm)
    return Recording(comm)
