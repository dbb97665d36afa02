"""Runs every coroutine function of the suite's modules on every rank of a world."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiocomms import registry
from aiocomms.testing.conformance import options
from aiocomms.testing.conformance.case import Place
from aiocomms.testing.conformance.processes import Processes
from aiocomms.testing.conformance.rank import Request
from aiocomms.testing.conformance.tasks import Tasks
from aiocomms.testing.conformance.world import World, verdict


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know the options also where the suite is named by its path; by its package's name the plug-in loads them."""
    pluginmanager.import_plugin(options.__name__)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each check for every transport, loop and number of ranks."""
    if "case" in metafunc.fixturenames:
        wanted = options.sizes(metafunc.config)
        numbers = [n for n in getattr(metafunc.function, "ranks", (2,)) if wanted is None or n in wanted]
        metafunc.parametrize("case", _places(metafunc.config, numbers), ids=str, indirect=True, scope="session")


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest) -> Iterator[World]:
    """On each rank: its :class:`Case`. Here: the world; pytest runs the checks of one world one after the other."""
    place: Place = request.param
    world: World = Processes(place) if place.processes else Tasks(place)
    yield world
    world.close()


@pytest.fixture
def comm() -> None:
    """On each rank: its communicator."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run a check on every rank, instead of calling it here."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    __tracebackhide__ = True
    arguments: dict[str, Any] = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    world: World = arguments.pop("case")
    del arguments["comm"]
    name = f"{pyfuncitem.originalname} {arguments}"
    seed = pyfuncitem.config.stash[options.SEED]
    outcome = verdict(world.run(Request(pyfuncitem.obj, arguments, name, seed)))
    if outcome.status == "skipped":
        pytest.skip(outcome.text)
    if outcome.status != "passed":
        pytest.fail(f"{outcome.text}\n(--seed={seed})", pytrace=False)
    return True


def _places(config: pytest.Config, numbers: list[int]) -> list[Place]:
    device = config.getoption("--device")
    places = []
    for transport in _transports(config, torch.device(device)):
        processes = config.getoption("--processes") or not _in_process(transport, torch.device(device))
        places += [
            Place(transport, device, loop, size, processes, config.getoption("--deadline"))
            for loop in options.loops(config)
            for size in numbers
        ]
    return places


def _transports(config: pytest.Config, device: torch.device) -> list[str | dict[str, str]]:
    available = registry.available(device)
    given = config.getoption("--transport")
    if given is None:
        return [name for name, why_not in available.items() if why_not is None]
    chosen: list[str | dict[str, str]] = []
    for text in given:
        parts = dict(part.split("=", 1) for part in text.split(",")) if "=" in text else {"": text}
        for name in parts.values():
            if available.get(name, "it is not installed") is not None:
                raise pytest.UsageError(f"--transport {name}: {available.get(name, 'it is not installed')}")
        chosen.append(parts if "=" in text else text)
    return chosen


def _in_process(transport: str | dict[str, str], device: torch.device) -> bool:
    names = [transport] if isinstance(transport, str) else transport.values()
    found = [registry.find(name, device) for name in names]
    return all(not isinstance(cls, str) and cls.capabilities.in_process for cls in found)
