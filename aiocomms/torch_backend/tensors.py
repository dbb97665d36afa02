"""The tensors of a call: what aiocomms moves in their place where it cannot move them as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from aiocomms.errors import ArgumentError
from aiocomms.ops.writing import write
from aiocomms.torch_backend.completer import Completer


class Part(Protocol):
    """What a work consists of: a :class:`~aiocomms.portal.works.BlockingWork`, or what is like one."""

    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self, timeout: float | None = None) -> Any:
        """Block until it has, and raise why it failed, or :class:`TimeoutError`."""

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called once it has ended."""


def when_done(parts: Sequence[Part], call: Callable[[], object]) -> None:
    """Call it when all parts have ended: here and now, or on the thread that ends the last."""
    left = [part for part in parts if not part.done()]
    if not left:
        call()
        return
    count, lock = len(left), threading.Lock()

    def one_less() -> None:
        nonlocal count
        with lock:
            count -= 1
            last = not count
        if last:
            call()

    for part in left:
        part.add_done_callback(one_less)


def after(parts: Sequence[Part], completer: Completer, call: Callable[[], object]) -> None:
    """Call what may take long, or is the program's: here and now if all parts have ended, or else by the completer."""
    if all(part.done() for part in parts):
        call()
    else:
        when_done(parts, lambda: completer.submit(call))


def wait_for(parts: Sequence[Part], patience: float | None) -> None:
    """Block until all have ended, for ``patience`` seconds at most; and raise why the first has failed."""
    ends = None if patience is None else monotonic() + patience
    for part in parts:
        part.wait(None if ends is None else max(0.0, ends - monotonic()))


def _is_plain(tensor: Tensor) -> bool:
    """Whether aiocomms can move it as it is; or has to say why it moves none of the kind."""
    dense = tensor.layout is torch.strided
    return not dense or (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def _flat(tensor: Tensor) -> Tensor:
    """The same memory without its shape: ranks need not agree on that, where their numbers of elements do."""
    return tensor if tensor.dim() == 1 or tensor.layout is not torch.strided else tensor.view(-1)


class Tensors:
    """The tensors of one call: those that aiocomms moves in place of those that it cannot move as they are."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        """What has a tensor's values."""
        tensor = tensor.detach() if tensor.requires_grad else tensor
        return _flat(tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous())

    def written(self, tensor: Tensor) -> Tensor:
        """What has a tensor's values, and is written in its place.

        :raises ArgumentError: elements of the tensor share memory.
        """
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if _is_plain(tensor):
            return _flat(tensor)
        if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ArgumentError("a tensor to be written has elements that share memory, as expand() makes them")
        copy = tensor.resolve_conj().resolve_neg().contiguous()
        copy = copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy
        self._copies.append((tensor, copy))
        return _flat(copy)

    def parts(self, started: list[Any], completer: Completer) -> list[Part]:
        """What has been started; or, where values are to be put back, that behind it."""
        return [PutBack(started, self._copies, completer)] if self._copies else started


class PutBack:
    """The last step of an operation: the values that have come are put where they belong, once, whoever waits."""

    def __init__(self, parts: Sequence[Part], copies: list[tuple[Tensor, Tensor]], completer: Completer) -> None:
        self._parts, self._copies = parts, copies
        self._over, self._lock = threading.Event(), threading.Lock()
        self._error: BaseException | None = None
        self._calls: list[Callable[[], object]] = []
        after(parts, completer, self._run)

    def done(self) -> bool:
        """See :class:`Part`."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """See :class:`Part`."""
        ends = None if timeout is None else monotonic() + timeout
        wait_for(self._parts, timeout)  # which also raises where nobody is left who could end them
        if not self._over.wait(None if ends is None else max(0.0, ends - monotonic())):
            raise TimeoutError(f"what has come was not put in its place within {timeout} s; it will be")
        if self._error is not None:
            raise self._error

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """See :class:`Part`."""
        with self._lock:
            if not self._over.is_set():
                self._calls.append(call)
                return
        call()

    def _run(self) -> None:
        try:
            wait_for(self._parts, None)  # all have ended
            for tensor, copy in self._copies:
                write(tensor, copy)
        except BaseException as error:
            self._error = error
        with self._lock:
            self._over.set()
        for call in self._calls:
            call()
