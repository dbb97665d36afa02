"""A process group of ``torch.distributed`` on a communicator of aiocomms."""

# mypy: disable-error-code="override"
# The stubs of torch have overloads of these methods that torch never calls here.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from aiocomms import blocking
from aiocomms.arguments import COMM_TIMEOUT, Timeout
from aiocomms.errors import ArgumentError, CommError
from aiocomms.integrations.torch_backend import communicators, sparse
from aiocomms.integrations.torch_backend.any_source import source_of
from aiocomms.integrations.torch_backend.calls import operation
from aiocomms.integrations.torch_backend.communicators import DEVICES, GroupComms, GroupSide, mapped_elsewhere
from aiocomms.integrations.torch_backend.completer import Completer
from aiocomms.integrations.torch_backend.forms import UNSET, How
from aiocomms.integrations.torch_backend.monitored import monitored_barrier, remaining
from aiocomms.integrations.torch_backend.parts import WorkStep
from aiocomms.integrations.torch_backend.tensors import CallTensors, cuts
from aiocomms.integrations.torch_backend.works import BACKEND, GroupWork, raising_as_torch_does
from aiocomms.lowlevel.handles import Handle


@raising_as_torch_does()
def create(how: Any, options: Any) -> Group:
    """Create a group for ``torch.distributed``. All ranks of the group must call this function.

    If the group has the same transport as torch's default group, both groups share one transport engine and one thread.

    :param how: torch's description of the group: the store, the ranks and the timeout.
    :param options: the argument ``transport`` of :func:`aiocomms.new_comm`; None: the best available transport.
    """
    timeout, name, world = how.timeout.total_seconds(), f"torch {how.group_id}", dist.group.WORLD
    if isinstance(world, Group) and options in (None, world.transport):
        ranks = how.global_ranks_in_group
        return Group(world.comm.create_group(ranks, name, timeout=timeout), how.store, world.transport, world, ranks)
    comm = blocking.new_comm(
        "auto" if options is None else options,
        store=how.store,
        rank=how.group_rank,
        size=how.group_size,
        name=name,
        timeout=timeout,
    )
    return Group(comm, how.store, options)


class Group(Handle, dist.ProcessGroup):
    """A process group that has its own communicator.

    Any thread may use a group. The group's methods have the names and arguments that torch expects. Programs call the
    functions of ``torch.distributed``, which call these methods. Tensors may be non-contiguous, and may require grad,
    but no gradient flows through the operations.
    """

    def __init__(
        self,
        comm: blocking.Communicator,
        store: dist.Store,
        transport: Any = None,
        parent: Group | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm = comm
        """The communicator for tensors on the CPU."""
        above: GroupComms | None = None if parent is None else parent.comms
        # These are the communicators for tensors on the CPU and on a GPU.
        self.comms: GroupComms = GroupComms(comm, store, transport, above, ranks)
        self.transport = transport
        """The argument ``transport`` of :func:`aiocomms.new_comm`; None: the best available transport."""
        self._store = store
        self.completer: Completer = Completer()
        self._group_name, self._group_desc = "", ""
        self._number = self._barriers = self._sums = 0
        self._together: list[GroupWork] | None = None

    # -------------------------------------------------------------------------------------------------- identity

    def name(self) -> str:
        """Return the backend's name."""
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802 - C++ calls it by this name.
        """Return the backend's name."""
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set torch's name of the group."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return torch's name of the group."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """Set torch's description of the group."""
        self._group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return torch's description of the group."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in DEVICES]

    def _get_backend(self, device: torch.device) -> Group:
        if device.type not in DEVICES or mapped_elsewhere(self, device):
            raise RuntimeError(
                f"the backend {BACKEND!r} carries no tensors of {device}, and where it is one of several, as in "
                f"'cpu:{BACKEND},cuda:nccl', torch before 2.15 leaves the others out; write "
                f"init_process_group('nccl') and new_group(backend={BACKEND!r}), a group for each"
            )
        return self

    def get_group_store(self) -> dist.Store:
        """Return the store through which the ranks formed the group."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing. All ranks make the same calls, so the ranks have equal sequence numbers without this method."""

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    # ------------------------------------------------------------------------------------------------------ life

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the deadline of later calls."""
        for side in self.comms.sides:
            side.comm.set_timeout(timeout)

    def abort(self) -> None:
        """Abort the group on every rank."""
        for side in self.comms.sides:
            side.comm.abort("the process group was aborted")
        self._release()

    def shutdown(self) -> None:
        """Wait for the pending operations and for the callbacks of their futures. Then release all resources."""
        self._release(self.completer.drain)

    def _release(self, then: Callable[[], object] = lambda: None) -> None:
        try:
            for side in self.comms.sides[::-1]:
                with contextlib.suppress(CommError):  # The works have reported the loss of the communicator.
                    side.comm.close()
            then()
        finally:
            self.completer.close()

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Open the communicator for a GPU.

        torch calls this method on all ranks when it forms a group with ``device_id``.
        """
        if device is not None:
            try:
                with raising_as_torch_does():
                    self.comms.open(device)
            except BaseException:
                self._release()  # torch drops a group that it cannot form.
                raise
            self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing. torch calls this method on ranks that are not members of a new group.

        Those ranks take no part in the formation of the new group.
        """

    options = None
    """The backend options that torch passes when it splits this group into smaller groups."""

    @property
    def supports_splitting(self) -> bool:
        """True, because the group has :meth:`split_group`."""
        return True

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Timeout = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """See :func:`torch.distributed.split_group`, which supports the CPU since torch 2.15. Collective.

        :param ranks: the members of the new group, as ranks of this group.
        :param opts: must be None, because the new group uses the transport of this group.
        :returns: the new group, or None on a rank that is not a member of the new group.
        """
        if opts is not None:
            raise ArgumentError(f"pg_options of a split is {opts!r}, wanted None: it has the transport of its parent")
        members = ranks if self.comm.rank in ranks else ()
        patience = COMM_TIMEOUT if timeout is None else timeout
        with raising_as_torch_does():
            comm = self.comm.split(members, group_name and f"{self.comm.name}/{group_name}", timeout=patience)
        if comm is None:
            return None
        group = Group(comm, dist.PrefixStore(f"{comm.name}/", self._store), self.transport, self, ranks)
        group.eager_connect_single_device(self.bound_device_id)
        group.setGroupName(group_name or "")
        group.setGroupDesc(group_desc or "")
        return group

    # ------------------------------------------------------------------------------------------------ collectives

    @operation("all_reduce")
    def allreduce(self, tensor: Tensor, how: How) -> GroupWork:
        """See :func:`torch.distributed.all_reduce`."""
        return self._all_reduce([tensor], how)

    @operation("all_reduce")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], how: How) -> GroupWork:
        """Start several all-reduces."""
        return self._all_reduce(tensors, how)

    @operation("reduce")
    def reduce(self, tensor: Tensor, how: How) -> GroupWork:
        """See :func:`torch.distributed.reduce`."""
        its = self._call([tensor])
        give = its.written if self.comm.rank == how.root else its.read
        return self._work([its.comm.reduce(give(tensor), how.root, how.op, timeout=how.timeout)], [tensor], its)

    @operation("broadcast")
    def broadcast(self, tensor: Tensor, how: How) -> GroupWork:
        """See :func:`torch.distributed.broadcast`."""
        its = self._call([tensor])
        give = its.read if self.comm.rank == how.root else its.written
        return self._work([its.comm.broadcast(give(tensor), how.root, timeout=how.timeout)], [tensor], its)

    @operation("all_gather", 1)
    def allgather(self, outputs: Sequence[Tensor], tensor: Tensor, how: How) -> GroupWork:
        """See :func:`torch.distributed.all_gather`."""
        return self._all_gather([outputs], [tensor], how)

    @operation("all_gather", 1)
    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], how: How) -> GroupWork:
        """See :func:`torch.distributed.all_gather_coalesced`.

        ``outputs`` contains a list for each rank. Each of these lists contains an output for each input.
        """
        return self._all_gather(list(zip(*outputs, strict=True)), inputs, how)

    @operation("all_gather_single", 1)
    def all_gather_single(self, output: Tensor, input: Tensor, how: How) -> GroupWork:
        """See :func:`torch.distributed.all_gather_into_tensor`."""
        return self._all_gather_single([output], [input], how)

    @operation("all_gather_single", 1)
    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], how: How) -> GroupWork:
        """Start several all-gathers, each into one tensor."""
        return self._all_gather_single(outputs, inputs, how)

    @operation("reduce_scatter", 1)
    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], how: How) -> GroupWork:
        """See :func:`torch.distributed.reduce_scatter`."""
        its, equal = self._call([output]), len({each.numel() for each in inputs}) == 1
        scatter = its.comm.reduce_scatter if equal else its.comm.reduce_scatter_v
        part = scatter(its.written(output), [its.read(each) for each in inputs], how.op, timeout=how.timeout)
        return self._work([part], [output], its)

    @operation("reduce_scatter_single", 1)
    def reduce_scatter_single(self, output: Tensor, input: Tensor, how: How) -> GroupWork:
        """See :func:`torch.distributed.reduce_scatter_tensor`."""
        return self._reduce_scatter_single([output], [input], how)

    @operation("reduce_scatter_single", 1)
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], how: How
    ) -> GroupWork:
        """Start several reduce-scatters, each of one tensor."""
        return self._reduce_scatter_single(outputs, inputs, how)

    @operation("all_to_all", 1)
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], how: How) -> GroupWork:
        """See :func:`torch.distributed.all_to_all`."""
        its = self._call(outputs)
        into, given = [its.written(each) for each in outputs], [its.read(each) for each in inputs]
        return self._work([its.comm.all_to_all(into, given, timeout=how.timeout)], outputs, its)

    @operation("all_to_all_single", 1)
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], how: How
    ) -> GroupWork:
        """See :func:`torch.distributed.all_to_all_single`."""
        # Each rank decides alone whether it splits evenly, so all ranks use the op that permits uneven splits.
        its, size = self._call([output]), self.comm.size
        into, given = its.written(output), its.read(input)
        splits = cuts(output, output_splits, size), cuts(input, input_splits, size)
        return self._work([its.comm.all_to_all_v_single(into, given, *splits, timeout=how.timeout)], [output], its)

    @operation("gather", 1)
    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, how: How) -> GroupWork:
        """See :func:`torch.distributed.gather`."""
        its, into = self._call([tensor]), outputs if self.comm.rank == how.root else ()
        written = [its.written(each) for each in into] if self.comm.rank == how.root else None
        return self._work([its.comm.gather(written, its.read(tensor), how.root, timeout=how.timeout)], into, its)

    @operation("scatter", 1)
    def scatter(self, output: Tensor, inputs: Sequence[Tensor], how: How) -> GroupWork:
        """See :func:`torch.distributed.scatter`."""
        its = self._call([output])
        given = [its.read(each) for each in inputs] if self.comm.rank == how.root else None
        return self._work([its.comm.scatter(its.written(output), given, how.root, timeout=how.timeout)], [output], its)

    @operation("barrier", None)
    def barrier(self, how: How) -> GroupWork:
        """See :func:`torch.distributed.barrier`.

        A wait for the barrier's work blocks the thread, even if the group has GPU tensors.
        """
        its = CallTensors(self._side(how.device or torch.device("cpu")))
        return self._work([its.comm.barrier(timeout=how.timeout)], [], its, ordered=False)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """See :func:`torch.distributed.monitored_barrier`. The group stays usable if ranks are missing."""
        with raising_as_torch_does():
            seconds = self.comm.timeout if timeout is None or timeout == UNSET else remaining(timeout)
            self._barriers += 1
            monitored_barrier(self.comm, self._barriers, seconds, wait_all_ranks)

    # --------------------------------------------------------------------------------------------- point to point

    @operation("send")
    def send(self, tensor: Tensor, dst: int, tag: int, how: How) -> GroupWork:
        """See :func:`torch.distributed.isend`."""
        its = self._call([tensor], "send")
        return self._work([its.comm.send(its.read(tensor), dst, tag)], [], its)

    @operation("recv")
    def recv(self, tensor: Tensor, src: int, tag: int, how: How) -> GroupWork:
        """See :func:`torch.distributed.irecv`."""
        its = self._call([tensor], "recv")
        return self._work([its.side.receives.from_one(its.written(tensor), src, tag)], [tensor], its, lambda: src)

    @operation("recvAnySource")
    def recv_anysource(self, tensor: Tensor, tag: int, how: How) -> GroupWork:
        """See :func:`torch.distributed.irecv` without a source."""
        its = self._call([tensor], "recv")
        receive = its.side.receives.from_any(its.written(tensor), tag)
        return self._work([receive], [tensor], its, functools.partial(source_of, receive))

    # ------------------------------------------------------------------------------------------------ coalescing

    def _start_coalescing(self, device_type: torch.device | None = None) -> None:
        self._together = []

    def _end_coalescing(self, device_type: torch.device | None = None) -> GroupWork:
        works, self._together = self._together or [], None
        return GroupWork.of_all(works, self.completer)

    # torch also calls these methods by their earlier names. For other earlier names it calls the new ones by itself.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    # ---------------------------------------------------------------------------------------------------- inside

    def _all_reduce(self, tensors: Sequence[Tensor], how: How) -> GroupWork:
        its = self._call(tensors)
        parts = [
            its.comm.all_reduce(its.written(tensor), how.op, timeout=how.timeout)
            if tensor.layout is torch.strided
            else self._sum(tensor, how, its.side)
            for tensor in tensors
        ]
        return self._work(parts, tensors, its)

    def _sum(self, tensor: Tensor, how: How, side: GroupSide) -> WorkStep:
        sparse.check(tensor, how.op, side.gpu)
        self._sums += 1
        return WorkStep((), functools.partial(sparse.all_reduce, self.comm, tensor, self._sums, how.timeout)).after(
            self.completer, here=False
        )

    def _all_gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], how: How) -> GroupWork:
        its, parts = self._call(inputs), []
        for into, tensor in zip(outputs, inputs, strict=True):
            equal = len({each.numel() for each in into}) == 1
            gather = its.comm.all_gather if equal else its.comm.all_gather_v
            parts.append(gather([its.written(each) for each in into], its.read(tensor), timeout=how.timeout))
        return self._work(parts, [each for into in outputs for each in into], its)

    def _all_gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], how: How) -> GroupWork:
        its = self._call(inputs)
        parts = [
            its.comm.all_gather_single(its.written(output), its.read(given), timeout=how.timeout)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._work(parts, outputs, its)

    def _reduce_scatter_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], how: How) -> GroupWork:
        its = self._call(inputs)
        parts = [
            its.comm.reduce_scatter_single(its.written(output), its.read(given), how.op, timeout=how.timeout)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._work(parts, outputs, its)

    def _call(self, tensors: Sequence[Tensor], message: str | None = None) -> CallTensors:
        return CallTensors(self._side(communicators.device_of(tensors), message))

    def _side(self, device: torch.device, message: str | None = None) -> GroupSide:
        if device.type == "cpu":
            return self.comms.cpu
        self._get_backend(device)  # This raises if another backend has the device.
        return self.comms.on(device, message)

    def _work(
        self,
        parts: Sequence[Any],
        outputs: Sequence[Tensor],
        its: CallTensors,
        source: Callable[[], int] = lambda: -1,
        *,
        ordered: bool = True,
    ) -> GroupWork:
        self._number += 1
        following, ordered = its.parts(list(parts), self.completer), ordered and its.side.gpu is not None
        work = GroupWork(following, list(outputs), self.completer, source, ordered=ordered)
        if self._together is not None:
            self._together.append(work)
        return work


if not hasattr(dist.ProcessGroup, "all_to_all_single"):  # torch before 2.13 has only the earlier names.
    for _before, _now in (
        ("allgather_into_tensor_coalesced", Group.all_gather_single_coalesced),
        ("reduce_scatter_tensor_coalesced", Group.reduce_scatter_single_coalesced),
        ("alltoall_base", Group.all_to_all_single),
    ):
        setattr(Group, _before, _now)
