"""The registry of installed transports. The registry finds transports by entry point, chooses them and opens them."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

import msgspec
import torch

from aiocomms import ops
from aiocomms.arguments import advice
from aiocomms.cuda import no_gpu
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommError, UnsupportedOperation
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.shielding import shielded
from aiocomms.progress.guard import broken
from aiocomms.transport import Transport

_log = logging.getLogger("aiocomms")
T = TypeVar("T")

GROUP = "aiocomms.transports"
"""The entry-point group, with one entry per transport: ``name = "module:Class"``."""

FAMILIES: dict[ops.Family, frozenset[type[ops.Op]]] = {
    "p2p": ops.P2P,
    "collectives": ops.COLLECTIVES,
    "rma": ops.RMA,
}


class Selection(msgspec.Struct, frozen=True):
    """The transports of a communicator: their names and classes for each family of ops, and the user's hints."""

    names: dict[ops.Family, str]
    classes: dict[ops.Family, type[Transport]]
    options: Mapping[str, Any]

    def advised(self, hints: Mapping[str, Any]) -> Selection:
        """Return the selection with more hints, which take precedence over the existing hints.

        :raises ArgumentError: a hint is wrong.
        """
        return Selection(self.names, self.classes, {**self.options, **advice(hints)})


def entries() -> dict[str, EntryPoint]:
    """Return every installed transport's entry point, by name."""
    return _entries(tuple(sys.path))


@functools.cache
def _entries(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Read the metadata of every installed distribution.

    The result is cached for each path, because the reading blocks for milliseconds.
    """
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@functools.cache
def _load(entry: EntryPoint) -> type[Transport]:
    cls = entry.load()
    if not (isinstance(cls, type) and issubclass(cls, Transport)):
        raise TypeError(f"entry point {entry.value!r} is not a subclass of aiocomms.transport.Transport")
    return cls


def find(name: str, device: torch.device) -> type[Transport] | str:
    """Return a transport's class, or the reason why it is not available for tensors on ``device``."""
    try:
        cls = _load(entries()[name])
        if device.type not in cls.capabilities.devices:
            return f"it carries tensors on {', '.join(sorted(cls.capabilities.devices))}, not on {device.type}"
        return cls.probe(device) or (no_gpu(device) if device.type == "cuda" else None) or cls
    except Exception as error:  # A broken plug-in must not prevent the use of the others.
        return f"{type(error).__name__}: {error}"


def _ask(otherwise: T, method: Callable[..., T], *args: Any) -> T:
    """Call a method of a transport's class.

    If the method raises, return ``otherwise``, so that other transports stay usable.
    """
    try:
        return method(*args)
    except Exception as error:
        _log.error("the transport %s is broken", method.__qualname__, exc_info=error)
        return otherwise


def available(device: torch.device) -> dict[str, str | None]:
    """Return a mapping from the name of each installed transport to None, or to a reason.

    The value is the reason why the transport is unavailable for ``device``, or None if the transport is available.
    """
    found = {name: find(name, device) for name in sorted(entries())}
    return {name: result if isinstance(result, str) else None for name, result in found.items()}


def info(device: torch.device) -> dict[str, Mapping[str, str]]:
    """Return the facts that each available transport for ``device`` reports about itself."""
    found = {name: find(name, device) for name in sorted(entries())}
    return {name: _ask({}, cls.info) for name, cls in found.items() if not isinstance(cls, str)}


def choose(
    transport: str | Mapping[str, str], device: torch.device, size: int, options: Mapping[str, Any]
) -> Selection:
    """Choose the transports of a communicator.

    :param transport: the name of a transport, for all families of ops that it carries; or ``"auto"``; or a mapping of
        families to names.
    :param device: the device of the communicator's tensors.
    :param size: the number of ranks.
    :param options: the user's hints.
    :raises ArgumentTypeError: ``transport`` is neither a name nor a mapping.
    :raises ArgumentError: a name or family is unknown; the message lists the known names.
    :raises UnsupportedOperation: a transport is not available; the message gives the reason for each transport.
    """
    if clock.simulation is not None and isinstance(transport, str | Mapping):
        picks = _all_of(_simulated(device), device)  # A program runs unchanged, with any transports that it names.
    elif isinstance(transport, str):
        picks = _auto(device, size) if transport == "auto" else _all_of(transport, device)
    elif isinstance(transport, Mapping) and transport and all(isinstance(name, str) for name in transport.values()):
        picks = {_family(family): (name, _named(name, device, family)) for family, name in transport.items()}
    else:
        raise ArgumentTypeError(f"transport is {transport!r}, wanted a name, 'auto', or a mapping of families to names")
    return Selection({f: name for f, (name, _) in picks.items()}, {f: cls for f, (_, cls) in picks.items()}, options)


def _simulated(device: torch.device) -> str:
    """Return the name of the transport that runs in simulations.

    :raises UnsupportedOperation: no installed transport runs in simulations.
    """
    for name in entries():
        cls = find(name, device)
        if not isinstance(cls, str) and cls.capabilities.simulated:
            return name
    raise UnsupportedOperation(f"no transport carries tensors on {device} in a simulation")


def choose_adopter(foreign: object, device: torch.device, options: Mapping[str, Any]) -> Selection:
    """Choose the transport that can run over another library's communicator.

    :raises ArgumentTypeError: no transport can adopt the communicator.
    """
    for name in sorted(entries()):
        cls = find(name, device)
        if not isinstance(cls, str) and _ask(False, cls.adopts, foreign):
            names = {family: name for family in FAMILIES if _carries(cls, family)}
            return Selection(names, dict.fromkeys(names, cls), {**options, "adopt": foreign})
    raise ArgumentTypeError(
        f"pg is a {type(foreign).__name__}, which no available transport can adopt\n{_listing(device)}"
    )


def in_process() -> str:
    """Return the name of the preferred transport that can run all ranks as tasks of one process.

    :raises UnsupportedOperation: no installed transport can run all ranks in one process.
    """
    device = torch.device("cpu")
    found = ((name, find(name, device)) for name in entries())
    fit = [
        (_ask(0, cls.preference, device, 1, "p2p"), name)
        for name, cls in found
        if not isinstance(cls, str) and cls.capabilities.in_process
    ]
    if not fit:
        raise UnsupportedOperation(f"no transport runs several ranks in one process\n{_listing(device)}")
    return max(fit)[1]


async def open_transports(
    plan: Selection, open_one: Callable[[type[Transport], ops.Family], Awaitable[Transport]]
) -> dict[ops.Family, Transport]:
    """Open each transport of a plan once.

    If one transport cannot be opened, close the transports that are already open.

    :param open_one: a function that opens a transport. Its arguments are the transport's class and the first family of
        ops that the transport carries.
    :returns: the transports by family.
    :raises CommError: a transport cannot be opened, for example because the system has no more file descriptors.
    """
    opened: dict[type[Transport], Transport] = {}
    try:
        for family, cls in plan.classes.items():
            if cls not in opened:
                opened[cls] = await _open(plan.names[family], open_one(cls, family))
    except BaseException:
        await shielded(lambda: close_transports(opened.values()))
        raise
    return {family: opened[cls] for family, cls in plan.classes.items()}


async def _open(name: str, opening: Awaitable[Transport]) -> Transport:
    try:
        return await opening
    except CommError:
        raise
    except Exception as error:
        raise CommError(f"the transport {name!r} cannot be opened: {type(error).__name__}: {error}") from error


async def close_transports(transports: Iterable[Transport]) -> None:
    """Close all transports, even if the closing of one transport raises or is cancelled.

    A cancellation can come even within a shield of anyio, which does not stop asyncio's ``Task.cancel()``.
    """
    async with AsyncExitStack() as closing:
        for transport in transports:
            closing.push_async_callback(_close, transport)


async def _close(transport: Transport) -> None:
    try:
        await transport.aclose()
    except Exception as error:
        raise broken(transport, "aclose", error) from error


def _auto(device: torch.device, size: int) -> dict[ops.Family, tuple[str, type[Transport]]]:
    found = {name: find(name, device) for name in entries()}
    picks = {}
    for family in FAMILIES:
        fit = [
            (preference, name, cls)
            for name, cls in found.items()
            if not isinstance(cls, str) and _carries(cls, family)
            if (preference := _ask(0, cls.preference, device, size, family)) > 0
        ]
        if fit:
            picks[family] = max(fit, key=lambda item: item[:2])[1:]
    if "p2p" not in picks and "collectives" not in picks:
        raise UnsupportedOperation(
            f"transport is 'auto', and none can serve {size} ranks on {device}\n{_listing(device)}"
        )
    return picks


def _all_of(name: str, device: torch.device) -> dict[ops.Family, tuple[str, type[Transport]]]:
    cls = _named(name, device, None)
    return {family: (name, cls) for family in FAMILIES if _carries(cls, family)}


def _carries(cls: type[Transport], family: ops.Family) -> bool:
    """Return whether a transport's class carries a family of ops, natively or by sends and receives."""
    own = cls.capabilities.ops
    return bool(own & FAMILIES[family]) or (family == "collectives" and ops.Send in own)


def _family(name: str) -> ops.Family:
    if name not in FAMILIES:
        raise ArgumentError(f"transport names the family {name!r}, wanted some of {', '.join(map(repr, FAMILIES))}")
    return name


def _named(name: str, device: torch.device, family: str | None) -> type[Transport]:
    if name not in entries():
        raise ArgumentError(f"transport is {name!r}, which is not installed\n{_listing(device)}")
    cls = find(name, device)
    if isinstance(cls, str):
        raise UnsupportedOperation(f"transport {name!r} is not available: {cls}\n{_listing(device)}")
    if family is not None and not _carries(cls, cast("ops.Family", family)):
        raise ArgumentError(f"transport {name!r} does not carry {family!r}")
    return cls


def _listing(device: torch.device) -> str:
    rows = (f"  {name}: {'available' if why is None else why}" for name, why in available(device).items())
    return "\n".join((f"installed transports (for device {device}):", *rows))
