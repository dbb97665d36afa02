"""The functional forms of the operations: functions that return a new tensor and do not change their arguments.

The argument ``group`` of each function is a communicator or its name. ``""`` and None mean the default, ``"world"``.
Each function starts its operation immediately and returns a :class:`~aiocomms.Work` whose result is the new tensor.
Tensor arguments may be non-contiguous and may require grad. Gradients do not flow through the operation. All functions
raise :class:`ArgumentError` for wrong arguments before they send anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from types import FunctionType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.communicator.communicator import Communicator
from aiocomms.communicator.formation import get_comm
from aiocomms.cuda import crossing
from aiocomms.errors import ArgumentError
from aiocomms.lowering.runs import Steps
from aiocomms.lowering.schedules import Context, broadcast_tree, schedule
from aiocomms.lowlevel.handles import uncompiled
from aiocomms.ops import Op, TensorLike, buffers, checks, codec
from aiocomms.ops.arrays import as_tensor, like
from aiocomms.ops.checks import CheckedComm
from aiocomms.ops.reductions import ReduceOp
from aiocomms.progress.work import Work

AnyGroup: TypeAlias = Communicator | str | None

Given = TypeVar("Given", Tensor, TensorLike)  # The result for a subclass of tensors is a tensor, too.


def send(tensor: Given, dst: int, tag: int = 0, group: AnyGroup = None) -> Work[Given]:
    """Send a tensor to rank ``dst``; see :meth:`Communicator.send`.

    :returns: the work; its result is the tensor that was sent.
    """
    return get_comm(group).send(like(tensor, _dense("tensor", tensor)), dst, tag)


def recv(
    shape: Sequence[int], src: int, tag: int = 0, group: AnyGroup = None, *, dtype: torch.dtype = torch.float32
) -> Work[Tensor]:
    """Receive a tensor of known shape and dtype from rank ``src``.

    :returns: the work; its result is a new tensor.
    :raises ArgumentError: an argument is wrong.
    """
    comm = get_comm(group)
    return comm.recv(_new(shape, dtype, comm.device), src, tag)


def broadcast(tensor: Given, root: int, group: AnyGroup = None) -> Work[Given]:
    """Give every rank a copy of the root's tensor.

    :param tensor: the tensor to send, on the root. The other ranks use only the shape and the dtype of ``tensor``.
    """
    return get_comm(group).broadcast(_copy("tensor", tensor), root)


def all_reduce(tensor: Given, op: ReduceOp | str = ReduceOp.SUM, group: AnyGroup = None) -> Work[Given]:
    """Give every rank the reduction of all ranks' tensors.

    :param op: a :class:`ReduceOp`, or one of the names ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` and ``"product"``.
    """
    return get_comm(group).all_reduce(_copy("tensor", tensor), op)


def reduce(tensor: Given, root: int, op: ReduceOp | str = ReduceOp.SUM, group: AnyGroup = None) -> Work[Given]:
    """Give the root the reduction of all ranks' tensors, and the other ranks a copy of ``tensor``.

    :param op: see :func:`all_reduce`.
    """
    return get_comm(group).reduce(_copy("tensor", tensor), root, op)


def scan(tensor: Given, op: ReduceOp | str = ReduceOp.SUM, group: AnyGroup = None) -> Work[Given]:
    """Give each rank the reduction of its own tensor and the tensors of all lower ranks.

    :param op: see :func:`all_reduce`.
    """
    return get_comm(group).scan(_copy("tensor", tensor), op)


def exscan(tensor: Given, op: ReduceOp | str = ReduceOp.SUM, group: AnyGroup = None) -> Work[Given]:
    """Give each rank the reduction of the tensors of all lower ranks; for rank 0 see :meth:`Communicator.exscan`.

    :param op: see :func:`all_reduce`.
    """
    return get_comm(group).exscan(_copy("tensor", tensor), op)


def all_gather(tensor: Given, group: AnyGroup = None) -> Work[Given]:
    """Give every rank the tensors of all ranks.

    :returns: the work; its result has the shape ``(size, *tensor.shape)``.
    """
    comm = get_comm(group)
    mine: Tensor = _dense("tensor", tensor)
    return comm.all_gather_single(like(tensor, mine.new_empty((comm.size, *mine.shape))), mine)


def gather(tensor: Given, dst: int, group: AnyGroup = None) -> Work[Given | None]:
    """Give rank ``dst`` the tensors of all ranks.

    :returns: the work; its result has the shape ``(size, *tensor.shape)`` on ``dst``, and is None on other ranks.
    """
    comm = get_comm(group)
    mine: Tensor = _dense("tensor", tensor)
    out = like(tensor, mine.new_empty((comm.size, *mine.shape))) if comm.rank == dst else None
    return comm.gather_single(out, mine, dst)


def scatter(tensor: TensorLike | None, src: int, group: AnyGroup = None) -> Work[Any]:
    """Cut rank ``src``'s tensor along dimension 0 into ``size`` equal chunks, and give each rank its chunk.

    :param tensor: the tensor to cut, on ``src``. Other ranks ignore this argument, and receive the shape and the dtype
        from rank ``src``.
    """
    comm = get_comm(group)
    mine = _dense("tensor", tensor) if comm.rank == src else None
    return comm._issue(ScatterNew(src, mine, tensor))


def reduce_scatter(tensor: Given, op: ReduceOp | str = ReduceOp.SUM, group: AnyGroup = None) -> Work[Given]:
    """Reduce all ranks' tensors, and give each rank one of ``size`` equal chunks of the result, cut along dimension 0.

    :param op: see :func:`all_reduce`.
    """
    comm = get_comm(group)
    mine = _dense("tensor", tensor)
    return comm.reduce_scatter_single(like(tensor, mine.new_empty(_chunk(mine, comm.size))), mine, op)


def all_to_all(tensor: Given, group: AnyGroup = None) -> Work[Given]:
    """Send chunk ``r`` of a tensor to rank ``r``; chunk ``r`` of the result comes from rank ``r``.

    The chunks are the ``size`` equal parts of dimension 0.
    """
    comm = get_comm(group)
    mine = _dense("tensor", tensor)
    _chunk(mine, comm.size)
    return comm.all_to_all_single(like(tensor, torch.empty_like(mine)), mine)


def barrier(group: AnyGroup = None) -> Work[None]:
    """Wait until every rank has called ``barrier``."""
    return get_comm(group).barrier()


class ScatterNew(Op, frozen=True, eq=False):
    """A scatter of chunks whose shape and dtype only rank ``src`` knows beforehand."""

    name = kind = "scatter"
    src: int
    tensor: Tensor | None
    given: Any
    """The tensor or array that the caller passed on rank ``src``. The result on rank ``src`` has the same type."""

    def check(self, group: CheckedComm) -> None:
        """See :meth:`Op.check`."""
        checks.index("src", self.src, group)
        if self.tensor is not None:
            checks.readable("tensor", self.tensor, group)
            _chunk(self.tensor, group.size)
            codec.describe_tensor(self.tensor)  # An error behind the start would leave the other ranks in the op.


@schedule(ScatterNew)
def _scatter_new(g: Context, op: ScatterNew) -> Steps:
    """Broadcast dtype and shape along a tree of ranks. Then send each rank's chunk directly from rank ``src``."""
    outline = buffers.empty(codec.TENSOR_BYTES, dtype=torch.uint8, device=g.device)
    if op.tensor is not None:
        outline = crossing.to_tensor(codec.describe_tensor(op.tensor), g.device)
    yield from broadcast_tree(g, outline, op.src)
    dtype, shape, _ = codec.parse_tensor(crossing.to_bytes(outline))
    out = buffers.empty((shape[0] // g.size, *shape[1:]), dtype=dtype, device=g.device)
    if op.tensor is None:
        yield [g.recv(out, op.src)]
        return out
    chunks = list(op.tensor.tensor_split(g.size))
    out.copy_(chunks[g.rank])
    yield [g.send(chunk, r) for r, chunk in enumerate(chunks) if r != g.rank]
    return like(op.given, out)


def _new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        sizes = [index(n) for n in shape]
    except TypeError:
        raise arguments.wrong_type("shape", shape, "a sequence of ints") from None
    if any(n < 0 for n in sizes):
        raise ArgumentError(f"shape is {arguments.short(shape)}, wanted sizes of at least 0")
    if not isinstance(dtype, torch.dtype):
        raise arguments.wrong_type("dtype", dtype, "a torch.dtype")
    return buffers.empty(sizes, dtype=dtype, device=device)


def _dense(name: str, given: Any) -> Tensor:
    tensor = as_tensor(name, given, write=False)
    checks.has_elements(name, tensor)
    dense: Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense


def _copy(name: str, given: Any) -> Any:
    tensor = as_tensor(name, given, write=False)
    dense = _dense(name, tensor)
    return like(given, dense.clone() if dense.data_ptr() == tensor.data_ptr() else dense)


def _chunk(tensor: Tensor, size: int) -> tuple[int, ...]:
    if not tensor.dim() or tensor.shape[0] % size:
        raise ArgumentError(f"tensor is {arguments.describe(tensor)}, wanted dimension 0 divisible by the {size} ranks")
    return (tensor.shape[0] // size, *tensor.shape[1:])


for _function in [it for it in globals().values() if isinstance(it, FunctionType) and it.__module__ == __name__]:
    uncompiled(_function)
