"""The options of the suite. Imported when the suite is run, and by no other pytest run."""

from __future__ import annotations

import importlib.util
import secrets

import pytest

LOOPS = ("asyncio", "uvloop", "trio")

SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("aiocomms conformance")
    group.addoption(
        "--transport", action="append", metavar="NAME",
        help="what is tested: a name, or FAMILY=NAME,FAMILY=NAME; may be repeated; default: all available",
    )  # fmt: skip
    group.addoption("--processes", action="store_true", help="run each rank in a process, where one would do too")
    group.addoption("--ranks", metavar="N,N", help="only on so many ranks, such as 1,4; default: all the check names")
    group.addoption("--loops", metavar="NAME,NAME", help=f"only on these loops; default: {','.join(LOOPS)}")
    group.addoption("--device", default="cpu", help="the device of all tensors; default: cpu")
    group.addoption("--deadline", type=float, default=30.0, help="seconds that a check may take; default: 30")
    group.addoption("--seed", type=int, help="seed of the random data; default: a new one")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed."""
    given = config.getoption("--seed")
    config.stash[SEED] = secrets.randbits(32) if given is None else given


def pytest_report_header(config: pytest.Config) -> str:
    """Say which data is used."""
    return f"aiocomms conformance: --seed={config.stash[SEED]}"


def loops(config: pytest.Config) -> list[str]:
    """The loops to run on: those asked for, or all that are installed."""
    given = config.getoption("--loops")
    if given is None:
        return [loop for loop in LOOPS if importlib.util.find_spec(loop) is not None]
    chosen: list[str] = given.split(",")
    if not set(chosen) <= set(LOOPS):
        raise pytest.UsageError(f"--loops is {given!r}, wanted some of {', '.join(LOOPS)}")
    return chosen


def sizes(config: pytest.Config) -> set[int] | None:
    """The numbers of ranks to run on; None: whatever the checks name."""
    given = config.getoption("--ranks")
    if given is None:
        return None
    try:
        return {int(number) for number in given.split(",")}
    except ValueError:
        raise pytest.UsageError(f"--ranks is {given!r}, wanted numbers such as 1,4") from None
