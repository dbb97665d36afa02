"""The checks of arguments. A check raises an error about a wrong argument before anything is sent.

Each error names the argument, the given value and the expected value. The check of a tensor takes about 0.5 µs, or 0.2
µs if the transport has a faster check. The check of a valid argument reads a few attributes. If the check fails, slower
code finds the reason of the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.autograd import forward_ad

from aiocomms.arguments import describe, wrong_type
from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.ops.modes import stands_for_others

DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
"""The dtypes that a tensor may have, with any transport. Some of these dtypes cannot be reduced."""

TAG_MIN, TAG_MAX = -(2**31), 2**31 - 1

_IS_COMPLEX = {dtype: dtype.is_complex for dtype in DTYPES}
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""The types of tensors that own their memory.

A tensor of another subclass may be a wrapper of memory that the tensor does not own.
"""


class Members(Protocol):
    """The attributes of a communicator that are needed to check ranks."""

    rank: int
    size: int


class CheckedComm(Members, Protocol):
    """The attributes of a communicator that are needed to check ops."""

    device: torch.device
    fast_check: Callable[[object, bool], bool] | None
    """See :attr:`aiocomms.transport.native.NativeTransport.fast_check`."""


def is_tensor(name: str, value: object) -> None:
    """Check that a value is a ``torch.Tensor``.

    :raises ArgumentTypeError: the value is something else.
    """
    if not isinstance(value, torch.Tensor):
        raise wrong_type(name, value, "a torch.Tensor")


def readable(name: str, tensor: torch.Tensor, group: CheckedComm) -> None:
    """Check a tensor that an op reads.

    The tensor must be plain, contiguous and allocated, have a dtype of :data:`DTYPES`, and be on the communicator's
    device.

    :raises ArgumentTypeError: the value is not a plain ``torch.Tensor``.
    :raises ArgumentError: the tensor violates another of the rules above.
    """
    if group.fast_check is not None and group.fast_check(tensor, False):
        return
    try:
        is_complex = _IS_COMPLEX.get(tensor.dtype) if type(tensor) in PLAIN else None
        if (
            is_complex is not None
            and tensor.is_contiguous()
            and tensor.device == group.device
            and not tensor.is_nested
            and not tensor.is_neg()
            and not (is_complex and tensor.is_conj())
            and (tensor.data_ptr() or not tensor.numel())
            and (forward_ad._current_level < 0 or forward_ad.unpack_dual(tensor).tangent is None)  # type: ignore[no-untyped-call]
        ):
            return
    except (RuntimeError, NotImplementedError):
        pass  # Sparse, opaque and wrapped tensors do not support all of these calls.
    raise _unreadable(name, tensor, group.device)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a tensor lie in its storage. A program can shrink the storage of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize
    return not tensor.numel() or end <= tensor.untyped_storage().nbytes()


def writable(name: str, tensor: torch.Tensor, group: CheckedComm) -> None:
    """Check a tensor that an op writes.

    The rules are those of :func:`readable`. In addition, autograd must not track the tensor.

    :raises ArgumentError: :func:`readable` raises this error, or the tensor requires grad.
    """
    if group.fast_check is not None and group.fast_check(tensor, True):
        return
    readable(name, tensor, group)
    if tensor.requires_grad:
        raise ArgumentError(
            f"{name} is written to and requires grad: autograd would not see the change; "
            f"give {name}.detach(), or run the op on a tensor that does not require grad"
        )


def _unreadable(name: str, tensor: object, device: torch.device) -> ArgumentError:
    if hasattr(type(tensor), "__dlpack__") and not isinstance(tensor, torch.Tensor):
        # A short message is enough, because the caller makes a tensor of the array.
        return ArgumentTypeError(f"{name} is an array, wanted a torch.Tensor")
    if not isinstance(tensor, torch.Tensor):
        return wrong_type(name, tensor, "a torch.Tensor")
    if type(tensor) not in PLAIN:
        return ArgumentTypeError(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__name__}, wanted a plain torch.Tensor: "
            "a tensor subclass may not own the memory it shows"
        )
    if (error := _without_elements(name, tensor)) is not None:
        return error
    if tensor.dtype not in DTYPES:
        return ArgumentError(f"{name} has dtype {tensor.dtype}, wanted one of {', '.join(sorted(map(str, DTYPES)))}")
    if tensor.device != device:
        return ArgumentError(
            f"{name} is on {tensor.device}, wanted it on {device}, the communicator's device; "
            f"give {name}.to('{device}'), or form a communicator with device='{tensor.device}'"
        )
    if not tensor.is_contiguous():
        return ArgumentError(
            f"{name} ({describe(tensor)} with strides {tensor.stride()}) is not contiguous; give {name}.contiguous()"
        )
    if tensor.is_neg() or tensor.is_conj():
        return ArgumentError(f"{name} is a lazy conjugate or negative view; give {name}.resolve_conj().resolve_neg()")
    tangent, freed = "a tangent of forward-mode AD; give its primal", "no memory: its storage was freed or resized"
    return ArgumentError(f"{name} ({describe(tensor)}) has {tangent if tensor.data_ptr() else freed}")


def _without_elements(name: str, tensor: torch.Tensor) -> ArgumentError | None:
    if (kind := stands_for_others(tensor)) is not None:
        return ArgumentError(f"{name} is {kind}, wanted one with memory of its own: call the op outside")
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_mkldnn:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return ArgumentError(f"{name} is a {kind} tensor, wanted a dense one (layout torch.strided)")
    return None


def has_elements(name: str, tensor: torch.Tensor) -> None:
    """Check that a value is a tensor of which each element has a place in memory.

    :raises ArgumentError: the tensor is sparse or nested, or only wraps other tensors.
    """
    is_tensor(name, tensor)
    if (error := _without_elements(name, tensor)) is not None:
        raise error


def same(name: str, got: torch.Tensor, like_name: str, like: torch.Tensor, *, shape: bool = True) -> None:
    """Check that two tensors have the same dtype and, if ``shape`` is true, the same shape."""
    if got.dtype != like.dtype or (shape and got.shape != like.shape):
        what = describe(like) if shape else f"dtype {str(like.dtype).removeprefix('torch.')}"
        raise ArgumentError(f"{name} is {describe(got)}, wanted {what} as {like_name}")


def listed(name: str, tensors: Sequence[torch.Tensor], group: CheckedComm, *, write: bool, equal: bool) -> None:
    """Check a list with one tensor per rank: its length, each tensor, and that all have the same dtype.

    :param write: whether the op writes the tensors.
    :param equal: whether all tensors must also have the same shape.
    """
    if len(tensors) != group.size:
        raise ArgumentError(f"{name} has {len(tensors)} tensors, wanted one per rank: {group.size}")
    check = writable if write else readable
    for i, tensor in enumerate(tensors):
        check(f"{name}[{i}]", tensor, group)
        same(f"{name}[{i}]", tensor, f"{name}[0]", tensors[0], shape=equal)


def sequence(name: str, value: object) -> tuple[torch.Tensor, ...]:
    """Check that a value is a list or tuple, and return it as a new tuple.

    Later changes of a list have no effect on the tuple.
    """
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise wrong_type(name, value, "a list or tuple of tensors, one per rank")


def optional(name: str, value: object) -> tuple[torch.Tensor, ...] | None:
    """Check a list as :func:`sequence` does, but also accept None.

    In some ops, only the root passes a list, and the other ranks pass None.
    """
    return None if value is None else sequence(name, value)


def multiple(name: str, tensor: torch.Tensor, of_name: str, of: torch.Tensor, size: int) -> None:
    """Check that ``tensor`` and ``of`` have the same dtype, and that ``tensor`` has ``size`` times as many elements."""
    same(name, tensor, of_name, of, shape=False)
    if tensor.numel() != size * of.numel():
        raise ArgumentError(
            f"{name} has {tensor.numel()} elements, wanted {size * of.numel()}: {size} ranks times the "
            f"{of.numel()} elements of {of_name}"
        )


def disjoint(outputs: Sequence[tuple[str, torch.Tensor]], inputs: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that no output shares memory with another output or with an input.

    :param outputs: the tensors that the op writes, each with its name.
    :param inputs: the tensors that the op reads, each with its name. Inputs may overlap each other.
    """
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes, True, name) for name, t in outputs if t.nbytes]
    spans += [(t.data_ptr(), t.data_ptr() + t.nbytes, False, name) for name, t in inputs if t.nbytes]
    spans.sort()
    written_to, read_to, writer, reader = 0, 0, "", ""
    for low, high, write, name in spans:
        if low < written_to:
            raise ArgumentError(f"{name} overlaps {writer} in memory; wanted separate tensors")
        if write and low < read_to:
            raise ArgumentError(f"{name} overlaps {reader} in memory; wanted separate tensors")
        if write:
            written_to, writer = high, name
        elif high > read_to:
            read_to, reader = high, name


def apart(out_name: str, output: torch.Tensor, in_name: str, input: torch.Tensor) -> None:
    """Check that one output and one input share no memory. :func:`disjoint` checks lists of tensors."""
    out, into = output.data_ptr(), input.data_ptr()
    if out < into + input.nbytes and into < out + output.nbytes:
        disjoint([(out_name, output)], [(in_name, input)])


def index(name: str, value: int, group: Members) -> None:
    """Check that a value is a rank: an ``int`` with ``0 <= value < size``."""
    if type(value) is not int:
        raise wrong_type(name, value, "a rank as an int")
    if not 0 <= value < group.size:
        raise ArgumentError(f"{name} is {value}, wanted a rank of this communicator: 0 <= {name} < {group.size}")


def other(name: str, value: int, group: CheckedComm) -> None:
    """Check that a value is the rank of a peer: a rank other than this rank."""
    index(name, value, group)
    if value == group.rank:
        raise ArgumentError(f"{name} is {value}, this rank itself; wanted another rank")


def end(name: str, value: int, group: CheckedComm) -> None:
    """Check that a value is a rank to send to or receive from: a peer or, for tensors on the CPU, this rank itself."""
    index(name, value, group)
    if value == group.rank and group.device.type != "cpu":
        raise ArgumentError(
            f"{name} is {value}, this rank itself; wanted another rank, as the tensors are on {group.device}: there a "
            "stream copies what a rank would send to itself, by tensor.copy_()"
        )


def tagged(value: int) -> None:
    """Check that a value is a tag: a 32-bit signed ``int``."""
    if type(value) is not int:
        raise wrong_type("tag", value, "an int")
    if not TAG_MIN <= value <= TAG_MAX:
        raise ArgumentError(f"tag is {value}, wanted a 32-bit signed integer: {TAG_MIN} <= tag <= {TAG_MAX}")


def offset(value: int) -> None:
    """Check that a value is an offset into a window: an ``int`` of at least 0, in elements."""
    if type(value) is not int:
        raise wrong_type("offset", value, "an int, in elements")
    if value < 0:
        raise ArgumentError(f"offset is {value}, wanted an offset in elements of at least 0")


def integers(name: str, value: object) -> tuple[int, ...]:
    """Check that a value is a list or tuple, and return a copy. :func:`splits` later checks that the items are ints."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise wrong_type(name, value, "a list or tuple of ints")


def splits(name: str, value: Sequence[int], rows: int, group: CheckedComm) -> None:
    """Check split sizes: one non-negative ``int`` per rank, whose sum is the tensor's number of rows."""
    if len(value) != group.size:
        raise ArgumentError(f"{name} has {len(value)} entries, wanted one per rank: {group.size}")
    for i, n in enumerate(value):
        if type(n) is not int:
            raise wrong_type(f"{name}[{i}]", n, "an int, in rows")
        if n < 0:
            raise ArgumentError(f"{name}[{i}] is {n}, wanted a number of rows of at least 0")
    if sum(value) != rows:
        raise ArgumentError(f"{name} sums to {sum(value)}, wanted {rows}, the tensor's size along dimension 0")
