"""The transport of torch that moves data through an endpoint with one peer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiocomms.lowlevel import clock

try:
    from torch.distributed import _transport as registry  # type: ignore[attr-defined]
except ImportError as _error:
    raise ImportError(
        f"torch {torch.__version__} has no torch.distributed._transport, the registry of one-sided transports, which "
        "came with 2.15: use aiocomms.blocking.open_endpoint"
    ) from _error

from aiocomms import arguments
from aiocomms.blocking import open_endpoint
from aiocomms.blocking.peer import BlockingPeer, BlockingRemoteRegion
from aiocomms.bootstrap.registry import choose
from aiocomms.errors import ArgumentError, CommClosedError, UnsupportedOperation
from aiocomms.integrations.torch_transport.memory import (
    Memory,
    MemoryView,
    MutableMemoryView,
    Registration,
    RemoteBuffer,
)
from aiocomms.integrations.torch_transport.works import TransferWork
from aiocomms.lowlevel import LOOPBACK, in_use
from aiocomms.ops import checks
from aiocomms.ops.writing import octets

_CPU = torch.device("cpu")

if TYPE_CHECKING:  # Type checks use torch 2.13, which does not have this class.

    class _Transport:
        device: torch.device

        def __init__(self, device: torch.device | str) -> None: ...
        def _check_device(self, device: torch.device) -> None: ...
        def _cuda_stream_views(self) -> list[MemoryView]: ...
        def _close_cuda_streams(self) -> None: ...
        async def write_async(
            self, local_buffer: MemoryView, remote_buffer: RemoteBuffer, *, timeout: float | None = None
        ) -> None: ...
        async def read_async(
            self, local_buffer: MutableMemoryView, remote_buffer: RemoteBuffer, *, timeout: float | None = None
        ) -> None: ...

else:
    _Transport = registry.Transport


class EndpointTransport(_Transport):
    """A transport of torch over an endpoint of aiocomms. Any thread may use it.

    A transfer ends when the bytes are in the target memory. The target memory of a write is the peer's memory. No
    thread polls a transfer. If the peer's process dies, pending transfers fail with
    :class:`aiocomms.errors.PeerDiedError`.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        transport: str | Mapping[str, str] = "auto",
        host: str = LOOPBACK,
        hints: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Open the endpoint.

        :param device: ``"cpu"`` or None, which both mean the CPU.
        :param transport: see :func:`aiocomms.open_endpoint`.
        :param host: see :func:`aiocomms.open_endpoint`.
        :param hints: see :func:`aiocomms.open_endpoint`.
        :param timeout: the default timeout of the methods, in seconds.
        :raises ArgumentError: an argument has a wrong value.
        :raises UnsupportedOperation: the device is a GPU, or the transport does not exist.
        """
        super().__init__(_CPU if device is None else device)
        if self.device.type != "cpu":
            raise UnsupportedOperation(f"device is {self.device}, wanted cpu: endpoints have not been tried on GPUs")
        self._default_timeout = arguments.seconds("timeout", timeout)
        self._lock = threading.Lock()
        self._registrations: dict[tuple[int, int, int], Registration] = {}
        self._remotes: dict[bytes, BlockingRemoteRegion] = {}
        self._pending = deque[tuple[TransferWork, Registration]]()
        self._peer: BlockingPeer | None = None
        self._closing = False
        self._endpoint = open_endpoint(transport, self.device, host=host, hints=hints, name="torch", timeout=None)

    @staticmethod
    def supported() -> bool:
        """Return whether this installation of aiocomms has a transport that can connect two processes."""
        try:
            choose("auto", _CPU, 2, {})
        except UnsupportedOperation:
            return False
        return True

    # ------------------------------------------------------------------------------------------------ the two ends

    def bind(self, *, timeout: float | None = None) -> bytes:
        """Return the endpoint's address, whose size is at most 1,024 bytes.

        The endpoint already listens, so ``timeout`` has no effect.
        """
        self._check_open()
        return self._endpoint.address

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Connect to the peer. Both ends may call this method, in any order.

        :param peer_url: the result of :meth:`bind` on the peer.
        :returns: 0.
        :raises ArgumentError: ``peer_url`` is not a result of :meth:`bind`, or this end is already connected.
        :raises TimeoutError: the connection took too long.
        :raises CommError: see the errors of :meth:`aiocomms.Endpoint.connect`.
        """
        seconds = self._patience(timeout)
        self._check_open()
        if self.connected():
            raise ArgumentError("the transport is connected already, and has one peer")
        self._peer = self._endpoint.connect(peer_url, timeout=max(seconds, 0.001))
        return 0

    def connected(self) -> bool:
        """Return True if the transport is connected to its peer.

        Return False before the connection, and after one of the two ends was closed or has died.
        """
        return not self._closing and self._peer is not None and not self._peer.closed

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for pending transfers, disconnect, and release all resources. Idempotent.

        ``timeout`` limits the wait for transfers, and does not limit the disconnection. The disconnection takes some
        seconds more if the peer does not answer, for example because the peer's process is suspended.

        :raises TimeoutError: a transfer is pending after ``timeout``. The transport already refuses new transfers.
            To continue the wait, call ``close`` again.
        :raises CommError: a pending transfer has failed. All resources are released.
        """
        ends = clock.now() + self._patience(timeout)
        self._close_cuda_streams()
        failure: Exception | None = None
        for work in self._leave():
            try:
                work.wait_for(max(0.0, ends - clock.now()))
            except Exception as error:
                if not work.is_completed():
                    raise
                failure = failure or error
        self._release()
        if failure is not None:
            raise failure

    async def close_async(self, *, timeout: float | None = None) -> None:
        """Close the transport as :meth:`close` does, without blocking the event loop."""
        seconds = self._patience(timeout)
        self._close_cuda_streams()
        under_way, failure = self._leave(), None
        try:
            await registry.wait_all(under_way, timeout=seconds)
        except Exception as error:
            if not all(work.is_completed() for work in under_way):
                raise
            failure = error
        await asyncio.to_thread(self._release)
        if failure is not None:
            raise failure

    def _leave(self) -> list[TransferWork]:
        """Reject new calls with an error, and return the pending transfers."""
        self._closing = True
        with self._lock:
            return [work for work, _ in self._pending if not work.is_completed()]

    def _release(self) -> None:
        self._endpoint.close()
        with self._lock:
            for registration in self._registrations.values():
                registration.active = False
            self._registrations.clear()
            self._remotes.clear()
            self._pending.clear()

    # ------------------------------------------------------------------------------------------------------ memory

    def register_memory(self, tensor: Tensor, *, timeout: float | None = None) -> Memory:
        """Give the peer access to a tensor.

        Programs may call this method before or after :meth:`connect`.

        :param tensor: a contiguous, non-empty tensor on the CPU. This call moves the tensor's storage to shared memory;
            the tensor object stays the same. The storage is never moved again, so after the call other threads may use
            the tensor.
        :returns: a handle of the memory. If the memory is already registered, the handle uses the existing
            registration.
        :raises ArgumentError: the tensor is empty or not contiguous, or this call cannot move the storage because a
            pending operation of aiocomms uses the tensor.
        """
        self._patience(timeout)
        checks.is_tensor("tensor", tensor)
        self._check_device(tensor.device)
        if not tensor.is_contiguous() or not tensor.numel():
            raise ArgumentError(f"tensor is {arguments.describe(tensor)}, wanted a contiguous one that is not empty")
        self._check_open()
        storage = tensor.untyped_storage()
        key = storage._cdata, int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes
        with self._lock:
            if (registration := self._registrations.get(key)) is None:
                _share(tensor)
                flat = octets(tensor)
                registration = Registration(self, tensor, flat, self._endpoint.register(flat))
                self._registrations[key] = registration
        return Memory(registration)

    def unregister_memory(self, memory: Memory, *, timeout: float | None = None) -> None:
        """Revoke the peer's access to memory. Idempotent.

        After this call, the peer neither reads nor writes the memory.

        :raises ArgumentTypeError: the memory was not registered with this transport.
        :raises ArgumentError: a transfer of this process still uses the memory. The memory stays registered.
        :raises TimeoutError: the peer has not released the memory in time. The connection is lost.
        """
        seconds = self._patience(timeout)
        self._check_open()
        registration = self._own("memory", memory, Memory)
        with self._lock:
            if any(of is registration and not work.is_completed() for work, of in self._pending) or any(
                view._registration is registration for view in self._cuda_stream_views()
            ):
                raise ArgumentError("memory is in use by a transfer that has not ended: wait for it before")
            active, registration.active = registration.active, False
            self._registrations = {key: it for key, it in self._registrations.items() if it is not registration}
        if active:
            registration.region.revoke(timeout=max(seconds, 0.001))

    # --------------------------------------------------------------------------------------------------- transfers

    def write(
        self,
        local_buffer: MemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | TransferWork:
        """Write the bytes of a local view to the beginning of remote memory.

        When the transfer has ended, the bytes are in the remote memory.

        The first transfer with a remote buffer requests access from the peer. Even with ``async_op``, this call blocks
        until the peer has answered the request.

        :returns: 0 when the transfer has ended. With ``async_op``, a work; the call does not wait for the transfer.
        :raises ArgumentError: an argument has a wrong value, or the view is too large. No byte was sent.
        :raises RegionError: the peer has not created the buffer, or has revoked the memory.
        :raises TimeoutError: the transfer has not ended within ``timeout`` seconds. The transfer continues.
        :raises CommError: the transfer has failed.
        """
        began, seconds = clock.now(), self._patience(timeout)
        self._check_transfer(local_buffer, remote_buffer, mutable=False)
        remote = self._attached(remote_buffer, began + seconds)
        put = remote.put(local_buffer.part, timeout=None)
        work = self._begun(TransferWork([put, remote.flush(timeout=None)], seconds), local_buffer)
        return work if async_op else self._ended(work, began + seconds)

    def read(
        self,
        local_buffer: MutableMemoryView,
        remote_buffer: RemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | TransferWork:
        """Read from the beginning of remote memory into a local view. The view's size is the number of bytes to read.

        See :meth:`write`.
        """
        began, seconds = clock.now(), self._patience(timeout)
        self._check_transfer(local_buffer, remote_buffer, mutable=True)
        remote = self._attached(remote_buffer, began + seconds)
        work = self._begun(TransferWork([remote.get(local_buffer.part, timeout=None)], seconds), local_buffer)
        return work if async_op else self._ended(work, began + seconds)

    async def write_async(
        self, local_buffer: MemoryView, remote_buffer: RemoteBuffer, *, timeout: float | None = None
    ) -> None:
        """Write as :meth:`write` does, and wait for the end of the transfer without blocking the event loop."""
        ends = clock.now() + self._patience(timeout)
        self._check_transfer(local_buffer, remote_buffer, mutable=False)
        await self._opened(remote_buffer, ends)
        await super().write_async(local_buffer, remote_buffer, timeout=max(0.0, ends - clock.now()))

    async def read_async(
        self, local_buffer: MutableMemoryView, remote_buffer: RemoteBuffer, *, timeout: float | None = None
    ) -> None:
        """Read as :meth:`read` does, and wait for the end of the transfer without blocking the event loop."""
        ends = clock.now() + self._patience(timeout)
        self._check_transfer(local_buffer, remote_buffer, mutable=True)
        await self._opened(remote_buffer, ends)
        await super().read_async(local_buffer, remote_buffer, timeout=max(0.0, ends - clock.now()))

    def _begun(self, work: TransferWork, local: MemoryView) -> TransferWork:
        """Record a pending transfer."""
        with self._lock:
            while self._pending and self._pending[0][0].is_completed():
                self._pending.popleft()
            self._pending.append((work, local._registration))
        return work

    def _ended(self, work: TransferWork, ends: float) -> int:
        work.wait_for(max(0.0, ends - clock.now()))
        return 0

    def _attached(self, remote_buffer: RemoteBuffer, ends: float) -> BlockingRemoteRegion:
        """Return the region of a remote buffer. The first call requests access from the peer."""
        key = remote_buffer.serialize()
        remote = self._remotes.get(key)
        if remote is None or remote.closed:
            assert self._peer is not None
            remote = self._peer.attach(key, timeout=max(0.001, ends - clock.now()))
            with self._lock:
                self._remotes = {of: it for of, it in self._remotes.items() if not it.closed} | {key: remote}
        return remote

    async def _opened(self, remote_buffer: RemoteBuffer, ends: float) -> None:
        """Open the region of a remote buffer in a thread, if the region is not open."""
        remote = self._remotes.get(remote_buffer.serialize())
        if remote is None or remote.closed:
            await asyncio.to_thread(self._attached, remote_buffer, ends)

    # ------------------------------------------------------------------------------------------------------ checks

    def _check_transfer(self, local_buffer: MemoryView, remote_buffer: RemoteBuffer, *, mutable: bool) -> None:
        """Check the arguments of a transfer. This method overrides torch's method."""
        self._check_open()
        self._own("local_buffer", local_buffer, MutableMemoryView if mutable else MemoryView).check()
        if not isinstance(remote_buffer, RemoteBuffer):
            raise arguments.wrong_type("remote_buffer", remote_buffer, "a RemoteBuffer of aiocomms")
        if local_buffer.size() > remote_buffer.size():
            raise ArgumentError(
                f"local_buffer has {local_buffer.size()} bytes, and remote_buffer {remote_buffer.size()}, too few"
            )
        if self._peer is None:
            raise ArgumentError("the transport is not connected: call connect() with what the other end's bind() says")

    def _own(self, name: str, it: Any, kind: type[Memory | MemoryView]) -> Registration:
        """Return the registration of a memory handle or a view.

        If another transport owns the registration, raise an error.
        """
        registration: Registration | None = it._registration if isinstance(it, kind) else None
        if registration is None or registration.owner is not self:
            raise arguments.wrong_type(name, it, f"a {kind.__name__} that was registered with this transport")
        return registration

    def _check_open(self) -> None:
        if self._closing:
            raise CommClosedError("the transport is closed")

    def _patience(self, timeout: float | None) -> float:
        """Return the timeout of a call in seconds, which is 0 or more."""
        if timeout is None:
            return float(self._default_timeout)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise arguments.wrong_type("timeout", timeout, "seconds as a number, or None")
        if not isfinite(timeout) or timeout < 0:
            raise ArgumentError(f"timeout is {timeout}, wanted seconds: 0 or more, and finite")
        return float(timeout)


def _share(tensor: Tensor) -> None:
    """Move a tensor's storage to shared memory now, so that the engine does not move it when the ends connect."""
    storage = tensor.untyped_storage()
    if storage.is_shared() or not storage.resizable():  # Memory that torch has not allocated stays in its place.
        return
    if in_use(storage):
        raise ArgumentError("tensor is in use by an operation of aiocomms that has not ended: wait for it before")
    with contextlib.suppress(RuntimeError):  # The memory also stays in its place if shared memory is full.
        storage.share_memory_()
