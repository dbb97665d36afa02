"""The command-line options of the suite. Only a pytest run of the suite imports this module."""

from __future__ import annotations

import importlib.util
import secrets
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from aiocomms.testing.conformance.case import Place
    from aiocomms.testing.conformance.matrix import Marks, Subject

LOOPS = ("asyncio", "uvloop", "trio")

SEED = pytest.StashKey[int]()

MARKERS = (
    "fault(number, ...): cases of aiocomms' fault catalogue that a check shows",
    "loops: the check exercises what differs between event loops, and runs on each; other checks run on the first",
    "core: the core decides the check before it asks a transport; it runs on the first one, and on each with shortcuts "
    "of its own",
    "memory: the check can end differently where the ranks are processes; it runs again on NAME@processes beside NAME",
    "clock: the check waits for a real clock, such as a deadline that passes",
    "network: the check opens endpoints, which are reached by the network whatever the transport",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("aiocomms conformance")
    group.addoption(
        "--transport", action="append", metavar="NAME[@processes]",
        help="what is tested: a name, or FAMILY=NAME,FAMILY=NAME; with @processes, each rank is a process where one "
        "would do for all; may be repeated; default: all available",
    )  # fmt: skip
    group.addoption(
        "--full", action="store_true",
        help="run every check on every loop, every transport and more numbers of ranks. By default a check runs on the "
        "first loop if it exercises nothing of the loop; on the first transport if the core alone decides it; on "
        "NAME@processes beside NAME if processes can change its outcome",
    )  # fmt: skip
    group.addoption("--ranks", metavar="N,N", help="only on so many ranks, such as 1,4; default: all the check names")
    group.addoption("--loops", metavar="NAME,NAME", help=f"only on these loops; default: {','.join(LOOPS)}")
    group.addoption(
        "--device", default="cpu", metavar="DEVICE",
        help="where the communicators and their tensors are, such as cuda or cuda:1; default: cpu",
    )  # fmt: skip
    group.addoption("--deadline", type=float, default=30.0, help="seconds that a check may take; default: 30")
    group.addoption("--seed", type=int, help="seed of the random data; default: a new one")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Describe the markers, check the options, and choose the seed."""
    # Without this filter pytest-asyncio, which the suite does not use, warns about an unset option.
    warnings.filterwarnings("ignore", 'The configuration option "asyncio_default_fixture_loop_scope" is unset')
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    given = config.getoption("--seed")
    config.stash[SEED] = secrets.randbits(32) if given is None else given
    _loops(config)
    _sizes(config)
    _transports(config)


def pytest_report_header(config: pytest.Config) -> str:
    """Show the seed of the random data."""
    return f"aiocomms conformance: --seed={config.stash[SEED]}"


def places(config: pytest.Config, marks: Marks) -> list[Place]:
    """Return the places (transport, event loop, number of ranks) in which a check with these marks runs."""
    from aiocomms.testing.conformance.case import Place
    from aiocomms.testing.conformance.matrix import cells

    device, deadline = str(_device(config)), config.getoption("--deadline")
    chosen = cells(marks, _transports(config), _loops(config), _sizes(config), config.getoption("--full"))
    return [Place(of.name, of.transport, device, loop, size, of.processes, deadline) for of, loop, size in chosen]


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
    """Return the device of all tensors.

    If the device does not work, raise an error. Without this error, all checks would fail with less clear errors.
    """
    import torch

    given: str = config.getoption("--device")
    try:
        device = torch.device(given)
        torch.zeros(1, device=device).cpu()
    except Exception as error:  # torch raises many types: RuntimeError, AssertionError, NotImplementedError
        why = str(error).splitlines()[0]
        raise pytest.UsageError(f"--device {given}: no tensor can be made and read there: {why}") from None
    return device


def _transports(config: pytest.Config) -> list[Subject]:
    """Return the chosen transports, or all that are available."""
    from aiocomms.bootstrap.registry import available

    device = _device(config)
    state = available(device)
    given = config.getoption("--transport") or [name for name, why_not in state.items() if why_not is None]
    if not given:
        raise pytest.UsageError(f"no transport is available for --device {device}: {state}")
    return [subject(text, device, state) for text in given]


def subject(given: str, device: torch.device, state: Mapping[str, str | None]) -> Subject:
    """Find the transport that a value of ``--transport`` names.

    :param state: a dict from the names of the installed transports. A value is the reason why the transport is not
        available; None: the transport is available.
    """
    from aiocomms.bootstrap.registry import find
    from aiocomms.testing.conformance.matrix import PROCESSES, Subject
    from aiocomms.transport import NativeTransport

    text, at, how = given.partition("@")
    if at + how not in ("", PROCESSES):
        raise _wrong(given, f"got {at + how!r} after the name, wanted {PROCESSES!r} or nothing")
    pairs = [part.partition("=") for part in text.split(",")] if "=" in text else [("", "", text)]
    parts = {family: name for family, _, name in pairs}
    for family, equals, name in pairs:
        if len(pairs) > 1 and not equals:
            raise _wrong(given, f"got {family!r}, wanted FAMILY=NAME")
        if (why := state.get(name, "it is not installed")) is not None:
            raise _wrong(name, why)
    found = [cls for name in parts.values() if not isinstance(cls := find(name, device), str)]
    processes = bool(at) or not all(cls.capabilities.in_process for cls in found)
    native = any(issubclass(cls, NativeTransport) for cls in found)
    return Subject("+".join(parts.values()) + at + how, parts if "=" in text else text, processes, native)


def _wrong(given: str, why: str) -> pytest.UsageError:
    return pytest.UsageError(f"--transport {given}: {why}")
