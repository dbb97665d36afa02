"""The pytest plug-in: the fixture ``world`` and the marker ``ranks``.

Every pytest run in an environment with aiocomms imports this module, so it imports nothing but pytest.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import pytest

if TYPE_CHECKING:
    from aiocomms.communicator import Communicator

DEFAULT_RANKS = 2
"""The number of ranks for a test without the marker ``ranks``."""

_Scope = Literal["function", "class", "module", "package", "session"]
_failed = pytest.StashKey[bool]()


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Register the options of the conformance suite if that suite is run.

    Given the suite's package (``--pyargs``), pytest finds the suite's conftest only after it has parsed the options.
    """
    if any("aiocomms.testing.conformance" in arg for arg in args):
        early_config.pluginmanager.import_plugin("aiocomms.testing.conformance.options")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker, and let pytest-asyncio run the fixture if it is installed."""
    config.addinivalue_line("markers", f"ranks(n): how many ranks the fixture 'world' has; {DEFAULT_RANKS} by default")
    if config.pluginmanager.has_plugin("asyncio") or config.pluginmanager.has_plugin("pytest_asyncio"):
        config.pluginmanager.register(_asyncio_worlds(), "aiocomms-asyncio")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note that a test failed, as its ranks may have operations pending that will never end."""
    if call.when == "call" and call.excinfo is not None:
        item.stash[_failed] = True
    return (yield)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> list[Communicator]:
    """The communicators of a world, in rank order. All its ranks live in the test's own event loop.

    It serves ``async def`` tests under pytest-asyncio, or under anyio's plug-in with any backend.
    ``@pytest.mark.ranks(4)`` sets the number of ranks. After the test the world is closed; it is aborted if the test
    failed.
    """
    _count(request)  # before the loop is entered, whose traceback would bury the error about the marker
    return cast("list[Communicator]", request.getfixturevalue(_driven(request)))


def _driven(request: pytest.FixtureRequest) -> str:
    """Return the name of the fixture that opens the world in the loop which runs the test."""
    function: Any = getattr(request, "function", None)
    if hasattr(function, "hypothesis"):
        function = function.hypothesis.inner_test
    if not inspect.iscoroutinefunction(function):
        raise _refusal(request, "needs an event loop, and the test is no coroutine function: write 'async def'")
    marker = request.node.get_closest_marker("asyncio")
    if marker is not None and request.config.pluginmanager.has_plugin("aiocomms-asyncio"):
        return _asyncio_name(_loop_scope(request, marker))
    if "anyio_backend" in request.fixturenames:
        return "_aiocomms_anyio_world"
    raise _refusal(
        request,
        "needs an event loop, and nothing runs the test in one: mark it with pytest.mark.anyio, or install "
        "pytest-asyncio and mark it with pytest.mark.asyncio",
    )


@asynccontextmanager
async def _opened(request: pytest.FixtureRequest) -> AsyncIterator[list[Communicator]]:
    from aiocomms.testing import local_world

    async with local_world(_count(request)) as comms:
        yield comms
        if request.node.stash.get(_failed, False):
            for comm in comms:
                comm.abort("the test failed")


@pytest.fixture
async def _aiocomms_anyio_world(request: pytest.FixtureRequest) -> AsyncIterator[list[Communicator]]:
    async with _opened(request) as comms:
        yield comms


def _asyncio_worlds() -> ModuleType:
    """Make a plug-in with one fixture for each scope of a test's loop, as fixture and test must share the loop.

    pytest-asyncio is imported here, as pytest has imported it by now.
    """
    import pytest_asyncio

    plugin = ModuleType("aiocomms-asyncio")
    for scope in cast("tuple[_Scope, ...]", get_args(_Scope)):

        async def opened(request: pytest.FixtureRequest) -> AsyncIterator[list[Communicator]]:
            async with _opened(request) as comms:
                yield comms

        name = _asyncio_name(scope)
        setattr(plugin, name, pytest_asyncio.fixture(loop_scope=scope, name=name)(opened))
    return plugin


def _asyncio_name(scope: str) -> str:
    return f"_aiocomms_asyncio_world_of_{scope}"


def _loop_scope(request: pytest.FixtureRequest, marker: pytest.Mark) -> str:
    scope = marker.kwargs.get("loop_scope") or marker.kwargs.get("scope")
    try:
        return scope or request.config.getini("asyncio_default_test_loop_scope") or "function"
    except ValueError:  # pytest-asyncio before 0.26 has no such setting
        return "function"


def _count(request: pytest.FixtureRequest) -> int:
    marker = request.node.get_closest_marker("ranks")
    if marker is None:
        return DEFAULT_RANKS
    match marker.args:
        case (int(count),) if type(count) is int and count > 0 and not marker.kwargs:
            return count
    given = ", ".join([*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())])
    raise _refusal(request, f"got the marker ranks({given}), wanted the number of ranks: ranks(4)")


def _refusal(request: pytest.FixtureRequest, why: str) -> BaseException:
    return pytest.fail.Exception(f"{request.node.nodeid}: the fixture 'world' of aiocomms {why}", pytrace=False)
