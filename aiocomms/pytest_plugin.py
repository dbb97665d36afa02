"""The pytest plug-in: the fixtures ``world`` and ``comm``, and the markers ``ranks`` and ``simulated``.

Every pytest run in an environment with aiocomms imports this module, so this module imports only pytest and the
standard library.
"""

from __future__ import annotations

import functools
import inspect
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import pytest

if TYPE_CHECKING:
    from aiocomms.communicator.communicator import Communicator

DEFAULT_RANKS = 2
"""The number of ranks for a test without the marker ``ranks``."""

_Scope = Literal["function", "class", "module", "package", "session"]
_WANTED = "wanted the number of ranks: ranks(4), or ranks(4, timeout=60, transport=...)"


class _Asked(NamedTuple):
    """The arguments of a test's marker ``ranks``."""

    n: int
    timeout: float = 30.0
    transport: str | Mapping[str, str] | None = None

    def fits(self) -> bool:
        """Return whether each argument has the right type. The opening of the world checks the transport's name."""
        from aiocomms import arguments
        from aiocomms.errors import ArgumentError

        try:
            arguments.seconds("timeout", self.timeout)
        except ArgumentError:
            return False
        named = self.transport is None or isinstance(self.transport, (str, Mapping))
        return type(self.n) is int and self.n > 0 and named


class _SimulatedAs(NamedTuple):
    """The arguments of a test's marker ``simulated``."""

    ranks: int = DEFAULT_RANKS
    seeds: int | Iterable[int] = 100
    faults: Any = None
    latency: tuple[float, float] = (2e-5, 2e-3)
    longest: float = 86_400.0


_passed = pytest.StashKey[bool]()
_instead = pytest.StashKey["Callable[..., Any] | None"]()
_asked = pytest.StashKey[_Asked]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which a simulated test repeats one history (one simulated run), for example a failed one."""
    parser.getgroup("aiocomms").addoption(
        "--simulated-seed", metavar="SEED", help="run one history of simulated tests, as a failure names it: 7/0,2"
    )


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Register the options of the conformance suite if the arguments name that suite.

    If the arguments name the suite's package (``--pyargs``), pytest parses the options before it loads the suite's
    conftest. So the conftest cannot register the options in time.
    """
    if any("aiocomms.testing.conformance" in arg for arg in args):
        early_config.pluginmanager.import_plugin("aiocomms.testing.conformance.options")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the markers. If pytest-asyncio is installed, register the fixtures that open a test's communicators."""
    config.addinivalue_line(
        "markers",
        f"ranks(n, timeout=30, transport=None): how many ranks the fixtures 'world' and 'comm' have, {DEFAULT_RANKS} "
        "by default; the deadline of their operations in seconds; the transport between them",
    )
    config.addinivalue_line(
        "markers",
        f"simulated(ranks={DEFAULT_RANKS}, seeds=100, faults=None, latency=(2e-5, 2e-3), longest=86400): run the test "
        "as simulated ranks, by so many seeds; one that takes 'comm' gets each rank's communicator",
    )
    if config.pluginmanager.has_plugin("asyncio") or config.pluginmanager.has_plugin("pytest_asyncio"):
        config.pluginmanager.register(_asyncio_worlds(), "aiocomms-asyncio")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check a test's marker ``simulated`` before its fixtures are made."""
    item.stash[_passed] = False
    item.stash[_instead] = _on_ranks(item) if isinstance(item, pytest.Function) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Record whether a test has passed. If the test is simulated or uses ``comm``, run the test on every rank.

    To run a test on every rank, this hook replaces the test's function during the call. After the call the hook
    restores the function, because a plug-in may run the test again, and all parameter sets of a hypothesis test share
    one function.

    If a test has not passed, the fixture ``world`` aborts the test's communicators, because their operations may never
    end.
    """
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(item, pytest.Function) and (test := item.stash[_instead]) is not None:
            patch.setattr(*_place(item), test)
            if not inspect.iscoroutinefunction(test):  # Plug-ins for event loops must ignore a simulated test.
                patch.setattr(item, "runtest", functools.partial(pytest.Function.runtest, item))
        result = yield
    item.stash[_passed] = True
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    """Hide aiocomms' frames in the traceback of a failed test."""
    if call.excinfo is not None:
        _hide_frames()
    return (yield)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> list[Communicator]:
    """Return the communicators of all ranks, in rank order. All ranks run in the test's event loop.

    The fixture is for ``async def`` tests that pytest-asyncio or anyio's plug-in (with any backend) runs.
    ``@pytest.mark.ranks(4)`` sets the number of ranks. The marker's arguments ``timeout=`` and ``transport=`` set the
    deadline of operations and the transport. An indirect parameter can also set these values. The parameter is the
    number of ranks, or a mapping with the keys ``n``, ``timeout`` and ``transport``.

    After the test the fixture closes the communicators. The test fails if a message is unmatched when the test ends, or
    if only some ranks have called a collective. If the test has already failed, the fixture aborts the communicators.
    """
    if request.node.get_closest_marker("simulated") is not None:
        raise _refusal(request, "is of one process, and the test's ranks are simulated ones: take 'comm'")
    # An error that is raised here, before the loop runs, has a short traceback.
    request.node.stash[_asked] = _ask(request)
    return cast("list[Communicator]", request.getfixturevalue(_driven(request)))


class _EveryRank(list["Communicator"]):
    """The communicators that the fixture :func:`comm` returns. The plug-in calls the test once with each of them."""


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """Return one rank's communicator. The test runs on all ranks of a :func:`world` concurrently.

    If the test fails on one rank, the other ranks are cancelled, and a note on the error names the failed rank. Other
    fixtures cannot use ``comm``, but can use ``world``. With the marker ``simulated`` the ranks are simulated
    processes, and each rank opens its communicator with ``new_comm``.
    """
    if "comm" not in request.node._fixtureinfo.argnames:
        raise _refusal(
            request, "is a communicator of each rank, for a test's own argument; a fixture takes 'world'", "comm"
        )
    if request.node.get_closest_marker("simulated") is not None:
        return None  # Each rank opens its own communicator.
    return _EveryRank(request.getfixturevalue("world"))


def _place(item: pytest.Function) -> tuple[Any, str]:
    """Return the object that contains the test's function, and the name of the attribute with the function.

    For a hypothesis test, this object is the attribute ``hypothesis`` of the test.
    """
    holder = getattr(item.obj, "hypothesis", None)
    return (item, "obj") if holder is None else (holder, "inner_test")


def _on_ranks(item: pytest.Function) -> Callable[..., Any] | None:
    """Return a function that runs the test on every rank, if the test is simulated or uses ``comm``; else None."""
    test = getattr(*_place(item))
    if (marker := item.get_closest_marker("simulated")) is not None:
        return _simulated(item, marker, test)
    # The test may use another fixture with the name "comm".
    ours = "comm" in item._fixtureinfo.argnames and _is_ours(item._fixtureinfo.name2fixturedefs["comm"][-1])
    return _on_every_rank(test) if ours and inspect.iscoroutinefunction(test) else None


def _is_ours(fixture: pytest.FixtureDef[Any]) -> bool:
    return fixture.func.__module__ == __name__


def _on_every_rank(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    async def on_every_rank(*args: Any, **kwargs: Any) -> Any:
        from aiocomms.testing import run_ranks

        await run_ranks(kwargs["comm"], lambda comm: test(*args, **{**kwargs, "comm": comm}))
        return None

    return on_every_rank


def _simulated(item: pytest.Function, marker: pytest.Mark, test: Callable[..., Any]) -> Callable[..., None]:
    """Return a synchronous function that runs a simulated test. Plug-ins for event loops ignore synchronous tests."""
    asked = _simulated_as(item, marker)
    if not inspect.iscoroutinefunction(test):
        pytest.fail(
            f"{item.nodeid}: the marker 'simulated' of aiocomms is for coroutine functions: write 'async def'",
            pytrace=False,
        )
    return _in_simulation(item, test, asked)


def _simulated_as(item: pytest.Function, marker: pytest.Mark) -> _SimulatedAs:
    """Return the arguments of the marker ``simulated``."""
    try:
        return _SimulatedAs(*marker.args, **marker.kwargs)
    except TypeError as error:
        why = str(error).partition(" ")[2]
    raise pytest.fail.Exception(f"{item.nodeid}: the marker 'simulated' of aiocomms {why}", pytrace=False)


def _in_simulation(item: pytest.Function, test: Callable[..., Any], asked: _SimulatedAs) -> Callable[..., None]:
    seed = item.config.getoption("simulated_seed")

    @functools.wraps(test)
    def in_simulation(*args: Any, **kwargs: Any) -> None:
        from aiocomms.testing.simulation.searching import attempt, read_seed, read_seeds, search

        trial = _trial(item, functools.partial(_program, test, args, kwargs), asked)
        with _checking():
            if seed is None:
                _, failure = _refusing(item, search, trial, _refusing(item, read_seeds, asked.seeds))
            else:
                failure = _refusing(item, attempt, trial, *_refusing(item, read_seed, seed))
        if failure is not None:
            name = shlex.quote(str(item.config.cwd_relative_nodeid(cast("Any", item.nodeid))))
            failure.error.add_note(f"repeat it: pytest {name} --simulated-seed='{failure.seed}'")
            raise failure.error

    del in_simulation.__wrapped__  # Plug-ins would find a coroutine function there.
    return in_simulation


async def _program(test: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a test on one rank, with a communicator if the test takes one."""
    if "comm" not in kwargs:
        return await test(*args, **kwargs)
    from aiocomms.communicator.opening import new_comm

    async with new_comm() as comm:
        return await test(*args, **{**kwargs, "comm": comm})


def _trial(item: pytest.Function, program: Callable[[], Any], asked: _SimulatedAs) -> Any:
    from aiocomms.testing import Faults
    from aiocomms.testing.simulation.trial import SimulatedTrial

    faults = Faults() if asked.faults is None else asked.faults
    return _refusing(item, SimulatedTrial, program, asked.ranks, faults, asked.latency, asked.longest)


def _refusing(item: pytest.Function, call: Callable[..., Any], *args: Any) -> Any:
    """Call a function that checks the arguments of a test's marker.

    If the function raises an error, fail the test with a short message and without a traceback.
    """
    from aiocomms.errors import ArgumentError

    try:
        return call(*args)
    except ArgumentError as error:
        message = f"{item.nodeid}: the marker 'simulated' of aiocomms: {error}"
    raise pytest.fail.Exception(message, pytrace=False)


def _hide_frames() -> None:
    """Mark aiocomms' modules, so that pytest omits their frames from tracebacks. ``--full-trace`` shows all frames."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("aiocomms.", "aiocomms_")) and not name.startswith("aiocomms.testing.conformance"):
            module.__dict__.setdefault("__tracebackhide__", True)


def _driven(request: pytest.FixtureRequest) -> str:
    """Return the name of the fixture that opens the communicators in the test's event loop."""
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


@contextmanager
def _checking() -> Iterator[None]:
    """Switch on the debug mode within the block, if ``AIOCOMMS_DEBUG`` is not set.

    The debug mode finds mistakes such as a forgotten await.
    """
    if "AIOCOMMS_DEBUG" in os.environ:
        yield
        return
    os.environ["AIOCOMMS_DEBUG"] = "1"
    try:
        yield
    finally:
        os.environ.pop("AIOCOMMS_DEBUG", None)


@asynccontextmanager
async def _opened(request: pytest.FixtureRequest) -> AsyncIterator[list[Communicator]]:
    from aiocomms.diagnosis.debug import report_forgotten
    from aiocomms.testing import local_world
    from aiocomms.testing.leftovers import Leftovers

    asked = request.node.stash[_asked]
    with _checking():
        async with local_world(asked.n, asked.transport, timeout=asked.timeout) as comms:
            yield comms
            passed = request.node.stash[_passed]
            left = Leftovers(comms if passed else [])
            if not passed:
                for comm in comms:
                    comm.abort("the test failed")
    report = left.report()
    report_forgotten(quietly=not passed or bool(report))
    if report:
        pytest.fail(report, pytrace=False)


@pytest.fixture
async def _aiocomms_anyio_world(request: pytest.FixtureRequest) -> AsyncIterator[list[Communicator]]:
    async with _opened(request) as comms:
        yield comms


def _asyncio_worlds() -> ModuleType:
    """Make a plug-in with one fixture for each possible loop scope of a test (pytest-asyncio's ``loop_scope``).

    A fixture and its test must have the same loop scope, so that both run on the same event loop. This function imports
    pytest-asyncio, which pytest has already imported.
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
    except ValueError:  # Versions of pytest-asyncio before 0.26 have no such setting.
        return "function"


def _ask(request: pytest.FixtureRequest) -> _Asked:
    """Return the arguments with which the fixture ``world`` opens a test's communicators.

    An indirect parameter of the test gives the arguments. If the test has no indirect parameter, the closest
    marker gives the arguments.
    """
    marker, param = request.node.get_closest_marker("ranks"), _param(request.node)
    args: tuple[Any, ...] = (DEFAULT_RANKS,)
    kwargs: Mapping[str, Any] = {}
    if isinstance(param, Mapping):
        args, kwargs = (), param
    elif param is not None:
        args = (param,)
    elif marker is not None:
        args, kwargs = marker.args, marker.kwargs
    if len(args) < 2:
        try:
            asked = _Asked(*args, **kwargs)
        except TypeError:
            pass
        else:
            if asked.fits():
                return asked
    given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
    what = f"the marker ranks({given})" if param is None else f"the parameter {param!r}"
    raise _refusal(request, f"got {what}, {_WANTED}")


def _param(item: Any) -> Any:
    """Return a test's indirect parameter for the fixture ``world`` or ``comm``; None if the test has none."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    fixtures = item._fixtureinfo.name2fixturedefs
    found = [params[name] for name in ("world", "comm") if name in params and any(map(_is_ours, fixtures[name]))]
    return found[0] if found else None


def _refusal(request: pytest.FixtureRequest, why: str, fixture: str = "world") -> BaseException:
    return pytest.fail.Exception(f"{request.node.nodeid}: the fixture {fixture!r} of aiocomms {why}", pytrace=False)
