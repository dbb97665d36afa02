"""Windows in GPU memory.

If CUDA maps a rank's part into this process, the GPU copies the data of puts and gets. Otherwise, UCX transfers the
data.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol, cast

import anyio
import torch
from torch import Tensor, UntypedStorage

from aiocomms import ops
from aiocomms.cuda import Completions, Cuda, Event, Mapped, Shared, Stream
from aiocomms.errors import CommError, ProtocolError
from aiocomms.lowlevel import buffers, call_in_thread, clock, run_in_thread
from aiocomms.transport import Completion
from aiocomms_ucx.member import Member
from aiocomms_ucx.windows import WindowHandle, WindowPart, Windows

_LAST_COPIES: Final = 1.0
"""The maximum time, in seconds, for which the end of a communicator waits for running copies.

Only a communicator that is lost can have running copies when it ends.
"""


class CudaMember(Member, Protocol):
    """The attributes and methods of a rank's transport that windows in GPU memory use."""

    cuda: Cuda
    completions: Completions

    def soon(self, call: Callable[[], object]) -> None:
        """Schedule a call on the loop's thread. If the communicator ends first, drop the call.

        Any thread may call this method.
        """


class _Copy:
    """A copy that the GPU may not have finished yet, and the memory that the copy needs."""

    __slots__ = ("behind", "memory", "work")

    def __init__(self, work: Completion, memory: object, behind: Event) -> None:
        self.work = work
        self.memory = memory
        self.behind = behind
        """The event that marks the end of the earlier work in the caller's stream."""


class Copies:
    """The copies of a communicator's windows. One separate stream runs the copies in the order of the calls."""

    def __init__(self, cuda: Cuda, completions: Completions) -> None:
        self.stream: Stream | None = None
        """The stream of the copies; None before the first window is open."""
        self.made = 0
        """The number of copies that the GPU has finished."""
        self._cuda, self._completions = cuda, completions
        self._begun = 0
        self._to: dict[int, int] = {}  # the number of the last copy, by rank
        self._in: dict[int, int] = {}  # the number of the last copy, by window
        self._under_way: deque[_Copy] = deque()

    def begin(self, work: Completion, window: int, rank: int, memory: object, to: int, source: int) -> None:
        """Enqueue a copy after the current stream's work.

        When the copy has ended, ``work`` is completed. A put with a signal is completed later, after its signal.

        :param memory: the memory that the copy uses, besides the op's own tensors.
        :raises CommError: CUDA refuses the copy.
        """
        cuda, stream, op = self._cuda, self.stream, cast("ops.Put | ops.Get", work.op)
        assert stream is not None
        with cuda.harmless():
            try:
                behind = self._completions.mark(cuda.current_stream())
                stream.wait_event(behind)
                cuda.copy(stream, to, source, op.tensor.nbytes)
            except RuntimeError as error:
                raise CommError(f"CUDA could not begin the op: {error}") from error
            self._under_way.append(_Copy(work, (op, memory), behind))
            self._completions.add(stream, self._ended)  # an error loses the communicator, because the GPU may copy
        self._begun += 1
        self._to[rank] = self._in[window] = self._begun

    def last(self, rank: int | None) -> int:
        """Return the number of the last copy from or to the part of ``rank``, or any part if ``rank`` is None."""
        return self._begun if rank is None else self._to.get(rank, 0)

    def last_in(self, window: int) -> int:
        """Return the number of the last copy in a window."""
        return self._in.get(window, 0)

    def forget(self, window: int) -> None:
        """Delete the stored number of the last copy in a window."""
        self._in.pop(window, None)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of running copies. Any thread may call this method."""
        return [tensor for copy in list(self._under_way) for _, tensor in copy.work.op.reads() + copy.work.op.writes()]

    def end(self) -> Callable[[], object] | None:
        """Return a blocking function that waits for the running copies; None if no copy is running.

        The function keeps the memory of the copies alive until they have ended.
        """
        if not self._under_way:
            return None
        event, memory = self._cuda.event(), list(self._under_way)

        def wait() -> None:
            with contextlib.suppress(RuntimeError):  # a broken device does no more work
                event.synchronize()
            memory.clear()

        with self._cuda.harmless():
            event.record(self.stream)
        return wait

    def _ended(self) -> None:
        copy = self._under_way.popleft()
        self.made += 1
        self._completions.release(copy.behind)
        if not isinstance(copy.work.op, ops.PutSignal) and not copy.work.done():
            copy.work.complete()


class _Reached:
    """The parts of one window that CUDA maps into this process."""

    def __init__(self) -> None:
        self.found: list[Tensor | Exception | None] = []
        """The result of the mapping of each rank's part, in rank order.

        A result is a tensor, an error, or None for a part that is not mapped.
        """
        self.mapped: list[Mapped] = []
        self.tried = clock.event()
        """The event that is set when the thread has tried to map all parts."""

    def outcomes(self) -> Iterator[Tensor | None]:
        """Yield the tensor or None for each rank, in rank order.

        If the result for a rank is an error, raise this error.
        """
        for one in self.found:
            if isinstance(one, Exception):
                raise one
            yield one

    def release(self) -> None:
        """Release the mapped memory. This method blocks, so it is not called on the loop's thread."""
        self.tried.wait()
        self.found.clear()
        while self.mapped:
            with contextlib.suppress(RuntimeError):  # the device is broken
                self.mapped.pop().release()


class CudaWindows(Windows):
    """The windows of one communicator, in GPU memory.

    If CUDA maps a part into this process, the GPU executes puts and gets on this part as copies on a separate stream.
    Each copy starts after the earlier work of the caller's stream. A signal, a flush or the close waits until the GPU
    has finished the earlier copies.
    """

    record = 16 * 1024
    unshared = (
        "is memory that CUDA does not map here: of this very process, of a GPU that this process does not see, or of "
        "torch's expandable segments"
    )
    _transport: CudaMember

    def __init__(self, transport: CudaMember) -> None:
        self.copies = Copies(transport.cuda, transport.completions)
        self._reached: dict[int, _Reached] = {}
        super().__init__(transport)

    # ----------------------------------------------------------------------------------------------------- operations

    def begin(self, op: ops.Op, work: Completion) -> bool:
        """Begin an op as a copy by the GPU, if this is possible.

        :returns: True if the GPU executes the op as a copy. The op completes when the copy has ended. For a put with a
            signal, :meth:`post` sends the signal later.
        :raises CommError: the op cannot begin.
        """
        part = self._mapped(op) if isinstance(op, (ops.Put, ops.Get)) else None
        if part is None:
            return False
        assert isinstance(op, (ops.Put, ops.Get))
        handle: WindowHandle = op.window.handle
        rank = _target(op)
        if op.offset + op.tensor.numel() > part.numel():
            raise ProtocolError(f"the window of rank {rank} is smaller than that rank has said", peer=rank)
        here, there = op.tensor.data_ptr(), part.data_ptr() + op.offset * handle.itemsize
        to, source = (here, there) if isinstance(op, ops.Get) else (there, here)
        self.copies.begin(work, handle.number, rank, part, to, source)
        return True

    def must_follow(self, op: ops.Op) -> int:
        """Return the number of copies that the GPU must finish before a new op may be posted."""
        match op:
            case ops.PutSignal() | ops.Signal() | ops.Flush():
                return self.copies.last(op.dst)
            case ops.WindowClose():
                return self.copies.last_in(op.window.handle.number)
        return 0

    def post(self, op: Any, work: Completion) -> None:
        """See :meth:`Windows.post`. If the GPU copies a put with a signal, only the signal is sent."""
        if isinstance(op, ops.PutSignal) and self._mapped(op) is not None:
            transport = self._transport
            number = op.window.handle.number
            return transport.follow(work, transport.engine.signal(id(work), transport.group, number, op.dst))
        return super().post(op, work)

    def held(self) -> list[Tensor]:
        """See :meth:`Windows.held`."""
        return super().held() + self.copies.tensors()

    def _mapped(self, op: ops.Put | ops.Get) -> Tensor | None:
        """Return the part of the window's memory that an op uses; None if the GPU cannot copy to or from it."""
        handle: WindowHandle = op.window.handle
        return handle.mapped.get(_target(op)) if op.tensor.numel() else None

    # ---------------------------------------------------------------------------------------------- opening a window

    def _describe(self, number: int, tensor: Tensor) -> WindowPart:
        """See :meth:`Windows._describe`. Each process gets its own handle, because CUDA counts mappings."""
        transport = self._transport
        rkey = transport.engine.map_window(transport.group, number, tensor, True)
        offset = int(tensor.storage_offset()) * tensor.element_size()
        ipc: list[Shared | None] = [None] * transport.size
        for rank in range(transport.size) if tensor.nbytes else ():
            if rank != transport.rank and not transport.far(rank):
                ipc[rank] = self._export(rank, tensor.untyped_storage())
        return WindowPart(-1, offset, tuple(tensor.shape), tensor.itemsize, tensor.data_ptr(), rkey, ipc)

    def _export(self, rank: int, storage: UntypedStorage) -> Shared | None:
        """Return the handle with which a rank of this host maps memory; None if CUDA does not share the memory."""
        transport = self._transport
        return None if transport.pids[rank] == transport.pids[transport.rank] else transport.cuda.share(storage)

    def _enter(self, handle: WindowHandle, parts: list[WindowPart], work: Completion) -> None:
        """See :meth:`Windows._enter`. A thread maps the memory, because CUDA needs milliseconds."""
        transport, copies = self._transport, self.copies
        reached = self._reached[handle.number] = _Reached()
        streams: list[Stream] = []

        def reach() -> None:
            with self._aside():
                if copies.stream is None:
                    streams.append(transport.cuda.stream(0))
                for rank, part in enumerate(parts):
                    reached.found.append(self._tried(handle, rank, part, reached))

        def then(error: Exception | None) -> None:
            if error is not None:
                reached.found.append(RuntimeError(f"CUDA cannot be used on another thread: {error}"))
            reached.tried.set()
            transport.soon(lambda: self._reached_all(handle, parts, reached.outcomes(), streams, work))

        call_in_thread(reach, then)

    def _reached_all(
        self, handle: WindowHandle, parts: list[WindowPart], reached: Iterable[Tensor | None],
        streams: list[Stream], work: Completion,
    ) -> None:  # fmt: skip
        """Continue the opening of a window on the loop's thread. Do nothing if the window was abandoned."""
        if handle.number not in self._reached or work.done():
            return
        if self.copies.stream is None and streams:
            self.copies.stream = streams[0]
        self._entered(handle, parts, reached, work)

    def _tried(self, handle: WindowHandle, rank: int, part: WindowPart, reached: _Reached) -> Tensor | Exception | None:
        try:
            found = self._map_part(handle, rank, part, reached)
        except (CommError, RuntimeError) as error:
            return error
        if found is not None:
            part.rkey = b""  # with a key, UCX would also map the part, on the loop
        return found

    def _map_part(self, handle: WindowHandle, rank: int, part: WindowPart, reached: _Reached) -> Tensor | None:
        """Return a rank's part as a tensor; None if CUDA cannot map the part or the ranks' element sizes differ.

        This method runs on a thread other than the loop's.
        """
        if rank == self._transport.rank:
            return handle.tensor
        shared = part.ipc[self._transport.rank] if len(part.ipc) == self._transport.size else None
        if shared is None or self._transport.far(rank) or part.itemsize != handle.itemsize:
            return None
        mapped = self._transport.cuda.map(shared)
        if mapped is None:
            return None
        reached.mapped.append(mapped)
        storage, dtype, count = mapped.storage, handle.tensor.dtype, torch.Size(part.shape).numel()
        if part.offset % handle.itemsize or part.offset + count * handle.itemsize > storage.nbytes():
            raise ProtocolError(f"rank {rank} names memory for its window that is not its own", peer=rank)
        whole = buffers.empty(0, dtype=dtype, device=storage.device)
        flat: Tensor = whole.set_(storage, part.offset // handle.itemsize, (count,), (1,))
        return flat.view(part.shape)

    # ------------------------------------------------------------------------------------------------------- the end

    def _let_go(self, handle: WindowHandle) -> None:
        """See :meth:`Windows._let_go`. A thread releases the parts after the last copy."""
        handle.mapped.clear()
        last = self.copies.end() if self.copies.last_in(handle.number) > self.copies.made else None
        self.copies.forget(handle.number)
        reached = self._reached.pop(handle.number, None)
        if reached is not None:
            call_in_thread(lambda: self._release(reached, last), lambda error: None)

    def _release(self, reached: _Reached, last: Callable[[], object] | None) -> None:
        with self._aside():
            if last is not None:
                last()
            reached.release()

    async def end(self) -> None:
        """Wait for running copies, at most :data:`_LAST_COPIES` seconds.

        The time is limited because work on a stream of the program may block the copies.
        """
        last = self.copies.end()
        if last is not None:
            with anyio.move_on_after(_LAST_COPIES, shield=True), contextlib.suppress(CommError):
                await run_in_thread(lambda: self._wait(last))

    def _wait(self, last: Callable[[], object]) -> None:
        with self._aside():
            last()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Prepare the current thread, which is not the loop's thread, for CUDA calls."""
        cuda = self._transport.cuda
        cuda.activate()
        with cuda.harmless():
            yield


def _target(op: ops.Put | ops.Get) -> int:
    """Return the rank whose part a put writes or a get reads."""
    return op.src if isinstance(op, ops.Get) else op.dst
