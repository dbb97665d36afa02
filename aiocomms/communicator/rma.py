"""The one-sided operations (RMA): ``new_window`` and ``Window``, through which ranks access each other's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout, as_int
from aiocomms.communicator.issuer import Issuer
from aiocomms.cuda import crossing
from aiocomms.errors import CommAbortedError, CommError, MismatchError, as_reason
from aiocomms.lowering.shortcuts import give_methods
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import TensorLike, buffers, checks
from aiocomms.ops.modes import unaffected
from aiocomms.progress.work import Work

Given = TypeVar("Given", bound=TensorLike)


class OneSided(Issuer):
    """The base class with the method that opens windows."""

    async def new_window(self, tensor: TensorLike, *, timeout: OpTimeout = COMM_TIMEOUT) -> Window:
        """Open a tensor to one-sided access by the other ranks. Collective.

        :param tensor: this rank's part of the window: any size, and the same dtype on all ranks. The window keeps the
            tensor alive.
        :param timeout: the deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the window, once every rank's part is open.
        :raises ArgumentError: the tensor cannot be opened; nothing was sent.
        :raises MismatchError: the ranks' dtypes differ; the communicator stays usable.
        :raises CommAbortedError: the call was cancelled on another rank. A cancelled call ends the
            communicator, because some ranks may already have the window. These ranks would wait until the rank of the
            cancelled call closes the window.
        :raises UnsupportedOperation: the transports of this communicator have neither RMA nor messages.
        """
        return await self._begin_window(tensor, timeout)

    def _begin_window(
        self, tensor: TensorLike, timeout: OpTimeout = COMM_TIMEOUT, name: str | None = None
    ) -> Coroutine[Any, Any, Window]:
        """Start the collectives that open a window, and return a coroutine that awaits them.

        :param name: the window's name in reports. If ``name`` is None, the name is made from the window's number. If
            ``name`` is empty, reports do not list the window.
        """
        works: list[Work[Any]] = [self._issue_in_order(ops.WindowOpen(tensor), timeout=timeout)]
        name = f"window {next(self._core.recorder.window_numbers)}" if name is None else name
        # The record of the op has the tensor over the memory of an array. The window stays on this memory, even if the
        # program gives its tensor other memory.
        memory = unaffected(cast("ops.WindowOpen", works[0].op).tensor.detach)()
        mine = buffers.int64([memory.numel(), sorted(map(str, checks.DTYPES)).index(str(memory.dtype))], device="cpu")
        table = buffers.empty(self.size, 2, dtype=torch.int64, device=self.device)
        with self._all_or_none(works):
            works.append(
                self._issue_in_order(ops.AllGatherSingle(table, crossing.to_device(mine, self.device)), timeout=timeout)
            )
        return self._opened_window(tensor, memory, name, mine.tolist(), works, timeout)

    async def _opened_window(
        self, given: TensorLike, memory: Tensor, name: str, mine: list[int], works: Sequence[Work[Any]],
        timeout: OpTimeout,
    ) -> Window:  # fmt: skip
        with self._all_or_none(works):
            handle = await works[0]
            rows = crossing.to_host(await works[1]).tolist()
            rows[self.rank] = mine  # the copy of this rank's own row may still be under way
            sizes, dtypes = map(list, zip(*rows, strict=True))
        info = ops.WindowInfo(handle, memory, sizes, name=name)
        self._core.recorder.windows.add(info)
        window = Window(self, info, given)
        if len(set(dtypes)) > 1:
            # If the close fails, the communicator is lost, and the next operation raises the reason.
            with contextlib.suppress(CommError):
                await window.aclose(timeout=timeout)  # All ranks see the same dtypes, and all of them close the window.
            names = sorted(map(str, checks.DTYPES))
            dtypes_of = ", ".join(f"rank {r}: {names[d]}" for r, d in enumerate(dtypes))
            raise MismatchError(
                f"a window has one dtype on all ranks, and the dtypes here are {dtypes_of}; the window was closed",
                comm=self.name, op="new_window", seq=works[0].seq, rank=self.rank,
            )  # fmt: skip
        return window

    @contextlib.contextmanager
    def _all_or_none(self, works: Sequence[Work[Any]]) -> Iterator[None]:
        """Declare the communicator lost if the opening of a window fails or is cancelled.

        Other ranks may already have the window.
        """
        try:
            yield
        except BaseException as error:
            for work in works:
                if work.done():
                    work.exception()  # This call marks the error as seen: new_window raises it.
            if isinstance(error, CommError):
                cause = error
            elif isinstance(error, Exception):
                cause = CommError(f"new_window failed: {as_reason(error)}")
            else:
                cause = CommAbortedError("new_window was cancelled")
            failure = cause.within("new_window", works[0].seq)
            self._core.lose(failure)
            raise (failure if cause is error else error) from failure.__cause__


class Window(Handle):
    """Memory that all ranks may read and write: a tensor on each rank. Offsets and sizes are in elements.

    Operations of one rank on one other rank's part take effect in the order of the calls. When a ``put`` is
    done, the program may change the tensor that was passed to ``put``. The data of a ``put`` has arrived when a later
    ``flush`` is done, or when the peer gets a later ``signal``.

    ``async with`` closes the window. If the body raises an error, the exit starts the close, does not await the close,
    and raises the error at once. An awaited close could wait forever: the other ranks close the window only after their
    bodies, and these bodies may wait for ops that this rank will never call. The close ends when every rank has
    closed the window.
    """

    __slots__ = ("__dict__", "__weakref__", "_shortcuts")

    def __init__(self, comm: Issuer, info: ops.WindowInfo, given: Any) -> None:
        self._comm = comm
        self._info, self._given = info, given
        self._closing: Work[None] | None = None
        self._shortcuts = None
        carriers = comm._core.by_family
        if (shortcuts := comm._shortcuts) is not None and carriers["rma"] is carriers["p2p"] and type(self) is Window:
            self._shortcuts = shortcuts.window(comm, info)
            give_methods(Window, shortcuts.method)

    @property
    def tensor(self) -> Any:
        """This rank's part of the window: the tensor or array that was passed to ``new_window``."""
        return self._given

    @property
    def name(self) -> str:
        """The window's name in reports: ``window 2`` is the second window of its communicator, on all ranks."""
        return self._info.name

    @property
    def sizes(self) -> list[int]:
        """Each rank's number of elements, in rank order."""
        return self._info.sizes

    @property
    def closed(self) -> bool:
        """True once the window was closed on this rank."""
        return self._info.closed

    def put(
        self,
        tensor: Given,
        dst: int,
        offset: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Write a tensor into a rank's part of the window.

        :param tensor: a tensor of any shape and of the window's dtype; it must not be changed until the work is done.
        :param dst: the rank whose part is written; may be this rank.
        :param offset: the index of the first element to write in the part of ``dst``.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or the tensor would not fit; nothing was sent.
        """
        return self._comm._issue(ops.Put(self._info, tensor, dst, offset), hints, timeout)

    def put_signal(
        self,
        tensor: Given,
        dst: int,
        offset: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Write a tensor into a rank's part of the window, then signal that rank.

        The call does the same as :meth:`put` followed by :meth:`signal`, like OpenSHMEM's ``shmem_put_signal``.

        :param tensor: a tensor of any shape and of the window's dtype; it must not be changed until the work is done.
        :param dst: the rank whose part is written, and that gets the signal; may be this rank.
        :param offset: the index of the first element to write in the part of ``dst``.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or the tensor would not fit; nothing was sent.
        """
        return self._comm._issue(ops.PutSignal(self._info, tensor, dst, offset), hints, timeout)

    def put_v(
        self,
        tensor: Given,
        dst: int,
        offsets: Sequence[int] | Tensor,
        starts: Sequence[int] | Tensor,
        count: int,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Write runs of a tensor's elements into a rank's part of the window, in one operation.

        A run is a sequence of consecutive elements. All runs have the same length.

        The call corresponds to ``MPI_Put`` with datatypes of ``MPI_Type_create_indexed_block``.

        :param tensor: a tensor of any shape and of the window's dtype; it must not be changed until the work is done.
        :param dst: the rank whose part is written; may be this rank.
        :param offsets: for each run, the index of its first element in the part of ``dst``, as a list or an int64
            tensor on the CPU. A tensor is faster than a list.
        :param starts: for each run, the index of its first element in the tensor; as many as ``offsets``.
        :param count: the number of elements of each run.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or a run would not fit; nothing was sent.
        """
        op = ops.PutV(self._info, tensor, dst, ops.places("offsets", offsets), ops.places("starts", starts), count)
        return self._comm._issue(op, hints, timeout)

    def get_v(
        self,
        tensor: Given,
        src: int,
        offsets: Sequence[int] | Tensor,
        starts: Sequence[int] | Tensor,
        count: int,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Read runs of elements of equal length from a rank's part of the window into a tensor; see :meth:`put_v`.

        :param tensor: the tensor to read into, of any shape and of the window's dtype.
        :param src: the rank whose part is read; may be this rank.
        :param offsets: for each run, the index of its first element in the part of ``src``, as in :meth:`put_v`.
        :param starts: for each run, the index of its first element in the tensor; as many as ``offsets``.
        :param count: the number of elements of each run.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or a run would not fit; nothing was sent.
        """
        op = ops.GetV(self._info, tensor, src, ops.places("offsets", offsets), ops.places("starts", starts), count)
        return self._comm._issue(op, hints, timeout)

    def get(
        self,
        tensor: Given,
        src: int,
        offset: int = 0,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[Given]:
        """Read from a rank's part of the window into a tensor.

        :param tensor: the tensor to read into, of any shape and of the window's dtype.
        :param src: the rank whose part is read; may be this rank.
        :param offset: the index of the first element to read in the part of ``src``.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is ``tensor``.
        :raises ArgumentError: an argument is wrong, or the part of ``src`` has too few elements; nothing was sent.
        """
        return self._comm._issue(ops.Get(self._info, tensor, src, offset), hints, timeout)

    def fetch_add(
        self,
        dst: int,
        offset: int,
        value: int,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[int]:
        """Atomically add a number to an element of a rank's part of the window.

        :param dst: the rank whose part is changed; may be this rank.
        :param offset: the index of the element; the window's dtype must be int32 or int64.
        :param value: the number to add; the sum wraps around.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is the element's value before the addition.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: the window's dtype has no atomics.
        """
        return self._comm._issue(ops.FetchAdd(self._info, dst, offset, value), hints, timeout)

    def compare_swap(
        self,
        dst: int,
        offset: int,
        expected: int,
        value: int,
        *,
        hints: Mapping[str, Any] | None = None,
        timeout: OpTimeout = COMM_TIMEOUT,
    ) -> Work[int]:
        """Atomically replace an element of a rank's part of the window if the element has the expected value.

        :param dst: the rank whose part is changed; may be this rank.
        :param offset: the index of the element; the window's dtype must be int32 or int64.
        :param expected: the value that the element must have.
        :param value: the value that replaces the expected one.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is the element's old value. The old value equals ``expected`` if the element was
            replaced.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises UnsupportedOperation: the window's dtype has no atomics.
        """
        return self._comm._issue(ops.CompareSwap(self._info, dst, offset, expected, value), hints, timeout)

    def signal(
        self, dst: int, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Work[None]:
        """Signal to rank ``dst`` that all earlier puts of this rank to ``dst`` have arrived.

        Rank ``dst`` waits for the signal by :meth:`wait_signal`.

        :param dst: the rank that gets the signal; may be this rank.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is None.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._comm._issue(ops.Signal(self._info, dst), hints, timeout)

    def wait_signal(
        self, src: int, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Work[None]:
        """Wait for one signal of a rank, and consume the signal.

        Signals that arrive before a wait are counted, so each of them completes one later wait.

        :param src: the rank that signals; may be this rank.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout. If
            no signal has arrived at the deadline, only this op fails, and the communicator stays usable.
        :returns: the work; its result is None.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._comm._issue(ops.WaitSignal(self._info, src), hints, timeout)

    def flush(
        self, dst: int | None = None, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Work[None]:
        """Wait until all earlier puts of this rank are visible in the parts that they wrote.

        :param dst: the rank whose part was written; None: every rank.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is None.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        """
        return self._comm._issue(ops.Flush(self._info, dst), hints, timeout)

    def map_remote_tensor(
        self, rank: int, *, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Work[Tensor]:
        """Map a rank's part of the window as a tensor of this process: the memory itself, not a copy.

        :param rank: the rank whose part is mapped; may be this rank.
        :param hints: a mapping with advice to the transport, which ignores unknown keys.
        :param timeout: the op's deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :returns: the work; its result is a tensor with the shape of the part of ``rank``. The tensor is valid until the
            window is closed.
        :raises UnsupportedOperation: the ranks share no memory.
        """
        return self._comm._issue(ops.MapRemoteTensor(self._info, rank), hints, timeout)

    def mapped(self, rank: int) -> bool:
        """Return whether a rank's part is mapped in this process. If so, :meth:`map_remote_tensor` can return the part.

        The answer does not change after the window is opened. If the window is in CPU memory, this process reads
        and writes a mapped part directly, as in a window of ``MPI_Win_allocate_shared``. If the window is in GPU
        memory, the GPU copies the data. Access to an unmapped part uses messages, or the network's RMA.

        :param rank: the rank whose part is asked about; may be this rank.
        :raises ArgumentError: ``rank`` is no rank of this communicator.
        :raises CommClosedError: the window is closed.
        """
        rank = as_int(rank)
        try:
            ops.MapRemoteTensor(self._info, rank).check(self._comm._core)
        except CommError as error:
            raise error.about(comm=self._comm.name, op="mapped", rank=self._comm.rank) from None
        return rank in getattr(self._info.handle, "mapped", ())

    async def aclose(self, *, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Close the window once all ranks' operations on it have ended. Collective. Idempotent.

        A pending :meth:`wait_signal` is withdrawn, and raises :class:`CommClosedError`. A later call of this method
        waits for the end of the first call.

        :param timeout: the deadline in seconds; None: no deadline. The default is the communicator's timeout.
        :raises ArgumentError: ``timeout`` is not valid; the window stays open.
        :raises CommError: the communicator is lost or closed.
        """
        if not self.closed:
            self._start_closing(timeout)
        if self._closing is not None:
            await self._closing

    def _start_closing(self, timeout: OpTimeout = COMM_TIMEOUT) -> Work[None]:
        info, core = self._info, self._comm._core
        core.demand_thread("close_window")
        info.closed = True
        try:
            self._closing = self._comm._issue(ops.WindowClose(info), timeout=timeout)
        except BaseException:
            info.closed = core.refusing  # The call was refused, and the program can call again.
            raise
        return self._closing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        elif not self.closed:
            with contextlib.suppress(CommError):  # The communicator is lost or closed, and so is the window.
                self._start_closing().add_done_callback(Work.exception)  # The body's error is raised.
