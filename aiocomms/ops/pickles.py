"""Pickles of objects, up to a size limit. The pickle of a tensor omits storage that the tensor does not view."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from aiocomms.errors import ArgumentError


class _PickleSink:
    """A file that holds a pickle in memory, up to a size limit."""

    def __init__(self, limit: int) -> None:
        self.data, self.limit = bytearray(), limit

    def write(self, part: bytes) -> None:
        """Append some bytes.

        :raises ArgumentError: the pickle is larger than the limit.
        """
        self.make_sure(memoryview(part).nbytes)
        self.data += part

    def make_sure(self, nbytes: int) -> None:
        """Check that a pickle may grow by ``nbytes`` bytes, before the caller allocates these bytes.

        :raises ArgumentError: the pickle would be larger than the limit.
        """
        if len(self.data) + nbytes > self.limit:
            raise ArgumentError(
                f"obj takes more than {self.limit} bytes pickled, which is the most; send it as a tensor"
            )


class _Pickler(pickle.Pickler):
    """A pickler that omits the part of a tensor's storage that the tensor does not view."""

    def __init__(self, sink: _PickleSink) -> None:
        super().__init__(sink)
        self._sink = sink

    def reducer_override(self, obj: Any) -> Any:
        """See :meth:`pickle.Pickler.reducer_override`."""
        if isinstance(obj, torch.UntypedStorage):
            self._sink.make_sure(obj.nbytes())
        elif isinstance(obj, torch.TypedStorage):
            self._sink.make_sure(obj._untyped_storage.nbytes())
        elif type(obj) is Tensor and _shows_a_part(obj):
            self._sink.make_sure(obj.nbytes)
            return _compact(obj).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _shows_a_part(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
    return plain and tensor.untyped_storage().nbytes() > tensor.nbytes


def _compact(view: Tensor) -> Any:
    copy = view.detach().clone().requires_grad_(view.requires_grad)
    copy.__dict__.update(view.__dict__)
    return copy


def dumps(value: Any, limit: int) -> bytearray:
    """Pickle an object.

    :param limit: the largest size of the pickle in bytes.
    :raises ArgumentError: the pickle is larger than ``limit``.
    """
    sink = _PickleSink(limit)
    _Pickler(sink).dump(value)
    return sink.data
