"""The communicators of a group: one for tensors on the CPU, and one for tensors on a GPU.

The GPU's communicator is opened when a call first needs it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d

from aiocomms import blocking
from aiocomms.errors import ArgumentError, CommError
from aiocomms.integrations.torch_backend.any_source import Receives
from aiocomms.integrations.torch_backend.works import BACKEND

DEVICES: Final = ("cpu", "cuda")
"""The types of devices whose tensors a group supports."""


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of the tensors of a call. Tests without a GPU replace this function."""
    return tensors[0].device if tensors else torch.device("cpu")


def open_gpu(transport: Any, device: torch.device, **where: Any) -> blocking.Communicator:
    """Form a communicator for tensors on a GPU; see :func:`aiocomms.new_comm`. Tests replace this function."""
    return blocking.new_comm(transport, device, **where)


class GroupSide:
    """A communicator of a group, for the tensors of one device."""

    def __init__(self, comm: blocking.Communicator, gpu: torch.device | None = None) -> None:
        self.comm = comm
        self.gpu: torch.device | None = gpu
        """The GPU of the tensors; None if the tensors are on the CPU.

        Streams of this GPU wait for the ends of works.
        """
        self.receives: Receives = Receives(comm)

    def settle(self) -> None:
        """Block until the GPU has executed all work in this thread's current stream."""
        if self.gpu is not None and (marks := self.comm._core.marks) is not None:
            end = marks.cuda.event()
            end.record(marks.cuda.current_stream())
            end.synchronize()


class GroupComms:
    """A group's communicators for the CPU and a GPU. If one communicator is lost, the other is aborted. Thread-safe."""

    def __init__(
        self,
        comm: blocking.Communicator,
        store: dist.Store,
        transport: Any = None,
        parent: GroupComms | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        """Store the CPU's communicator. The first call that needs the GPU's communicator opens that communicator.

        :param store: the store through which the ranks form the communicator for a GPU.
        :param transport: the requested transport; None: the best available transport.
        :param parent: the communicators of the parent group. This group uses the transport engines of the parent group.
        :param ranks: the members of this group, as ranks in the parent group.
        """
        self.cpu: GroupSide = GroupSide(comm)
        self.gpu: GroupSide | None = None
        """The communicator for a GPU; None before it is open."""
        self._store, self._transport = store, transport
        self._parent, self._ranks = parent, ranks
        self._lock = threading.Lock()  # The lock is held while the GPU's communicator opens with the other ranks.

    @property
    def sides(self) -> list[GroupSide]:
        """The open communicators."""
        return [self.cpu] if self.gpu is None else [self.cpu, self.gpu]

    def on(self, device: torch.device, message: str | None = None) -> GroupSide:
        """Return the communicator for a GPU.

        If the communicator is not open yet, this call opens it. In that case, all ranks must make the call.

        :param message: the name of a point-to-point op, or None for a collective. A point-to-point op cannot open a
            communicator.
        :raises ArgumentError: the group has no communicator for this GPU, and cannot open one now.
        """
        side = self.gpu
        if side is None:
            if message is not None:
                raise ArgumentError(
                    f"{message} has a tensor on {device}, for which the group has no communicator yet, and a message "
                    "does not open one, for all ranks must do that together: give device_id= to init_process_group, "
                    "or call a collective of this group on that device first"
                )
            side = self.open(device)
        if device != side.gpu:
            raise ArgumentError(f"a tensor is on {device}, and the group has its communicator of GPUs on {side.gpu}")
        return side

    def open(self, device: torch.device) -> GroupSide:
        """Open the communicator for a GPU, if it is not open. All ranks must call this method."""
        with self._lock:
            if self.gpu is None:
                if (error := self.cpu.comm._core.refusal()) is not None:
                    raise error.about(comm=self.cpu.comm.name, rank=self.cpu.comm.rank)
                side = GroupSide(self._opened(device), device)
                for one, other in ((self.cpu, side), (side, self.cpu)):
                    one.comm.register_abort_hook(functools.partial(_also, other.comm))
                    if (error := one.comm._core.refusal()) is not None:  # The loss came before the hook.
                        _also(other.comm, error)
                self.gpu = side
            return self.gpu

    def _opened(self, device: torch.device) -> blocking.Communicator:
        cpu, name = self.cpu.comm, f"{self.cpu.comm.name} on GPUs"
        above = None if self._parent is None else self._parent.gpu
        if above is not None and above.gpu == device and not above.comm.closed:
            return above.comm.create_group(self._ranks, name, timeout=cpu.timeout)
        return open_gpu(
            "auto" if self._transport is None else self._transport,
            device,
            store=self._store,
            rank=cpu.rank,
            size=cpu.size,
            name=name,
            timeout=cpu.timeout,
        )


def _also(other: blocking.Communicator, error: CommError) -> None:
    """Abort the group's other communicator on all ranks."""
    other.abort(error)


def mapped_elsewhere(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether ``init_process_group`` named another backend for a device, as in ``"cpu:aiocomms,cuda:nccl"``."""
    said: str = distributed_c10d._world.pg_backend_config.get(group, "")
    backends = dict(pair.split(":") for pair in said.split(",") if ":" in pair)
    return backends.get(device.type, BACKEND) != BACKEND
