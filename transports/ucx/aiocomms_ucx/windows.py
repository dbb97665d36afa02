"""The windows: each rank's memory in a window, and this process's access to that memory."""

from __future__ import annotations

import fcntl
import math
import os
import stat
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, UntypedStorage

from aiocomms import ops
from aiocomms.errors import CommError, ProtocolError, UnsupportedOperation
from aiocomms.lowlevel import ControlCodec, buffers, gone, in_use, register
from aiocomms.transport import Completion
from aiocomms_ucx._engine import Kept, map_memory
from aiocomms_ucx.collectives import FORMS
from aiocomms_ucx.member import Member
from aiocomms_ucx.status import has_ended


class WindowPart(msgspec.Struct, array_like=True):
    """The description of one rank's part of a window for the other ranks."""

    shared: int
    """The descriptor of the part's shared memory; -1 if the part is not in shared memory."""
    offset: int
    """The offset of the part in the shared memory, in bytes."""
    shape: tuple[int, ...]
    itemsize: int
    """The size of an element in bytes."""
    address: int
    rkey: bytes
    ipc: list[tuple[Any, ...] | None] = []
    """The list of the handles with which the ranks map the part, if the part is GPU memory."""

    def __repr__(self) -> str:  # the address and the key give access to the memory
        return f"<part of shape {self.shape}>"


_PARTS: Final = ControlCodec[WindowPart](WindowPart, "the part of a window")


class WindowHandle:
    """One window, and the data that the transport keeps for the window."""

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number = number
        self.tensor = tensor.detach()  # The program may give its own tensor other memory.
        self.itemsize = tensor.element_size()
        self.mapped: dict[int, Tensor] = {}
        """The parts whose memory this process maps, by rank."""
        self.exchange: tuple[Tensor, Tensor] | None = None
        """The record of this rank and the records of all ranks; None except while the window opens."""
        self.kept: Kept | None = None
        """The object that keeps this rank's part in place; None before the window opens and after it is closed."""


class Windows:
    """The windows of one communicator."""

    record: int = 2048
    """The size, in bytes, of a rank's record about its part.

    UCX's keys in the record take at most a few hundred bytes.
    """
    unshared = "was in use when the window was opened, or is no memory of torch's own (from_numpy, frombuffer)"
    """The end of the error text about a part that is on this host, but is not mapped."""

    def __init__(self, transport: Member) -> None:
        self._transport = transport
        register(self)
        self._opened = 0
        self._handles: dict[int, WindowHandle] = {}
        self._opening: dict[int, WindowHandle] = {}  # the windows that are opening, by ticket
        self.behind: deque[Completion] | None = None
        """The collectives that wait until an earlier close of a window is posted; None if no close waits.

        A close is posted as a collective only after the window's one-sided operations have ended.
        """

    def post(self, op: Any, work: Completion) -> None:
        """Start a one-sided operation, or the opening or closing of a window."""
        if isinstance(op, (ops.WindowOpen, ops.WindowClose)):
            return self._take_place(op, work)
        transport, ticket = self._transport, id(work)
        engine, group = transport.engine, transport.group
        handle: WindowHandle = op.window.handle
        number, size = handle.number, handle.itemsize
        match op:
            case ops.PutSignal(tensor=tensor, dst=rank):
                done = engine.put_signal(ticket, group, number, rank, op.offset * size, tensor)
            case ops.Put(tensor=tensor, dst=rank):
                done = engine.put(ticket, group, number, rank, op.offset * size, tensor)
            case ops.Get(tensor=tensor, src=rank):
                done = engine.get(ticket, group, number, rank, op.offset * size, tensor)
            case ops.PutV() | ops.GetV():
                move, rank = (engine.put_v, op.dst) if isinstance(op, ops.PutV) else (engine.get_v, op.src)
                done = move(ticket, group, number, rank, op.tensor, op.offsets, op.starts, op.count)
            case ops.Signal():
                done = engine.signal(ticket, group, number, op.dst)
            case ops.WaitSignal():
                done = engine.wait_signal(ticket, group, number, op.src)
            case ops.FetchAdd():
                done = self._atomic(ticket, handle, op.dst, op.offset, False, op.value, 0)
            case ops.CompareSwap():
                done = self._atomic(ticket, handle, op.dst, op.offset, True, op.expected, op.value)
            case ops.MapRemoteTensor():
                return self._map(handle, op.rank, work)
            case _:
                done = engine.flush(ticket, group, number, -1 if op.dst is None else op.dst)
        return transport.follow(work, done)

    def finish(self, work: Completion, collective: bool, value: int) -> None:
        """Continue or complete an operation after one of its steps is done.

        This method handles only operations that have several steps, or a value as their result.
        """
        op: Any = work.op
        if isinstance(op, ops.WindowOpen):
            self._opened_everywhere(work)
        elif not isinstance(op, ops.WindowClose):
            half = 1 << (8 * op.window.handle.itemsize - 1)
            work.complete((value + half) % (2 * half) - half)
        elif collective:
            self._forget(op.window.handle)
            work.complete()
        else:
            self._meet_to_close(op.window.handle, work)
            self._post_behind()

    def withdraw(self, op: ops.WaitSignal, ticket: int) -> bool:
        """Withdraw a wait for a signal. Return False if a signal has already ended the wait."""
        transport = self._transport
        return transport.engine.cancel_wait(transport.group, op.window.handle.number, op.src, ticket)

    def held(self) -> list[Tensor]:
        """See :class:`aiocomms.lowlevel.memory.Holder`. Other ranks may put into a window's memory at any time."""
        return [handle.tensor for handle in list(self._handles.values())]

    def shared(self) -> int:
        """Return the number of bytes of this rank's parts in shared memory. Any thread may call this method."""
        storages = [handle.tensor.untyped_storage() for handle in list(self._handles.values())]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu" and s.is_shared()}.values())

    def close(self) -> None:
        """Close all windows on this rank, because the communicator is closing."""
        for handle in list(self._handles.values()):
            self._forget(handle)

    def _atomic(
        self, ticket: int, handle: WindowHandle, rank: int, offset: int, swap: bool, first: int, second: int
    ) -> bool:
        transport, size = self._transport, handle.itemsize
        mask = (1 << 8 * size) - 1
        return transport.engine.atomic(
            ticket, transport.group, handle.number, rank, offset * size, swap, size, first & mask, second & mask
        )

    def _map(self, handle: WindowHandle, rank: int, work: Completion) -> None:
        if rank in handle.mapped:
            work.complete(handle.mapped[rank].detach())
            return
        where = "is on another host" if self._transport.far(rank) else self.unshared
        work.fail(UnsupportedOperation(f"the window of rank {rank} {where}; use get() and put()"))

    # ------------------------------------------------------------------------------------------ opening and closing

    def _take_place(self, op: ops.WindowOpen | ops.WindowClose, work: Completion) -> None:
        """Start the opening or closing of a window in the order of the communicator's collectives."""
        if self.behind is not None:
            self.behind.append(work)
        elif isinstance(op, ops.WindowOpen):
            self._open(op.tensor, work)
        else:
            transport, handle = self._transport, op.window.handle
            if transport.engine.flush(id(work), transport.group, handle.number, -1):
                self._meet_to_close(handle, work)
            else:
                self._hold_collectives()
                transport.follow(work, done=False)

    def _open(self, tensor: Tensor, work: Completion) -> None:
        transport = self._transport
        number = self._opened
        self._opened += 1
        handle = WindowHandle(number, tensor)
        try:
            mine = _record(self._describe(number, handle.tensor), self.record)
        finally:  # the memory is in use from now on
            handle.kept = Kept([handle.tensor])
            self._handles[number] = handle
        theirs = buffers.empty(transport.size, self.record, dtype=torch.uint8, device="cpu")
        handle.exchange = mine, theirs
        self._opening[id(work)] = handle
        ended = transport.engine.all_gather(
            id(work), transport.group, FORMS[ops.WindowOpen], transport.size, mine, theirs
        )
        transport.follow_collective(work, done=ended > 0)

    def _describe(self, number: int, tensor: Tensor) -> WindowPart:
        """Return the description of this rank's part for the other ranks."""
        transport = self._transport
        shared = self._share(tensor)
        remote = any(map(transport.far, range(transport.size))) or (shared < 0 and transport.size > 1)
        rkey = transport.engine.map_window(transport.group, number, tensor, remote)
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return WindowPart(shared, offset, tuple(tensor.shape), tensor.itemsize, tensor.data_ptr(), rkey)

    def _share(self, tensor: Tensor) -> int:
        """Move a tensor's storage, with all its views, to memory that can be shared.

        :returns: the descriptor, which belongs to the storage; -1 if this host has no other rank, or if the storage
            cannot be moved. A storage cannot be moved if torch did not allocate its memory, or if other code has the
            address of the memory.
        """
        transport, storage = self._transport, tensor.untyped_storage()
        alone = not any(not transport.far(rank) for rank in range(transport.size) if rank != transport.rank)
        if alone or tensor.nbytes == 0:
            return -1
        # A storage that is shared by name, which is not torch's default strategy, is moved again.
        stays = storage.is_shared() and torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
        if not stays and (not storage.resizable() or in_use(storage)):
            return -1
        try:
            shared, nbytes = storage._share_fd_cpu_()
            if not stays and hasattr(storage, "_swap_data_ptr_"):
                # Torch refuses to resize such a storage. A resize would free the memory.
                storage._swap_data_ptr_(UntypedStorage._new_shared_fd_cpu(shared, nbytes))  # type: ignore[attr-defined]
                shared, _ = storage._share_fd_cpu_()
        except RuntimeError:  # there is no memory
            return -1
        return int(shared)

    def _opened_everywhere(self, work: Completion) -> None:
        handle = self._opening.pop(id(work))
        assert handle.exchange is not None
        rows = handle.exchange[1]
        handle.exchange = None
        try:
            parts = [_part(rank, row) for rank, row in enumerate(rows)]
        except ProtocolError as error:
            work.fail(error)
        else:
            self._enter(handle, parts, work)

    def _enter(self, handle: WindowHandle, parts: list[WindowPart], work: Completion) -> None:
        """Map the parts of all ranks where possible."""
        self._entered(handle, parts, (self._reach(handle, rank, part) for rank, part in enumerate(parts)), work)

    def _entered(
        self, handle: WindowHandle, parts: list[WindowPart], reached: Iterable[Tensor | None], work: Completion
    ) -> None:
        """Pass all parts and the mapped tensors to the engine, and complete the opening.

        :param reached: an iterable with the mapped tensor or None for each part. The iteration raises an error if a
            part cannot be mapped.
        """
        transport, rank, found = self._transport, 0, iter(reached)
        try:
            for rank, part in enumerate(parts):
                mapped = next(found)
                if mapped is not None:
                    handle.mapped[rank] = mapped
                nbytes = torch.Size(part.shape).numel() * part.itemsize
                transport.engine.open_window(
                    transport.group, handle.number, rank, mapped, part.rkey, part.address, nbytes
                )
        except ProtocolError as error:
            work.fail(error)
        except (OSError, RuntimeError) as error:
            if not transport.ends_soon(rank):
                work.fail(CommError(f"the window of rank {rank} cannot be reached: {error}", peer=rank))
        else:
            work.complete(handle)

    def _reach(self, handle: WindowHandle, rank: int, part: WindowPart) -> Tensor | None:
        """Return a rank's part as a tensor of this process; None if the part is not shared or element sizes differ."""
        transport, dtype = self._transport, handle.tensor.dtype
        if rank == transport.rank:
            return handle.tensor
        count = torch.Size(part.shape).numel()
        if transport.far(rank) or part.itemsize != handle.itemsize:
            return None
        if not count:
            return buffers.empty(*part.shape, dtype=dtype, device=handle.tensor.device)
        if part.shared < 0:
            return None
        fd = os.open(f"/proc/{transport.pids[rank]}/fd/{part.shared}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (
                not stat.S_ISREG(status.st_mode)
                or status.st_uid != os.geteuid()
                or part.offset + count * handle.itemsize > status.st_size
            ):
                raise ProtocolError(f"rank {rank} names memory for its window that is not its own", peer=rank)
            memory = map_memory(fd, status.st_size)
        finally:
            os.close(fd)
        return memory[part.offset : part.offset + count * handle.itemsize].view(dtype).view(part.shape)

    def _meet_to_close(self, handle: WindowHandle, work: Completion) -> None:
        transport = self._transport
        ended = transport.engine.barrier(id(work), transport.group, FORMS[ops.WindowClose], handle.number)
        transport.follow_collective(work, done=ended > 0)

    def _hold_collectives(self) -> None:
        self.behind = deque()
        self._transport.hold(True)

    def _post_behind(self) -> None:
        """Post the collectives that waited for a window's close. Stop after the next close that must wait."""
        try:
            behind, self.behind = self.behind, None
            while behind and self.behind is None:
                work = behind.popleft()
                if not work.done():
                    self._transport.hand_over(work.op, work)
            if behind:
                self.behind = behind
        finally:
            self._transport.hold(self.behind is not None)

    def _forget(self, handle: WindowHandle) -> None:
        transport = self._transport
        if self._handles.pop(handle.number, None) is not None:
            transport.engine.close_window(transport.group, handle.number)
            handle.kept = None
            self._let_go(handle)

    def _let_go(self, handle: WindowHandle) -> None:
        """Release the mapped parts."""
        handle.mapped.clear()


def open_segment(rank: int, pid: int, number: int) -> int:
    """Open the memory that a host's ranks share for collectives, through a descriptor of another rank's process.

    :raises PeerDiedError: the other process has ended.
    :raises ProtocolError: the descriptor belongs to a file, to memory of another user, or to memory that could be
        truncated while this rank uses the memory.
    """
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if has_ended(pid):
            raise gone(rank, "its process has ended") from None
        raise CommError(f"the shared memory of rank {rank} cannot be reached: {error}", peer=rank) from None
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK and os.fstat(fd).st_uid == os.geteuid()
    except OSError:  # the kernel raises this for all other descriptors
        sealed = False
    if not sealed:
        os.close(fd)
        raise ProtocolError(f"rank {rank} names memory for its window that is not its own", peer=rank)
    return fd


def _record(part: WindowPart, size: int) -> Tensor:
    record = _PARTS.encode_padded(part, size)
    if len(record) > size:
        raise CommError(f"UCX's key for the window takes {len(part.rkey)} bytes, more than fit into {size}")
    return torch.frombuffer(bytearray(record), dtype=torch.uint8)


def _part(rank: int, record: Tensor) -> WindowPart:
    part = _PARTS.decode_padded(bytes(record.tolist()), rank)
    sizes = all(0 <= n < 2**62 for n in part.shape) and math.prod(part.shape) < 2**59
    if part.shared < -1 or part.offset < 0 or not 0 <= part.address < 2**64 or not sizes:
        raise _PARTS.unreadable(part, rank)
    return part
