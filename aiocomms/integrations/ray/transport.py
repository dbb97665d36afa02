"""A tensor transport of Ray Direct Transport (RDT) over endpoints.

The *source* is the process that has the tensors of an object. The source registers each tensor as a readable region.
Ray sends the source's address and the regions' descriptors to the receiver. The receiver connects to the source, opens
the regions, and reads the regions into its own tensors. The source's program takes no part in the reads. Ray calls all
methods of the transport on Ray's own threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import ray
import torch
from ray._private import ray_constants
from ray.exceptions import RayDirectTransportError
from ray.experimental import rdt
from ray.experimental.rdt import tensor_transport_manager
from ray.experimental.rdt.util import create_empty_tensors_from_metadata
from torch import Tensor

from aiocomms.blocking import BlockingPeer, BlockingRegion, Endpoint, open_endpoint
from aiocomms.errors import CommAbortedError, CommError
from aiocomms.integrations.ray.places import check_reachable, node, own_host
from aiocomms.lowlevel import at_end
from aiocomms.lowlevel.threads import start_awaited

NAME: Final = "AIOCOMMS"
_RELEASE: Final = 10.0
"""The time within which receivers must release a revoked region, in seconds."""

_log = logging.getLogger("aiocomms")


if TYPE_CHECKING:  # Ray has no types for these classes, and may not be installed.

    @dataclass
    class _Metadata:
        tensor_meta: list[tuple[torch.Size, torch.dtype]]
        tensor_device: str | None = None

    class _FetchRequest:
        obj_id: str
        tensors: list[Tensor]

        def __init__(self, obj_id: str, tensors: list[Tensor]) -> None: ...

    class _Manager: ...

else:
    _Metadata, _Manager = rdt.TensorTransportMetadata, rdt.TensorTransportManager
    _FetchRequest = tensor_transport_manager.FetchRequest


@dataclass
class EndpointMetadata(_Metadata):
    """The data that a receiver needs to read the tensors of one object."""

    source: str = ""
    """The name of the source's actor, which error messages contain."""
    host: str = ""
    node: str = ""
    """The address of the source's node. The field ``host`` has the address at which the source listens."""
    address: bytes = b""
    descriptors: Sequence[bytes] = field(default_factory=list)
    """The descriptor of each tensor's region. A tensor without elements has an empty descriptor."""


class _Fetch(_FetchRequest):
    """The read of one object, on a separate thread. Any thread may wait for the read or abort it."""

    def __init__(self, obj_id: str, tensors: list[Tensor], meta: EndpointMetadata) -> None:
        super().__init__(obj_id, tensors)
        self._meta = meta
        self._peer: BlockingPeer | None = None
        self.outcome: Future[list[Tensor]] = Future()

    def run(self, endpoint: Endpoint) -> None:
        """Read the object."""
        try:
            self._read(endpoint)
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _read(self, endpoint: Endpoint) -> None:
        check_reachable("it", self._meta.host, self._meta.node)
        peer = self._peer = endpoint.connect(self._meta.address)
        works = []
        for tensor, descriptor in zip(self.tensors, self._meta.descriptors, strict=True):
            if self.outcome.done():  # The fetch was aborted.
                return
            if descriptor:
                works.append(peer.attach(descriptor).get(tensor))
        for work in works:
            work.wait()

    def abort(self) -> None:
        """Abort this fetch and all other pending fetches from the same source."""
        self._end(CommAbortedError("the transfer was aborted"))
        if self._peer is not None:
            self._peer.abort("Ray has aborted a transfer")

    def _end(self, error: Exception | None) -> None:
        try:
            if error is None:
                self.outcome.set_result(self.tensors)
            else:
                self.outcome.set_exception(self._described(error))
        except InvalidStateError:  # The fetch already has an outcome.
            pass

    def _described(self, error: Exception) -> Exception:
        described: Exception = RayDirectTransportError(
            f"object {self.obj_id} could not be read from its source, {self._meta.source}: {error}"
        )
        described.__cause__ = error
        return described


class RayTransport(_Manager):
    """The transport in one process. Ray creates this object at the first use.

    See Ray's ``TensorTransportManager``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._objects: dict[str, tuple[EndpointMetadata, list[BlockingRegion]]] = {}
        """The objects that other processes can read from this process, by object ID."""
        self._fetches: list[_Fetch] = []
        """The pending fetches."""

    def tensor_transport_backend(self) -> str:
        """Return the transport's name."""
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        """Return True, because the program of the source takes no part in a read."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True, so that Ray aborts a failed transfer and does not kill an actor."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True, because Ray has already registered the transport in the actor.

        Without aiocomms in the actor, the registration would have failed.
        """
        return True

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        """Return empty metadata, because the source and the receiver need no preparation."""
        return rdt.CommunicatorMetadata()

    # -------------------------------------------------------------------------------------------------- at the source

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Tensor]) -> EndpointMetadata:
        """Register the tensors, and return the metadata with which any process can read the tensors.

        :raises ValueError: a tensor is not contiguous or not on the CPU.
        """
        with self._lock:
            if obj_id in self._objects:  # Ray has run the task again.
                return self._objects[obj_id][0]
        for tensor in rdt_object:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise ValueError(f"a tensor is {_looks(tensor)}, wanted a contiguous one on the CPU")
        here, regions, descriptors = self._here(), list[BlockingRegion](), list[bytes]()
        with contextlib.ExitStack() as stack:
            for tensor in rdt_object:
                if tensor.numel():
                    regions.append(stack.enter_context(here.register(tensor.detach(), write=False)))
                descriptors.append(regions[-1].descriptor if tensor.numel() else b"")
            shapes = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
            device = "cpu" if rdt_object else None
            meta = EndpointMetadata(shapes, device, _source(), own_host(), node(), here.address, descriptors)
            stack.pop_all()  # All regions stay registered. After an error none does.
        with self._lock:
            self._objects[obj_id] = meta, regions
        return meta

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        """Do nothing, because the receiver reads the tensors from the source."""

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Tensor]) -> None:
        """Revoke the regions of an object after the object's last read.

        After this call, no other process reads the memory of the regions.
        """
        with self._lock:
            _, regions = self._objects.get(obj_id, (None, []))
        for region in regions:
            try:
                region.revoke(timeout=_RELEASE)
            except CommError as error:  # The receiver's connection is lost, and the region is revoked.
                _log.warning("a receiver did not release object %s: %s", obj_id, error)
        with self._lock:
            self._objects.pop(obj_id, None)

    # ------------------------------------------------------------------------------------------------ at the receiver

    def fetch_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> _FetchRequest:
        """Start to read an object into ``target_buffers`` (None: into new tensors). Return at once."""
        meta: EndpointMetadata = tensor_transport_metadata
        tensors = target_buffers or create_empty_tensors_from_metadata(meta)
        fetch = _Fetch(obj_id, tensors, meta)
        here = self._here()
        with self._lock:
            self._fetches.append(fetch)

        def run() -> None:
            fetch.run(here)
            with self._lock:
                self._fetches = [other for other in self._fetches if other is not fetch]

        start_awaited(run)
        return fetch

    def wait_fetch_complete(self, fetch_request: _FetchRequest, timeout: float = -1) -> list[Tensor]:
        """Wait until the object has been read.

        :raises RayDirectTransportError: the read has failed. The message names the source and the reason.
        :raises TimeoutError: the read has not ended before the deadline. The read continues.
        """
        assert isinstance(fetch_request, _Fetch)
        return fetch_request.outcome.result(None if timeout < 0 else timeout)

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> list[Tensor]:
        """Read an object."""
        return self.wait_fetch_complete(
            self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        )

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Abort a transfer and all other pending transfers from the same source.

        Later transfers from this source use a new connection.
        """
        with self._lock:
            found = [fetch for fetch in self._fetches if fetch.obj_id == obj_id]
        for fetch in found:
            fetch.abort()

    # ---------------------------------------------------------------------------------------------------- on both ends

    def _here(self) -> Endpoint:
        """Return this process's endpoint. The first call opens the endpoint."""
        with self._lock:
            if self._endpoint is None:
                seconds = ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS
                self._endpoint = open_endpoint(host=own_host(), name="ray", timeout=float(seconds))
                at_end(self._endpoint.close)
            return self._endpoint


def _source() -> str:
    """Return a name of this process. Error messages in other processes contain this name."""
    context = ray.get_runtime_context()
    who = "a driver or task" if context.get_actor_id() is None else repr(context.current_actor)
    return f"{who} (process {os.getpid()} on {ray.util.get_node_ip_address()})"


def _looks(tensor: Tensor) -> str:
    return f"of strides {tuple(tensor.stride())} and shape {tuple(tensor.shape)} on {tensor.device}"
