"""Handles, which stand for something of one process: a copy is the handle itself, and a pickle is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from concurrency import together
from torch import nn

import aiocomms
from aiocomms import serving
from aiocomms.communicator.p2p import Batch
from aiocomms.errors import ArgumentError
from aiocomms.lowlevel.handles import Handle
from aiocomms.progress.hooks import Hook
from aiocomms.testing import local_world

pytestmark = [pytest.mark.deterministic, pytest.mark.fault(128)]

ROOMS = [
    "aiocomms",
    "aiocomms.blocking",
    "aiocomms.resharding",
    "aiocomms.serving",
    "aiocomms.integrations.torch_backend",
]
DATA = {
    "Capabilities",
    "Chunk",
    "CommError",
    "DriverState",
    "Message",
    "PlanFailures",
    "PlanStart",
    "Received",
    "ReduceOp",
    "ServiceStatistics",
    "TensorLike",
    "Transport",
    "Weights",
    "new_comm",
    "live_group",
    "open_endpoint",
}
"""Public classes that are no handles: values, base classes, and objects that are yet to be awaited."""


def public_classes() -> list[type]:
    found: set[type] = {Batch, Hook}
    for room in map(importlib.import_module, ROOMS):
        found |= {value for name in room.__all__ if inspect.isclass(value := getattr(room, name))}
    return sorted((cls for cls in found if cls.__name__ not in DATA), key=str)


def stays(handle: Any) -> None:
    """Check that a copy is the handle itself, even within a container, and that a pickle is refused."""
    assert copy.copy(handle) is handle
    assert copy.deepcopy([{"it": handle}])[0]["it"] is handle
    refused = f"^{type(handle).__name__} cannot be pickled: it stands for something of this process alone$"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=refused):
            pickle.dumps([handle], protocol)
    with pytest.raises(TypeError, match=refused):
        torch.save({"it": handle}, io.BytesIO())


def test_every_public_class_is_a_handle_or_data() -> None:
    others = [cls for cls in public_classes() if not issubclass(cls, (Handle, Exception))]
    assert not others


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_handle_is_itself_after_copy_and_deepcopy(cls: type) -> None:
    if not issubclass(cls, aiocomms.Work):  # A work cannot be made without its fields.
        stays(cls.__new__(cls))


class Layer(nn.Module):
    """A layer that holds a communicator, as docs/serving.md has it."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.comm, self.linear = comm, nn.Linear(2, 2)


def test_open_handles_stay_usable_after_a_copy(run: Any) -> None:
    async def main() -> None:
        async with local_world(2) as (one, two):
            windows = await together(*(partial(comm.new_window, torch.zeros(2)) for comm in (one, two)))
            streams = await together(partial(one.open_stream, 1), partial(two.open_stream, 0))
            work, hook = one.recv(torch.zeros(1), 1), one.register_post_hook(print)
            hook.remove()
            held = [one, one.lane("a"), one.portal(), one.portal().lane(1), windows[0], streams[0], work, hook]
            for handle in [*held, one.batch(), one.portal().batch(), serving.Service(one), serving.CurrentComm(one)]:
                stays(handle)
            layer = copy.deepcopy(Layer(one))
            assert layer.comm is one
            with pytest.raises(TypeError, match="Communicator cannot be pickled"):
                torch.save(layer, io.BytesIO())
            with pytest.raises(ArgumentError, match="obj cannot be pickled: TypeError: Communicator cannot"):
                two.send_object(two, 0, pickle=True)
            await two.send(torch.ones(1), 0)
            assert (await work).item() == 1.0
            await together(*(each.aclose for each in (*windows, *streams)))

    run(main)
