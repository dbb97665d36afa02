"""The pytest hooks that run every coroutine function of the suite's modules on every rank of a world."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from aiocomms.testing.conformance import options
from aiocomms.testing.conformance.case import Place
from aiocomms.testing.conformance.matrix import Marks
from aiocomms.testing.conformance.processes import Processes
from aiocomms.testing.conformance.rank import Request
from aiocomms.testing.conformance.tasks import Tasks
from aiocomms.testing.conformance.world import World, verdict


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the suite's options if pytest's command line contains the path of the suite.

    If the command line contains the suite's package instead, aiocomms' plug-in registers the options.
    """
    pluginmanager.import_plugin(options.__name__)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each check with all transports, loops and numbers of ranks for which the check's result may differ."""
    if "case" in metafunc.fixturenames:
        sizes, more = getattr(metafunc.function, "ranks", ((2,), ()))
        named = {name: metafunc.definition.get_closest_marker(name) is not None for name in ("loops", "core", "memory")}
        places = options.places(metafunc.config, Marks(sizes, more, **named))
        metafunc.parametrize("case", places, ids=str, indirect=True, scope="session")


def pytest_collection_finish() -> None:
    """Exclude all existing objects, such as torch's modules, from further garbage collections, to save time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest) -> Iterator[World]:
    """Yield the world, which is the object that runs the ranks.

    Each rank replaces the world by its :class:`Case`. pytest groups the checks by world.
    """
    place: Place = request.param
    world: World = Processes(place) if place.processes else Tasks(place)
    yield world
    world.close()


@pytest.fixture
def comm() -> None:
    """Return None. Each rank replaces this value by its own communicator."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run a check on every rank, instead of calling the check in this process."""
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
