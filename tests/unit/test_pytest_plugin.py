"""The pytest plug-in, in test suites such as users write."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys

import pytest
from processes import HANGS

pytestmark = [pytest.mark.deterministic, pytest.mark.slow, pytest.mark.usefixtures("modules_stay")]

# Pytester removes a run's imports from sys.modules. Import them here once, for torch cannot be imported twice.
for _module in ("aiocomms.functional", "aiocomms.testing", "aiocomms_local", "trio", "uvloop", "pytest_asyncio"):
    importlib.import_module(_module)

pytest_plugins = ["pytester"]

INI = """
[pytest]
addopts = --strict-markers -p no:cacheprovider -p no:hypothesispytest
asyncio_default_fixture_loop_scope = function
asyncio_mode = {mode}
filterwarnings = error
timeout = 240
"""

HEAD = """
import anyio, asyncio, gc, pytest, torch
from aiocomms import functional
import aiocomms
from aiocomms.bootstrap import directory

async def sums(world, n):
    assert [comm.rank for comm in world] == list(range(n))
    assert {comm.size for comm in world} == {n}
    works = [comm.all_reduce(torch.ones(2)) for comm in world]
    for work in works:
        assert (await work).tolist() == [n, n]
"""


@pytest.fixture
def suite(pytester: pytest.Pytester):
    """Write a test suite, run it, and return the result."""

    def run(source: str, *args: str, mode: str = "strict", ini: str = ""):
        pytester.makeini(INI.format(mode=mode) + ini)
        pytester.makepyfile(HEAD + source)
        return pytester.runpytest_inprocess(*args, no_reraise_ctrlc=True)

    return run


ASYNCIO = """
{mark}
async def test_two(world):
    await sums(world, 2)

{mark}
@pytest.mark.ranks(4)
async def test_four(world):
    await sums(world, 4)

{mark}
@pytest.mark.ranks(1)
async def test_one(world):
    await sums(world, 1)
    assert (await functional.all_gather(torch.ones(3))).shape == (1, 3)

@pytest.mark.ranks(3)
class TestClass:
    {mark}
    async def test_three(self, world):
        await sums(world, 3)

    {mark}
    @pytest.mark.ranks(5)
    async def test_the_closest_marker_wins(self, world):
        await sums(world, 5)

{mark}
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.ranks(3))])
async def test_parametrised(world, n):
    await sums(world, n)

{mark}
async def test_groups(world):
    async def rank(comm):
        directory.enter(comm)
        return await functional.all_gather(torch.tensor(comm.rank))
    assert [t.tolist() for t in await asyncio.gather(*map(rank, world))] == [[0, 1]] * 2
"""


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_world_fixture_works_under_pytest_asyncio(suite, mode):
    mark = "@pytest.mark.asyncio" if mode == "strict" else ""
    suite(ASYNCIO.format(mark=mark).replace("\n    \n", "\n"), mode=mode).assert_outcomes(passed=8)


def test_world_uses_the_tests_loop_whatever_its_scope(suite):
    source = """
class Test{scope}:
    @pytest.mark.asyncio(loop_scope="{scope}")
    async def test_a(self, world):
        await sums(world, 2)

    @pytest.mark.asyncio(loop_scope="{scope}")
    async def test_b(self, world):
        await sums(world, 2)
"""
    scopes = ("function", "class", "module", "package", "session")
    suite("".join(source.format(scope=scope) for scope in scopes)).assert_outcomes(passed=10)


def test_world_obeys_the_default_loop_scope(suite):
    source = """
pytestmark = pytest.mark.asyncio

async def test_a(world):
    await sums(world, 2)

async def test_b(world):
    await sums(world, 2)
"""
    suite(source, ini="asyncio_default_test_loop_scope = session\n").assert_outcomes(passed=2)


def test_world_fixture_works_under_anyio_on_every_backend(suite):
    source = """
pytestmark = pytest.mark.anyio

@pytest.fixture(params=["asyncio", ("asyncio", {"use_uvloop": True}), "trio"], ids=["asyncio", "uvloop", "trio"])
def anyio_backend(request):
    return request.param

@pytest.mark.ranks(3)
async def test_three(world, anyio_backend):
    name = type(world[0]._core.driver._loop.token).__module__.partition(".")[0]
    assert name in (anyio_backend, "uvloop" if isinstance(anyio_backend, tuple) else "")
    await sums(world, 3)

async def test_two(world):
    await sums(world, 2)

async def test_groups(world):
    async def rank(comm):
        directory.enter(comm)
        assert (await functional.all_gather(torch.tensor(comm.rank))).tolist() == [0, 1]
    async with anyio.create_task_group() as tasks:
        for comm in world:
            tasks.start_soon(rank, comm)
"""
    suite(source).assert_outcomes(passed=9)


def test_world_fixture_works_in_anyio_auto_mode_without_pytest_asyncio(suite):
    source = """
async def test_it(world):
    await sums(world, 2)
"""
    suite(
        source, "-p", "no:asyncio", "-W", "ignore::pytest.PytestConfigWarning", ini="anyio_mode = auto\n"
    ).assert_outcomes(passed=2)


def test_asyncio_and_anyio_runners_work_in_one_suite(suite):
    source = """
@pytest.mark.asyncio
async def test_asyncio(world):
    await sums(world, 2)

@pytest.mark.anyio
async def test_anyio(world):
    await sums(world, 2)
"""
    suite(source).assert_outcomes(passed=3)


def test_user_fixture_may_depend_on_world(suite):
    source = """
import pytest_asyncio

@pytest_asyncio.fixture
async def total(world):
    works = [comm.all_reduce(torch.ones(())) for comm in world]
    return [int(await work) for work in works]

@pytest.mark.asyncio
@pytest.mark.ranks(3)
async def test_asyncio(total, world):
    assert total == [3, 3, 3]
    await sums(world, 3)

@pytest.fixture
async def anyio_total(world):
    works = [comm.all_reduce(torch.ones(())) for comm in world]
    return [int(await work) for work in works]

@pytest.mark.anyio
async def test_anyio(anyio_total):
    assert anyio_total == [2, 2]
"""
    suite(source).assert_outcomes(passed=3)


def test_hypothesis_test_may_use_world(suite):
    source = """
from hypothesis import HealthCheck, given, settings, strategies as st

@pytest.mark.asyncio
@given(st.integers(0, 9))
@settings(max_examples=5, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
async def test_it(world, n):
    work = world[0].send(torch.tensor(n), 1)
    assert await world[1].recv(torch.tensor(0), 0) == n
    await work
"""
    suite(source, "-p", "_hypothesis_pytestplugin").assert_outcomes(passed=1)


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_failing_test_reports_only_its_own_error_and_ends(suite, mark, monkeypatch):
    """The world of a failed test is aborted: a close would wait for its works for ever."""
    monkeypatch.setattr("aiocomms.core.core.CLOSE_GRACE", math.inf)
    source = f"""
seen = []

@pytest.mark.{mark}
async def test_fails(world):
    seen.append(world)
    works = [comm.send(torch.ones(2), 1 - comm.rank) for comm in world]
    seen.append(works)
    assert 1 == 2

def test_it_was_aborted_and_closed():
    world, works = seen[:2]
    assert all(comm.closed and comm.aborted for comm in world)
    assert all("the test failed" in str(work.exception()) for work in works)
    with pytest.raises(ValueError, match="no open communicator has that name"):
        aiocomms.get_comm("world")
"""
    result = suite(source, "-k", "not trio")
    result.assert_outcomes(passed=1, failed=1, deselected=0 if mark == "asyncio" else 1)
    result.stdout.fnmatch_lines("E  *assert 1 == 2")
    assert "raised" not in result.stdout.str()


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_world_is_closed_after_its_test(suite, mark):
    source = f"""
seen = []

@pytest.mark.{mark}
async def test_passes(world):
    seen.extend(world)

def test_it_was_closed():
    assert all(comm.closed and not comm.aborted for comm in seen)
"""
    suite(source, "-k", "not trio").assert_outcomes(passed=2, deselected=0 if mark == "asyncio" else 1)


# ------------------------------------------------------------------------------------- deadline, transport, parameters


def test_marker_sets_deadline_and_transport(suite):
    source = """
pytestmark = pytest.mark.asyncio

@pytest.mark.ranks(3, timeout=7, transport="c10d")
async def test_both(world):
    assert [comm.timeout for comm in world] == [7] * 3
    assert world[0].transports["collectives"] == "c10d"
    await sums(world, 3)

@pytest.mark.ranks(2, transport={"p2p": "local", "collectives": "c10d"})
async def test_by_family(world):
    assert world[0].transports["p2p"] == "local"
    assert world[0].timeout == 30

@pytest.mark.ranks(n=3, timeout=7)
async def test_names_of_arguments(world):
    assert (len(world), world[0].timeout) == (3, 7)

@pytest.mark.parametrize("world", [1, {"n": 2, "timeout": 5}, {"n": 3, "transport": "c10d"}], indirect=True)
async def test_parameters(world):
    await sums(world, len(world))
    assert (len(world), world[0].timeout) in ((1, 30), (2, 5), (3, 30))

@pytest.mark.parametrize("comm", [1, {"n": 3}], indirect=True)
async def test_parameters_of_each_rank(comm):
    assert comm.size in (1, 3)
    assert (await comm.all_reduce(torch.ones(1))).item() == comm.size
"""
    suite(source).assert_outcomes(passed=8)


def test_parameter_sets_the_ranks_whichever_fixture_is_made_first(suite):
    source = """
pytestmark = pytest.mark.asyncio

@pytest.fixture
def size(world):
    return len(world)

@pytest.mark.parametrize("world", [4], indirect=True)
async def test_parameter_of_world(comm, world, size):
    assert comm.size == len(world) == size == 4

@pytest.mark.parametrize("comm", [4], indirect=True)
async def test_parameter_of_comm(size, comm):
    assert comm.size == size == 4

@pytest.mark.parametrize("comm", [4], indirect=True)
async def test_parameter_of_comm_first(comm, size):
    assert comm.size == size == 4

@pytest.mark.parametrize("comm", [4])
async def test_own_parameter(world, comm):
    assert (len(world), comm) == (2, 4)
"""
    suite(source).assert_outcomes(passed=4)


def test_unknown_transport_in_the_marker_is_an_error(suite):
    source = """
@pytest.mark.asyncio
@pytest.mark.ranks(2, transport="pigeons")
async def test_it(world): ...
"""
    result = suite(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*ArgumentError: transport is 'pigeons', which is not installed*")


# ------------------------------------------------------------------------------------------------------- each rank

EACH = """
import pytest_asyncio
from hypothesis import HealthCheck, given, settings, strategies as st

seen = []

{mark}
@pytest.mark.ranks(3)
@pytest.mark.parametrize("n", [1, 2])
async def test_each(comm, n):
    total = await comm.all_reduce(torch.full((1,), float(comm.rank + n)))
    assert total.item() == 3 + 3 * n
    seen.append(comm.rank)

class TestClass:
    {mark}
    async def test_method(self, comm, world):
        assert world[comm.rank] is comm
        await comm.barrier()

{mark}
@given(n=st.integers(0, 9))
@settings(max_examples=5, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
async def test_hypothesis(comm, n):
    assert await comm.broadcast_object(n, 0) in range(10)

def test_every_rank_has_run():
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
"""


def test_comm_fixture_runs_the_test_on_every_rank(suite):
    suite(EACH.format(mark="@pytest.mark.asyncio"), "-p", "_hypothesis_pytestplugin").assert_outcomes(passed=5)


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_hypothesis_test_may_have_parameters(suite, mark):
    source = f"""
from hypothesis import HealthCheck, given, settings, strategies as st

@pytest.mark.{mark}
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(n=st.integers(1, 5))
@settings(max_examples=3, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
async def test_it(comm, dtype, n):
    assert (await comm.all_reduce(torch.ones(n, dtype=dtype))).tolist() == [2.0] * n
"""
    result = suite(source, "-p", "_hypothesis_pytestplugin", "-k", "not trio")
    result.assert_outcomes(passed=2, deselected=0 if mark == "asyncio" else 2)


AGAIN = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, nextitem=nextitem, log=False)
    item._initrequest()
    runtestprotocol(item, nextitem=nextitem)
    return True
"""


def test_plugin_may_run_a_test_again(suite, pytester):
    """Some plug-ins repeat failed tests. The second run also reports what it leaves behind."""
    pytester.makeconftest(AGAIN)
    source = """
pytestmark = pytest.mark.asyncio
tries = []

async def test_comm(comm):
    await comm.barrier()
    tries.append(comm.rank)
    assert len(tries) > comm.size

class TestClass:
    async def test_method(self, comm):
        await comm.barrier()

async def test_left(world):
    tries.append(world)
    assert world is not tries[-2]
    assert isinstance(tries[-2], list), "the first run"
    world[0].send(torch.ones(1), 1).forget()
"""
    result = suite(source)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines("*rank 0 is in send(dst=1, tag=0), which nothing has matched*")


def test_comm_fixture_runs_the_test_on_every_rank_under_anyio(suite):
    source = """
@pytest.mark.anyio
@pytest.mark.ranks(3)
async def test_each(comm):
    assert (await comm.all_reduce(torch.ones(1))).item() == 3
"""
    suite(source).assert_outcomes(passed=2)


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_failure_names_its_rank(suite, mark):
    source = f"""
@pytest.mark.{mark}
@pytest.mark.ranks(3)
async def test_fails(comm):
    await comm.barrier()
    assert comm.rank != 1, "the second"
    await comm.barrier()
"""
    result = suite(source, "-k", "not trio")
    result.assert_outcomes(failed=1, deselected=0 if mark == "asyncio" else 1)
    result.stdout.fnmatch_lines(["*AssertionError: the second", "*it was raised on rank 1 of 3"])
    assert "pytest_plugin.py" not in result.stdout.str()
    assert "ExceptionGroup" not in result.stdout.str()


def test_suite_may_define_its_own_comm_fixture(suite):
    source = """
@pytest.fixture
def comm():
    return 42

def test_it(comm):
    assert comm == 42

@pytest.mark.asyncio
async def test_async(comm):
    assert comm == 42
"""
    suite(source).assert_outcomes(passed=2)


def test_user_fixture_that_depends_on_comm_is_an_error(suite):
    source = """
@pytest.fixture
def built(comm):
    return comm

@pytest.mark.asyncio
async def test_it(built): ...
"""
    result = suite(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        "*::test_it: the fixture 'comm' of aiocomms is a communicator of each rank*takes 'world'*"
    )


# ------------------------------------------------------------------------------------------------- what is left behind

LEFT = """
{mark}
@pytest.mark.ranks(3)
async def test_left(world):
    await sums(world, 3)
    {left}

{mark}
async def test_nothing_is_left(world):
    await sums(world, 2)
    stream, other = await asyncio.gather(world[0].open_stream(1), world[1].open_stream(0))
    world[0].send(torch.ones(1), 1).forget()
    await world[1].recv(torch.ones(1), 0)
"""
LEFTOVERS = {
    "world[2].send(torch.ones(1), 1, tag=7)": "rank 2 is in send(dst=1, tag=7), which nothing has matched",
    "world[1].recv(torch.ones(1), 0)": "rank 1 is in recv(src=0, tag=0), which nothing has matched",
    "world[1].recv_object(0)": "rank 1 is in recv_object(src=0, tag=0), which nothing has matched",
    "world[0].barrier(), world[2].barrier()": (
        "barrier: ranks 0, 2 are in it (collective 2), rank 1 has finished collective 1 (all_reduce #0) and is in no "
        "operation"
    ),
}


@pytest.mark.parametrize("left", LEFTOVERS)
@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_work_or_task_left_behind_is_an_error(suite, mark, left):
    source = LEFT.format(mark=f"@pytest.mark.{mark}", left=left)
    # The option -rN omits the summary, which repeats the whole message if the variable CI is set.
    result = suite(source, "-k", "not trio", "-W", "ignore", "-rN")
    result.assert_outcomes(passed=2, errors=1, deselected=0 if mark == "asyncio" else 2)
    result.stdout.fnmatch_lines(["the test has ended, and these operations have not:", f"  {LEFTOVERS[left]}*"])
    assert result.stdout.str().count(LEFTOVERS[left].split(",")[0]) == 1


def test_work_left_behind_is_an_error_on_every_loop(suite):
    source = LEFT.format(mark="@pytest.mark.anyio", left="world[2].send(torch.ones(1), 1, tag=7)")
    result = suite(source, "-k", "trio and test_left", "-W", "ignore")
    result.assert_outcomes(passed=1, errors=1, deselected=3)
    result.stdout.fnmatch_lines("*rank 2 is in send(dst=1, tag=7), which nothing has matched*")


def test_failing_test_reports_no_leftovers(suite):
    result = suite(LEFT.format(mark="@pytest.mark.asyncio", left="world[2].send(torch.ones(1), 1); assert 1 == 2"))
    result.assert_outcomes(passed=1, failed=1)
    assert "the test has ended" not in result.stdout.str()


@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "pytest.exit('enough')"])
def test_interrupted_test_reports_no_leftovers(suite, how):
    """The session ends as without the plug-in, and reports the tests that failed before."""
    source = f"""
def test_fails():
    assert not "an earlier failure"

@pytest.mark.asyncio
async def test_interrupted(world):
    world[0].barrier().forget()
    {how}
"""
    result = suite(source)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("*an earlier failure*")
    assert "the test has ended" not in result.stdout.str() + result.stderr.str()


FORGETS = """
@pytest.mark.asyncio
async def test_forgets(world):
    world[0].send(torch.ones(1), 1)  # here
    await world[1].recv(torch.ones(1), 0)
"""


@pytest.mark.parametrize("debug", [None, "0", "1"])
def test_forgotten_await_is_a_warning_at_its_line_unless_debugging_is_off(suite, monkeypatch, debug):
    monkeypatch.delenv("AIOCOMMS_DEBUG", raising=False)
    if debug is not None:
        monkeypatch.setenv("AIOCOMMS_DEBUG", debug)
    result = suite(FORGETS, "-Wdefault")
    result.assert_outcomes(passed=1, warnings=0 if debug == "0" else 1)
    if debug != "0":
        line = next(n for n, text in enumerate((HEAD + FORGETS).strip().splitlines(), 1) if text.endswith("# here"))
        assert re.search(rf"\.py:{line}: RuntimeWarning: send on 'world' \(rank 0\) was never", result.stdout.str())
    assert os.environ.get("AIOCOMMS_DEBUG") == debug


KEEPS = """
kept = []

@pytest.mark.asyncio
@pytest.mark.parametrize("fails", [False, True])
async def test_keeps(world, fails):
    async def forgets():
        work = world[0].send(torch.ones(1), 1)
        await world[1].recv(torch.ones(1), 0)
        raise ValueError("wrong")

    kept.extend(await asyncio.gather(forgets(), return_exceptions=True))
    assert not fails
    assert len(kept) == 1

def test_drops():
    kept.clear()
    gc.collect()
"""


def test_forgotten_await_is_a_warning_of_its_own_test_although_an_exception_refers_to_it(suite):
    result = suite(KEEPS, "-Wdefault")
    result.assert_outcomes(passed=2, failed=1, warnings=1)
    result.stdout.fnmatch_lines(["*::test_keeps[[]False[]]", "*RuntimeWarning: send on 'world' (rank 0) was never *"])


# -------------------------------------------------------------------------------------------------------- tracebacks


def test_traceback_shows_only_frames_of_the_program(suite):
    source = """
from aiocomms.errors import CommAbortedError

async def below(comm):
    return await comm.recv(torch.ones(1), 1)

@pytest.mark.asyncio
async def test_awaits(world):
    world[1].abort("enough")
    await below(world[0])

@pytest.mark.asyncio
async def test_calls(world):
    world[0].send("no tensor", 1)
"""
    result = suite(source, "--tb=long")
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert "return await comm.recv(torch.ones(1), 1)" in text
    assert 'world[0].send("no tensor", 1)' in text
    assert "work.py" not in text
    assert "communicator.py" not in text
    assert "communicator.py" in suite(source, "--full-trace").stdout.str()


MARKERS = (
    *("", "0", "-1", "True", "2.0", "'2'", "[2]", "2, 3", "n='2'", "2, n=3", "None"),
    *("2, timeout=0", "2, timeout='5'", "2, timeout=True", "2, timeout=1e+30", "2, transport=3", "2, size=3"),
)
MISTAKES = {
    "def {name}(world): ...": "the test is no coroutine function: write 'async def'",
    "async def {name}(world): ...": "nothing runs the test in one: mark it with pytest.mark.anyio, or install",
    **{
        f"@pytest.mark.asyncio\n@pytest.mark.ranks({given})\nasync def {{name}}(world): ...": (
            f"got the marker ranks({given}), wanted the number of ranks: ranks(4)"
        )
        for given in MARKERS
    },
    **{
        f"@pytest.mark.asyncio\n@pytest.mark.parametrize('world', [{given}], indirect=True)\n"
        "async def {name}(world): ...": f"got the parameter {given.format()}, wanted the number of ranks: ranks(4)"
        for given in ("0", "'2'", "{{'timeout': 3}}", "{{'n': 2, 'size': 3}}")
    },
}


def test_misuse_of_the_world_fixture_is_reported_in_one_line(suite):
    source = "\n".join(test.format(name=f"test_{i}") for i, test in enumerate(MISTAKES))
    result = suite(source, "-p", "no:warnings")
    result.assert_outcomes(errors=len(MISTAKES))
    for i, message in enumerate(MISTAKES.values()):
        pattern = rf"::test_{i}(\[\w+\])?: the fixture 'world' of aiocomms "
        line = next(line for line in result.outlines if re.search(pattern, line))
        assert message in line
    assert "Traceback" not in result.stdout.str()


def test_pytest_lists_the_marker_and_the_fixtures(suite):
    marker = (
        "@pytest.mark.ranks(n, timeout=30, transport=None): how many ranks the fixtures 'world' and 'comm' have, 2*"
    )
    suite("def test_it(): ...", "--markers").stdout.fnmatch_lines(marker)
    fixtures = suite("def test_it(): ...", "--fixtures").stdout
    fixtures.fnmatch_lines_random(["comm -- *pytest_plugin.py*", "world -- *pytest_plugin.py*"])
    assert "_aiocomms" not in fixtures.str()


def test_suite_may_define_its_own_world_fixture(suite):
    source = """
@pytest.fixture
def world():
    return 42

def test_it(world):
    assert world == 42
"""
    suite(source).assert_outcomes(passed=1)


@pytest.mark.real
def test_plugin_imports_nothing_in_other_suites(pytester):
    pytester.makepyfile(
        """
        import sys

        def test_it():
            assert not {"asyncio", "anyio", "trio", "torch", "msgspec", "pytest_asyncio"} & set(sys.modules)
            assert not {"aiocomms.testing", "aiocomms.ops", "aiocomms.communicator.communicator"} & set(sys.modules)
        """
    )
    run = [sys.executable, "-m", "pytest", "-p", "no:anyio", "-p", "no:asyncio", "-p", "no:hypothesispytest", "-q"]
    result = subprocess.run(
        [*run, "-p", "no:cacheprovider"], capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
