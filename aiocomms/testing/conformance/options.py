"""The command-line options of the suite. Only a pytest run of the suite imports this module."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from aiocomms.testing.conformance.case import Place

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
    group.addoption(
        "--device", default="cpu", metavar="DEVICE",
        help="where the communicators and their tensors are, such as cuda or cuda:1; default: cpu",
    )  # fmt: skip
    group.addoption("--deadline", type=float, default=30.0, help="seconds that a check may take; default: 30")
    group.addoption("--seed", type=int, help="seed of the random data; default: a new one")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker, check the options, and choose the seed."""
    config.addinivalue_line("markers", "fault(number, ...): cases of aiocomms' fault catalogue that a check shows")
    given = config.getoption("--seed")
    config.stash[SEED] = secrets.randbits(32) if given is None else given
    _loops(config)
    _sizes(config)
    _transports(config)


def pytest_report_header(config: pytest.Config) -> str:
    """Show the seed of the random data."""
    return f"aiocomms conformance: --seed={config.stash[SEED]}"


def places(config: pytest.Config, numbers: Iterable[int]) -> list[Place]:
    """Return the places in which a check runs that runs on the given numbers of ranks."""
    from aiocomms.testing.conformance.case import Place

    wanted = _sizes(config)
    device = _device(config)
    return [
        Place(transport, str(device), loop, size, processes, config.getoption("--deadline"))
        for transport, processes in _transports(config)
        for loop in _loops(config)
        for size in numbers
        if wanted is None or size in wanted
    ]


def _loops(config: pytest.Config) -> list[str]:
    given = config.getoption("--loops")
    if given is None:
        return [loop for loop in LOOPS if importlib.util.find_spec(loop) is not None]
    chosen: list[str] = given.split(",")
    if not set(chosen) <= set(LOOPS):
        raise pytest.UsageError(f"--loops is {given!r}, wanted some of {', '.join(LOOPS)}")
    return chosen


def _sizes(config: pytest.Config) -> set[int] | None:
    given = config.getoption("--ranks")
    try:
        return None if given is None else {int(number) for number in given.split(",")}
    except ValueError:
        raise pytest.UsageError(f"--ranks is {given!r}, wanted numbers such as 1,4") from None


def _device(config: pytest.Config) -> torch.device:
    """Return the device of all tensors. It is tried here, as a failure in a check would explain less."""
    import torch

    given: str = config.getoption("--device")
    try:
        device = torch.device(given)
        torch.zeros(1, device=device).cpu()
    except Exception as error:  # torch raises many types: RuntimeError, AssertionError, NotImplementedError
        why = str(error).splitlines()[0]
        raise pytest.UsageError(f"--device {given}: no tensor can be made and read there: {why}") from None
    return device


def _transports(config: pytest.Config) -> list[tuple[str | dict[str, str], bool]]:
    """Return the chosen transports, or all that are available, and whether the ranks of each are processes."""
    from aiocomms.bootstrap.registry import available, find

    device = _device(config)
    state = available(device)
    given = config.getoption("--transport") or [name for name, why_not in state.items() if why_not is None]
    if not given:
        raise pytest.UsageError(f"no transport is available for --device {device}: {state}")
    chosen: list[tuple[str | dict[str, str], bool]] = []
    for text in given:
        parts = dict(part.split("=", 1) for part in text.split(",")) if "=" in text else {"": text}
        for name in parts.values():
            if state.get(name, "it is not installed") is not None:
                raise pytest.UsageError(f"--transport {name}: {state.get(name, 'it is not installed')}")
        found = [find(name, device) for name in parts.values()]
        tasks = all(not isinstance(cls, str) and cls.capabilities.in_process for cls in found)
        chosen.append((parts if "=" in text else text, config.getoption("--processes") or not tasks))
    return chosen
