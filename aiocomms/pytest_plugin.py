"""pytest: the fixture ``world`` and the marker ``ranks``.

Every pytest run in an environment with aiocomms imports this module, so it imports nothing but pytest.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aiocomms.communicator import Communicator

DEFAULT_RANKS = 2
"""How many ranks a test has that no marker ``ranks`` says otherwise of."""

_LOOP_SCOPES = ("function", "class", "module", "package", "session")
_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker, and let pytest-asyncio drive the fixture if it is there."""
    config.addinivalue_line("markers", f"ranks(n): how many ranks the fixture `world` has, {DEFAULT_RANKS} by default")
    if config.pluginmanager.has_plugin("asyncio") or config.pluginmanager.has_plugin("pytest_asyncio"):
        config.pluginmanager.register(_asyncio_worlds(), "aiocomms-asyncio")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> list[Communicator]:
    """The communicators of a local world, one per rank, opened and closed in the test's own event loop.

    For ``async def`` tests under pytest-asyncio or anyio's plug-in; ``@pytest.mark.ranks(4)`` says how many ranks
    there are. If the test fails the world is aborted, else closed.
    """
    _count(request)  # here already, so that a wrong marker is said without a loop's traceback around it
    function: Any = getattr(request, "function", None)
    if not inspect.iscoroutinefunction(inspect.unwrap(function)):
        _refuse(request, "needs an event loop, and the test is no coroutine function: write `async def`")
    marker = request.node.get_closest_marker("asyncio")
    if marker is not None:
        return request.getfixturevalue(f"_aiocomms_world_asyncio_{_loop_scope(request, marker)}")  # type: ignore[no-any-return]
    if "anyio_backend" in request.fixturenames:
        return request.getfixturevalue("_aiocomms_world_anyio")  # type: ignore[no-any-return]
    _refuse(
        request,
        "needs an event loop, and nothing runs the test in one: mark it with pytest.mark.anyio, or with "
        "pytest.mark.asyncio of pytest-asyncio",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note that a test failed: its ranks may be left with operations that will never end."""
    if call.when == "call" and call.excinfo is not None:
        item.stash[_failed] = True
    return (yield)


async def _world(request: pytest.FixtureRequest) -> AsyncIterator[list[Communicator]]:
    from aiocomms.testing import local_world

    async with local_world(_count(request)) as comms:
        yield list(comms)
        if request.node.stash.get(_failed, False):
            for comm in comms:
                comm.abort("the test failed")


@pytest.fixture(name="_aiocomms_world_anyio")
async def _anyio_world(request: pytest.FixtureRequest) -> AsyncIterator[list[Communicator]]:
    async for comms in _world(request):
        yield comms


def _asyncio_worlds() -> ModuleType:
    """A plug-in with one fixture for each scope that a test's loop may have: fixture and test must share the loop."""
    import pytest_asyncio

    plugin = ModuleType("aiocomms-asyncio")
    for scope in _LOOP_SCOPES:

        async def opened(request: pytest.FixtureRequest) -> AsyncIterator[list[Communicator]]:
            async for comms in _world(request):
                yield comms

        name = f"_aiocomms_world_asyncio_{scope}"
        setattr(plugin, name, pytest_asyncio.fixture(loop_scope=scope, name=name)(opened))
    return plugin


def _loop_scope(request: pytest.FixtureRequest, marker: pytest.Mark) -> str:
    scope = marker.kwargs.get("loop_scope") or marker.kwargs.get("scope")
    try:
        return str(scope or request.config.getini("asyncio_default_test_loop_scope") or "function")
    except ValueError:  # a pytest-asyncio without this setting
        return "function"


def _count(request: pytest.FixtureRequest) -> int:
    marker = request.node.get_closest_marker("ranks")
    if marker is None:
        return DEFAULT_RANKS
    given = ", ".join([*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())])
    if marker.kwargs or len(marker.args) != 1 or type(marker.args[0]) is not int or marker.args[0] < 1:
        _refuse(request, f"got the marker ranks({given}), wanted the number of ranks: ranks(4)")
    count: int = marker.args[0]
    return count


def _refuse(request: pytest.FixtureRequest, why: str) -> Any:
    pytest.fail(f"{request.node.nodeid}: the fixture 'world' of aiocomms {why}", pytrace=False)
