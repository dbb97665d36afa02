"""The transport for GPU memory: each op is handed to the engine when the GPU has done all work queued before it."""

from __future__ import annotations

import functools
import select
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Self

import msgspec
import torch
from torch import Tensor, UntypedStorage

from aiocomms import ops
from aiocomms.cuda import Completions, Cuda, TorchCuda
from aiocomms.errors import CommError, ProtocolError, UnsupportedOperation
from aiocomms.lowlevel import Waker, buffers, has_room, run_in_thread
from aiocomms.ops.writing import octets
from aiocomms.transport import Completion, Rendezvous
from aiocomms_ucx._engine import CUDA, TURNS
from aiocomms_ucx.bringup import Ranks
from aiocomms_ucx.shared_engine import SharedEngine
from aiocomms_ucx.status import TRUNCATED
from aiocomms_ucx.transport import UcxTransport
from aiocomms_ucx.windows import WindowHandle, WindowPart, Windows

_GLANCES: Final = 3
"""How often a post looks whether its caller's stream is done, before the loop does: on an idle GPU it soon is."""


class CudaWindows(Windows):
    """Windows in GPU memory. UCX reads and writes them, and CUDA maps them into other processes of the host."""

    record = 16 * 1024
    unshared = (
        "is memory that CUDA does not map here: of this very process, of a GPU that this process does not see, or of "
        "torch's expandable segments"
    )

    def _describe(self, number: int, tensor: Tensor) -> WindowPart:
        """See :meth:`Windows._describe`. CUDA counts the processes that map memory, so each gets its own handle."""
        transport = self._transport
        rkey = transport.engine.map_window(transport.group, number, tensor, True)
        offset = int(tensor.storage_offset()) * tensor.element_size()
        ipc: list[tuple[Any, ...] | None] = [None] * transport.size
        for rank in range(transport.size) if tensor.nbytes else ():
            if not transport.far(rank) and transport.pids[rank] != transport.pids[transport.rank]:
                ipc[rank] = self._export(tensor.untyped_storage())
        return WindowPart(-1, offset, tuple(tensor.shape), tensor.data_ptr(), rkey, ipc, self._gpu(tensor))

    def _reach(self, handle: WindowHandle, rank: int, part: WindowPart) -> Tensor | None:
        """See :meth:`Windows._reach`."""
        if rank == self._transport.rank:
            return handle.tensor
        exported = part.ipc[self._transport.rank] if len(part.ipc) == self._transport.size else None
        if exported is None or self._transport.far(rank):
            return None
        storage = self._import(rank, part.gpu, exported)
        if storage is None:
            return None
        dtype, count = handle.tensor.dtype, torch.Size(part.shape).numel()
        if part.offset % handle.itemsize or part.offset + count * handle.itemsize > storage.nbytes():
            raise ProtocolError(f"rank {rank} names memory for its window that is not its own", peer=rank)
        whole = buffers.empty(0, dtype=dtype, device=storage.device)
        flat: Tensor = whole.set_(storage, part.offset // handle.itemsize, (count,), (1,))
        return flat.view(part.shape)

    def _gpu(self, tensor: Tensor) -> str:
        """Return the identifier of a tensor's GPU, different from that of every other GPU."""
        return str(torch.cuda.get_device_properties(tensor.device).uuid)

    def _export(self, storage: UntypedStorage) -> tuple[Any, ...] | None:
        """Return what one other process needs to map this memory; None if CUDA does not share it."""
        try:
            return tuple(storage._share_cuda_())[1:]  # type: ignore[no-untyped-call]
        except RuntimeError:
            return None

    def _import(self, rank: int, gpu: str, exported: tuple[Any, ...]) -> UntypedStorage | None:
        """Map another process's memory. Returns None if this process does not see its GPU, or CUDA refuses."""
        try:
            for index in range(torch.cuda.device_count()):
                if str(torch.cuda.get_device_properties(index).uuid) == gpu:
                    return UntypedStorage._new_shared_cuda(index, *exported)
        except RuntimeError:
            pass
        return None


class _Waiting:
    """An op that has not been handed to the engine yet."""

    __slots__ = ("fired", "op", "work")

    def __init__(self, op: ops.Op, work: Completion) -> None:
        self.op = op
        self.work = work
        self.fired = False

    def fire(self) -> None:
        """Note that the GPU has done all work that was queued before the op."""
        self.fired = True


class CudaUcxTransport(UcxTransport):
    """Messages, windows and barriers for tensors on a GPU.

    Other collectives are expressed in messages, and there are no atomics. An op is handed to the engine when the GPU
    has done all work that was on its caller's current stream, and all earlier ops have been handed over. So messages
    match in the order of the calls, on whichever streams these were made.
    """

    capabilities = msgspec.structs.replace(
        UcxTransport.capabilities,
        ops=frozenset({ops.Send, ops.Recv, ops.Barrier}) | ops.ARRIVALS | (ops.RMA - {ops.FetchAdd, ops.CompareSwap}),
        in_process=False,
        lanes=frozenset(),
        spin=TURNS,
    )
    fast_check = None
    windows = CudaWindows
    proves = False  # its messages would be of the GPU's memory, and wait for its streams

    def __init__(self, shared: SharedEngine, ranks: Ranks) -> None:
        self._waker, self._epoll = Waker(), select.epoll()  # which may raise, before anybody knows the communicator
        super().__init__(shared, ranks)
        assert shared.cuda is not None
        self.cuda: Cuda = shared.cuda
        self.completions = Completions(self.cuda, self._waker.wake, TURNS, self)
        self._queue: deque[_Waiting] = deque()
        for fd in (self.engine.fileno(), self._waker.fileno()):
            self._epoll.register(fd, select.EPOLLIN)

    @classmethod
    def layer(cls, device: torch.device) -> tuple[Cuda, int]:
        """Return the layer through which CUDA is called, and UCX's type of its memory."""
        return TorchCuda(device), CUDA

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.open`."""
        cuda, memory = await run_in_thread(functools.partial(cls.layer, rendezvous.device), anyhow=True)
        return await cls._open(rendezvous, cuda, memory)

    # --------------------------------------------------------------------------------------- ops and their outcomes

    def post(self, op: ops.Op, work: Completion) -> None:
        """See :meth:`Transport.post`."""
        self._check_not_captured()
        if self._failure is not None:
            self.on_failure(self._failure)
        waiting = _Waiting(op, work)
        self._queue.append(waiting)
        self.completions.add(self.cuda.current_stream(), waiting.fire)
        with self.cuda.harmless():
            for _ in range(_GLANCES if len(self._queue) == 1 else 0):
                if self.completions.poll():
                    self._post_due()
                    break

    def _check_not_captured(self) -> None:
        if self.cuda.capturing():
            raise UnsupportedOperation(
                "the current stream is being captured into a CUDA graph, and what UCX does is none of the GPU's doing: "
                "call it before the capture, or behind graph.replay()"
            )

    def caller_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """See :meth:`Transport.caller_stream`."""
        self._check_not_captured()
        return functools.partial(self.cuda.on, self.cuda.current_stream())

    def post_at_once(self, op: ops.Recv, work: Completion) -> None:
        """See :meth:`Transport.post_at_once`. What takes no byte waits for no stream."""
        self.hand_over(op, work)

    def progress(self) -> bool | None:
        """See :meth:`Transport.progress`. While the current stream is being captured, everything waits."""
        self._waker.clear()
        if self.cuda.capturing():
            return bool(self.completions)  # True makes the loop ask again: nothing tells when a capture ends
        with self.cuda.harmless():
            did = self.completions.poll()
            did = self._post_due() or did
            happened = super().progress()
        if did or self.completions:  # never None: the events are polled on the loop
            return did or bool(happened)
        return happened

    def _post_due(self) -> bool:
        """Hand the engine all ops that are due, up to the first one that is not."""
        queue, did = self._queue, False
        while queue and queue[0].fired:
            did = True
            waiting = queue.popleft()
            if self._aborted or waiting.work.done():
                continue
            op = waiting.op
            try:
                if not all(has_room(tensor) for _, tensor in op.reads() + op.writes()):
                    raise CommError("the storage of a tensor was resized before the engine had it")
                self.hand_over(op, waiting.work)
            except CommError as error:
                waiting.work.fail(error)
            except RuntimeError as error:  # raised by UCX or by torch
                waiting.work.fail(CommError(f"UCX could not begin it: {error}"))
        return did

    def finish(self, work: Completion, index: int, status: int, a: int, b: int) -> None:
        """See :meth:`UcxTransport.finish`. If a message is too long, the engine has kept its beginning."""
        if status == TRUNCATED:
            head, op = self.engine.head(id(work)), work.op
            if head and isinstance(op, ops.Recv):
                octets(op.tensor)[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        super().finish(work, index, status, a, b)

    def fileno(self) -> int | None:
        """See :meth:`Transport.fileno`."""
        return self._epoll.fileno()

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`."""
        for waiting in self._queue:
            if waiting.work is work:
                self._queue.remove(waiting)
                self._waker.wake()  # the ops behind it may be due
                return True
        return super().try_cancel(work)

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`. It drops ops that the engine has not got: nothing uses their tensors."""
        self._queue.clear()
        self.completions.close()
        self._epoll.close()
        self._waker.close()
        await super().aclose()
