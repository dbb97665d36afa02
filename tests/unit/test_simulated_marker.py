"""The marker ``simulated`` of the pytest plug-in, in test suites such as users write."""

from __future__ import annotations

import importlib
import re
import shlex

import pytest

pytestmark = [pytest.mark.deterministic, pytest.mark.slow, pytest.mark.usefixtures("modules_stay")]

# Pytester removes a run's imports from sys.modules. Import them here once, for torch cannot be imported twice.
for _module in (
    *("aiocomms.functional", "aiocomms.testing.simulation", "aiocomms.communicator.formation", "aiocomms_net"),
    *("pytest_asyncio", "trio", "uvloop"),
):
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
import asyncio, pytest, torch
import aiocomms
from aiocomms.testing import Faults, here
"""


@pytest.fixture
def suite(pytester: pytest.Pytester):
    """Write a test suite, run it, and return the result."""

    def run(source: str, *args: str, mode: str = "strict"):
        pytester.makeini(INI.format(mode=mode))
        pytester.makepyfile(HEAD + source)
        return pytester.runpytest_inprocess(*args)

    return run


PASSING = """
@pytest.mark.simulated
async def test_two(comm):
    assert (await comm.all_reduce(torch.ones(1))).item() == 2

@pytest.mark.simulated(ranks=3, seeds=[4, 7], latency=(1, 2), longest=100)
async def test_three(comm, tmp_path):
    assert (await comm.all_reduce(torch.ones(1))).item() == 3
    assert tmp_path.is_dir() and here().world.time > 1

@pytest.mark.simulated(seeds=3)
class TestClass:
    @pytest.mark.parametrize("n", [5, 6])
    async def test_method(self, comm, n):
        await asyncio.sleep(3600)
        assert comm.size == 2 and n > 4

@pytest.mark.simulated(ranks=3, seeds=10, faults=Faults(deaths=1))
async def test_program_of_each_rank():
    try:
        async with aiocomms.new_comm(timeout=10) as comm:
            for _ in range(10):
                await comm.barrier()
    except aiocomms.CommError:
        pass

@pytest.mark.simulated
async def test_skipped():
    pytest.skip("not now")
"""


@pytest.mark.parametrize("args", [(), ("-p", "no:asyncio"), ("-p", "no:anyio", "-p", "no:asyncio")], ids=str)
def test_simulated_tests_need_no_plugin_for_loops(suite, args):
    suite(PASSING, *args, "-o", "filterwarnings=").assert_outcomes(passed=5, skipped=1)


def test_simulated_tests_pass_beside_pytest_asyncio_in_auto_mode(suite):
    suite(PASSING, mode="auto").assert_outcomes(passed=5, skipped=1)


FAILING = """
@pytest.mark.simulated(ranks=3, seeds=50, faults=Faults(pauses=1, cuts=1, slow=1, within=0.02))
@pytest.mark.parametrize("name", ["a b"])
async def test_it(comm, name):
    for _ in range(20):
        await comm.barrier()  # here
"""


def test_failure_shows_the_error_its_notes_and_one_command(suite):
    result = suite(FAILING)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "PeerDiedError: barrier #" in text
    assert re.search(r"E +it was raised on rank \d of 3 ranks, after ", text)
    assert len(re.findall(r"E +fault: ", text)) == 1
    assert "# here" in text
    assert not re.search(r"aiocomms/\S+\.py:\d+: ", text)  # Frames of aiocomms are hidden.


def test_command_of_a_failure_repeats_it(suite, pytester):
    text = suite(FAILING).stdout.str()
    (command,) = re.findall(r"E +repeat it: (pytest .*)", text)
    again = pytester.runpytest_inprocess(*shlex.split(command)[1:])
    again.assert_outcomes(failed=1)
    errors = [[line for line in told.splitlines() if line.startswith("E ")] for told in (text, again.stdout.str())]
    assert errors[0] == errors[1]


def test_seed_of_the_command_line_is_the_only_one(suite):
    source = """
@pytest.mark.simulated
async def test_it():
    import random
    assert False, f"ran {random.random()}"
"""
    told = [
        re.findall(r"E .*ran (\S+)", suite(source, *args).stdout.str())[0] for args in ((), ("--simulated-seed=7",))
    ]
    assert told[0] != told[1]


def test_hypothesis_searches_simulated_tests(suite):
    source = """
from hypothesis import given, settings, strategies as st

@pytest.mark.simulated(seeds=2)
@settings(max_examples=30, deadline=None, database=None)
@given(n=st.integers(1, 50))
async def test_it(n):
    await asyncio.sleep(3600)
    assert n < 7
"""
    result = suite(source)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "assert 7 < 7" in text
    assert "::test_it --simulated-seed='0'" in text


def test_hypothesis_searches_simulated_tests_with_parameters(suite):
    source = """
from hypothesis import given, settings, strategies as st

@pytest.mark.simulated(seeds=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=2, deadline=None, database=None)
@given(n=st.integers(1, 5))
async def test_it(comm, dtype, n):
    assert (await comm.all_reduce(torch.ones(n, dtype=dtype))).tolist() == [2.0] * n
"""
    suite(source).assert_outcomes(passed=2)


MISTAKES = {
    "ranks=0": "ranks is 0, wanted at least 1 rank as an int",
    "seeds='x'": "seeds is 'x', wanted how many as an int of at least 1, or the seeds",
    "faults=3": "faults is 3, wanted Faults(deaths=1) or the like, or None",
    "latency=3": "latency is 3, wanted the least and the most seconds, above 0",
    "longest=-1": "longest is -1, wanted seconds above 0",
    "size=3": "got an unexpected keyword argument 'size'",
}


def test_wrong_arguments_of_the_marker_are_refused_in_one_sentence(suite):
    tests = [f"@pytest.mark.simulated({given})\nasync def test_{i}(comm): ..." for i, given in enumerate(MISTAKES)]
    result = suite("\n".join(tests))
    result.assert_outcomes(failed=len(MISTAKES) - 1, errors=1)
    for i, message in enumerate(MISTAKES.values()):
        assert re.search(rf"::test_{i}: the marker 'simulated' of aiocomms:? {re.escape(message)}", result.stdout.str())
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize(
    ("seed", "why"),
    [("x", "is 'x', wanted an int, or a text such as *"), ("7/0", "names fault 0, *: pass the same faults= as *")],
)
def test_wrong_seed_of_the_command_line_is_refused_in_one_sentence(suite, seed, why):
    result = suite("@pytest.mark.simulated\nasync def test_it(): ...", f"--simulated-seed={seed}")
    result.stdout.fnmatch_lines(f"*the marker 'simulated' of aiocomms: seed {why}")
    assert "repeat it:" not in result.stdout.str()


def test_synchronous_test_and_world_are_refused(suite):
    source = """
@pytest.mark.simulated
def test_synchronous(): ...

@pytest.mark.simulated
async def test_world(world): ...
"""
    result = suite(source)
    result.assert_outcomes(errors=2)
    text = result.stdout.str()
    assert (
        "::test_synchronous: the marker 'simulated' of aiocomms is for coroutine functions: write 'async def'" in text
    )
    assert "the fixture 'world' of aiocomms is of one process" in text


def test_pytest_lists_the_marker_and_the_option(suite):
    suite("", "--markers").stdout.fnmatch_lines("@pytest.mark.simulated(ranks=2, seeds=100, faults=None, *")
    suite("", "--help").stdout.fnmatch_lines("*--simulated-seed*SEED*")
