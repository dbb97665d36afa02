"""The start of an engine: each rank finds the ranks of its host, opens its engine, and connects to the other ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import anyio
import msgspec

from aiocomms.cuda import Cuda
from aiocomms.errors import (
    ArgumentError,
    AuthError,
    CommError,
    CommTimeoutError,
    ProtocolError,
    UnsupportedOperation,
)
from aiocomms.lowlevel import (
    ControlCodec,
    Gate,
    check_exposed,
    closed_on_exec,
    host_id,
    listen_at,
    mac,
    reachable_address,
    run_in_thread,
    same_user,
    tune,
)
from aiocomms.transport import Rendezvous
from aiocomms_ucx import speeds, wire
from aiocomms_ucx._engine import NO_DEVICE, Engine, UcxError
from aiocomms_ucx.circumstances import circumstances, hindrances, usable_cores
from aiocomms_ucx.shared_engine import SharedEngine

_NONCE: Final = 32
_BACKLOG: Final = 1024
_SHARE: Final = 0.9
"""The fraction of the remaining time in which the ranks must connect.

The rest of the time is for the report about ranks that did not connect.
"""
_CONNECT: Final = 5.0
"""The time limit, in seconds, of one attempt to connect to another host."""


class EngineHello(msgspec.Struct, array_like=True):
    """The first record that each rank sends to the other ranks."""

    byte_order: str
    host: str
    name: str
    pid: int
    cores: list[int]
    path: str
    """The path of the abstract unix socket to which ranks of this host connect."""
    nonce: bytes
    """A nonce that makes each engine's key unique."""

    def __repr__(self) -> str:  # In a job without a token, the nonces reveal the key.
        return f"<Hello of process {self.pid} on {self.name}>"


class EnginePlace(msgspec.Struct, array_like=True):
    """The record that each rank sends to the other ranks when it knows the hosts of all ranks."""

    address: bytes
    """The address of the rank's UCX worker."""
    endpoint: tuple[str, int] | None
    """The address to which ranks of other hosts connect; None if all ranks are on one host."""
    trouble: str = ""
    """The reason why this rank cannot work with the other ranks; empty if there is none."""
    hindrances: list[str] = []
    """The circumstances of this rank that may cause a failure on any rank."""
    in_place: bool = False
    """True if ranks of this host read large parts directly from other ranks' tensors.

    The ranks use only the value that the first rank of their host has sent.
    """
    other: int = -1
    """The number that this rank's engine gives to the engine of the other rank, if an endpoint connects the two ranks.

    Without an endpoint, the value is -1, because the number of each engine is then the engine's rank.
    """


HELLOS: Final = ControlCodec[EngineHello](EngineHello, "the first record")
PLACES: Final = ControlCodec[EnginePlace](EnginePlace, "the place")


class Ranks(msgspec.Struct, frozen=True):
    """The ranks of a communicator, in rank order."""

    peers: list[int]
    """The number of each rank in the engine."""
    hosts: list[str]
    pids: list[int]
    """The process id of each rank."""
    in_place: bool
    """True if the ranks of this host read large parts of collectives directly from other ranks' tensors.

    The value is the same on all ranks of this host.
    """

    def some(self, ranks: Sequence[int]) -> Ranks:
        """Return a :class:`Ranks` with some of the ranks, in the given order."""
        return Ranks(
            [self.peers[rank] for rank in ranks],
            [self.hosts[rank] for rank in ranks],
            [self.pids[rank] for rank in ranks],
            self.in_place,
        )


@contextlib.asynccontextmanager
async def shared_engine(
    rendezvous: Rendezvous, cuda: Cuda | None = None, memory: int = NO_DEVICE
) -> AsyncIterator[tuple[SharedEngine, Ranks]]:
    """Connect to the other ranks with a new engine or an endpoint's engine. All ranks must call this function.

    In the body of the ``async with`` statement, the caller adds a communicator to the engine.

    :param cuda: the GPU whose memory the engine sends and receives; None for CPU memory.
    :param memory: the number of UCX's memory type for the GPU's memory.
    :raises CommTimeoutError: a rank is missing or did not connect.
    :raises AuthError: a rank does not have this job's token.
    """
    rank, size = rendezvous.rank, rendezvous.size
    mine = await run_in_thread(_introduction, anyhow=True)
    async with contextlib.AsyncExitStack() as forming:
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(_listen_here(mine.path))]
            hellos, key = await _hellos(rendezvous, mine)
            if outside := await _outside(rendezvous, mine, hellos):
                listeners.append(stack.enter_context(listen_at(outside, _BACKLOG)))
            endpoint = listeners[-1].getsockname()[:2] if outside else None
            shared = await _engine_of(rendezvous, outside, cuda, memory)
            if isinstance(shared, SharedEngine):
                await forming.enter_async_context(_forming(shared))
            place = await rendezvous.run("opening UCX", lambda: _place(rank, hellos, shared))
            place.endpoint = endpoint
            if isinstance(shared, SharedEngine) and rendezvous.home is not None:
                place.other = next(shared.numbers)
            places = await _places(rendezvous, place)
            if isinstance(shared, CommError):
                raise shared
            blame(rank, [place.trouble for place in places], [place.hindrances for place in places])
            gate = Gate(rank, key, _connectors(rank, hellos, places), size)
            connections = await _connected(rendezvous, gate, listeners)
        yield shared, _introduce(shared, rank, hellos, places, connections, _cookies(key, rank, size))


async def _connected(
    rendezvous: Rendezvous, gate: Gate, listeners: Sequence[socket.socket]
) -> Mapping[int, socket.socket]:
    """Connect to the other ranks. After a cancellation, the connecting thread ends, and closes its connections."""

    def connect() -> dict[int, socket.socket]:
        return gate.run(listeners, _SHARE * rendezvous.left())

    try:
        return cast("dict[int, socket.socket]", await rendezvous.run("connecting to the other ranks", connect))
    except BaseException:
        gate.give_up()
        raise


async def _outside(rendezvous: Rendezvous, mine: EngineHello, hellos: Sequence[EngineHello]) -> str | None:
    """Return the address at which ranks of other hosts reach this rank; None if all ranks are on one host."""
    far = [hello.name for hello in hellos if hello.host != mine.host]
    names = *rendezvous.hosts, hellos[0].name, *far
    return await run_in_thread(functools.partial(reachable_address, names, rendezvous.store)) if far else None


@contextlib.asynccontextmanager
async def _forming(shared: SharedEngine) -> AsyncIterator[None]:
    """Keep an engine open while a new communicator forms on it, even if all other communicators on the engine end."""
    shared.forming += 1
    try:
        yield
    finally:
        shared.forming -= 1
        await shared.settle()


def _introduce(
    shared: SharedEngine, rank: int, hellos: Sequence[EngineHello], places: Sequence[EnginePlace],
    connections: Mapping[int, socket.socket], cookies: Sequence[tuple[int, int]],
) -> Ranks:  # fmt: skip
    """Register the other ranks' engines in this rank's engine."""
    mine, hosts = hellos[rank], [hello.host for hello in hellos]
    here = [hello for hello in hellos if hello.host == mine.host]
    cores = len({core for hello in here for core in hello.cores})
    other = places[rank].other
    peers = [peer if other < 0 else shared.number if peer == rank else other for peer in range(len(hellos))]
    for peer, (hello, place) in enumerate(zip(hellos, places, strict=True)):
        if peer == rank:
            continue
        addresses = [mine.path, hello.path, *(end for end in (places[rank].endpoint, place.endpoint) if end)]
        fd = tune(connections[peer]).detach()
        pid = hello.pid if hello in here else 0
        name = rank if other < 0 else place.other
        try:
            shared.introduce(peers[peer], addresses, place.address, fd, pid, cookies[peer], name, cores)
        except RuntimeError as error:
            raise CommError(f"UCX cannot take rank {peer} as a peer: {error}{circumstances()}") from error
    in_place = len(here) > cores or places[hosts.index(mine.host)].in_place
    return Ranks(peers, hosts, [hello.pid for hello in hellos], in_place)


def blame(rank: int, troubles: Sequence[str], why: Sequence[Sequence[str]]) -> None:
    """Raise the same error on all ranks if any rank reports a problem.

    :param why: for each rank, the circumstances that may have caused the problem.
    :raises CommError: a rank reports a problem. The error describes the problem of the first such rank.
    """
    for peer, trouble in enumerate(troubles):
        if trouble:
            reasons = [f"rank {other} has {', '.join(of)}" for other, of in enumerate(why) if of]
            raise CommError("; ".join((trouble, *reasons)), peer=None if peer == rank else peer)


def _closed(rank: int, hellos: Sequence[EngineHello]) -> str:
    """Return an error text if this process has no permission to open the memory of a rank of this host.

    Without this permission, UCX might crash.
    """
    for peer, hello in enumerate(hellos):
        if hello.host == hellos[rank].host and hello.pid != os.getpid():
            try:
                # The kernel permits this only to a process that may open the other's descriptors.
                Path(f"/proc/{hello.pid}/exe").readlink()
            except PermissionError as error:
                return f"rank {rank} may not open the shared memory of rank {peer}: {error}"
            except OSError:
                pass  # The process has ended, and its connection reports that.
    return ""


class _Kept:
    """The engine that all communicators of an endpoint share."""

    def __init__(self) -> None:
        self.opening = anyio.Lock()
        self.engine: Callable[[], SharedEngine | None] = lambda: None


async def _engine_of(
    rendezvous: Rendezvous, outside: str | None, cuda: Cuda | None, memory: int
) -> SharedEngine | CommError:
    """Open an engine, or return the endpoint's engine.

    If the opening fails, return the error, because this rank must report the error to the other ranks.
    """

    async def opened(number: int) -> SharedEngine:
        rank = rendezvous.rank
        engine = await rendezvous.run("opening UCX", lambda: _started(rank, number, outside, cuda, memory))
        return SharedEngine(engine, cuda)

    try:
        if rendezvous.home is None:
            return await opened(rendezvous.rank)
        kept: _Kept = rendezvous.home.setdefault((__name__, outside, rendezvous.device), _Kept())
        async with kept.opening:
            found = kept.engine()
            if found is None or not found.lasts:
                found = await opened(0)
                kept.engine = weakref.ref(found)
            return found
    except CommTimeoutError:
        raise
    except CommError as error:
        return error


def _started(rank: int, number: int, outside: str | None, cuda: Cuda | None, memory: int) -> Engine:
    try:
        engine = _engine(number, outside, cuda, memory)
        engine.start()
    except UcxError as error:
        raise CommError(f"rank {rank} cannot open UCX: {error}{circumstances()}") from error
    except RuntimeError as error:
        raise CommError(f"rank {rank} cannot start the engine: {error}{circumstances()}") from error
    return engine


def _place(rank: int, hellos: Sequence[EngineHello], shared: SharedEngine | CommError) -> EnginePlace:
    """Return this rank's record for the other ranks. The record describes the engine, or why there is no engine."""
    if isinstance(shared, CommError):
        address, text = b"", shared.message
    else:
        address, text = shared.engine.address(), _closed(rank, hellos)
    return EnginePlace(address, None, text, hindrances(), _reads_in_place(rank, hellos))


def _reads_in_place(rank: int, hellos: Sequence[EngineHello]) -> bool:
    """Return whether ranks of this host should read large parts directly from other ranks' tensors.

    Only the first rank of the host decides this. On the host's other ranks the result is False.
    """
    here = [peer for peer, hello in enumerate(hellos) if hello.host == hellos[rank].host]
    if here[0] != rank or len(here) == 1:
        return False
    found = speeds.find().speeds
    return found is not None and found.reads_in_place


def _introduction() -> EngineHello:
    host = f"{host_id('net', 'pid')}/{os.getuid()}"
    path, nonce = f"\0aiocomms-{secrets.token_hex(16)}", secrets.token_bytes(_NONCE)
    return EngineHello(sys.byteorder, host, socket.gethostname(), os.getpid(), usable_cores(), path, nonce)


def _engine(number: int, outside: str | None, cuda: Cuda | None, memory: int) -> Engine:
    if cuda is None:
        with closed_on_exec():
            return Engine(number, _options(outside, gpu=False))
    cuda.activate()
    try:
        with closed_on_exec():
            return Engine(number, _options(outside, gpu=True), memory)
    except UcxError as error:
        tls = os.environ.get("UCX_TLS")
        why = (
            "install libucx-cu12 or libucx-cu13, whichever CUDA torch is built for; the driver must be as new"
            if tls is None
            else f"UCX_TLS={tls} may leave them out: unset it, or add cuda"
        )
        raise UnsupportedOperation(
            f"UCX cannot reach CUDA memory ({error}), for which it needs its transports cuda_copy and cuda_ipc; {why}"
        ) from error


def _options(outside: str | None, *, gpu: bool) -> list[tuple[str, str]]:
    """Return UCX's settings. The user's environment variables have precedence.

    For an engine without GPU memory, UCX does not search for GPUs, because the search costs time and memory on each
    GPU. UCX's transport sysv is disabled, because other members of the user's group could read the segments of sysv.

    If all ranks are on one host, the network is disabled, so UCX does not listen. If ``UCX_TLS`` names TCP
    nevertheless, UCX uses only the loopback interface, which other hosts cannot reach.

    If the ranks are on several hosts, UCX listens at the address of each interface. If ``AIOCOMMS_IFACE`` names an
    interface, UCX listens only at the address of this interface.
    """
    without = "sysv" if gpu else "sysv,cuda"
    # UCX 1.21 requires 16 MiB and needs 4. It checks twice, and crashes if other processes take memory in between.
    options = [("POSIX_SHM_MIN_SIZE", "0")]
    if outside is None and _wants_tcp():
        if os.environ.get("UCX_NET_DEVICES", "lo") != "lo":
            check_exposed("UCX_TLS and UCX_NET_DEVICES let other hosts reach UCX, though all ranks are on one")
        return [*options, ("NET_DEVICES", "lo")]
    if outside is None:
        return [*options, ("TLS", f"^{without},tcp")]
    interface = os.environ.get("AIOCOMMS_IFACE")
    devices = [("NET_DEVICES", interface)] if interface else []
    return [*options, ("TLS", f"^{without}"), *devices]


def _wants_tcp() -> bool:
    """Return whether the user's ``UCX_TLS`` includes TCP."""
    text = os.environ.get("UCX_TLS", "^tcp")
    names = {name.strip() for name in text.lstrip("^").split(",")}
    named = any(name.partition(":")[0] in ("tcp", "all") for name in names)
    return named != text.startswith("^")


async def _hellos(rendezvous: Rendezvous, mine: EngineHello) -> tuple[list[EngineHello], bytes]:
    """Return the first records (hellos) of all ranks, and a new key.

    Only processes with the job's token know the key. If the job has no token, any reader of the store can compute the
    key.
    """
    raw_hellos = await rendezvous.exchange("ucx", wire.dialect().head + HELLOS.encode(mine))
    return [_hello(peer, raw) for peer, raw in enumerate(raw_hellos)], mac(rendezvous.secret("ucx"), *raw_hellos)


def _cookies(key: bytes, rank: int, size: int) -> list[tuple[int, int]]:
    """Return two cookies for each peer: one for messages to the peer, and one for messages from the peer."""

    def cookie(src: int, dst: int) -> int:
        return int.from_bytes(mac(key, "messages", src, dst)[:8], "big")

    return [(cookie(rank, peer), cookie(peer, rank)) for peer in range(size)]


async def _places(rendezvous: Rendezvous, mine: EnginePlace) -> list[EnginePlace]:
    raw_places = await rendezvous.exchange("ucx places", PLACES.encode(mine))
    return [PLACES.decode(raw, peer) for peer, raw in enumerate(raw_places)]


def _hello(rank: int, raw: bytes) -> EngineHello:
    hello = HELLOS.decode(wire.dialect().check(raw, f"rank {rank}", rank), rank)
    if hello.byte_order != sys.byteorder:
        raise ProtocolError(f"rank {rank} has byte order {hello.byte_order}, this rank {sys.byteorder}", peer=rank)
    return hello


def _listen_here(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(_BACKLOG)
    return listener


def _connectors(
    rank: int, hellos: Sequence[EngineHello], places: Sequence[EnginePlace]
) -> dict[int, Callable[[], socket.socket]]:
    """Return, for each lower rank, a function that connects to that rank."""

    def connector(peer: int) -> Callable[[], socket.socket]:
        near = hellos[peer].host == hellos[rank].host
        return lambda: _connect(peer, hellos[peer].path if near else places[peer].endpoint)

    return {peer: connector(peer) for peer in range(rank)}


def _connect(peer: int, where: str | tuple[str, int] | None) -> socket.socket:
    if where is None:
        raise ArgumentError("a rank on another host takes no connections: the ranks disagree on who shares a host")
    if isinstance(where, tuple):
        return socket.create_connection(where, timeout=_CONNECT)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.setblocking(False)
        connection.connect(where)
        if not same_user(connection):
            raise AuthError(f"another user listens in the place of rank {peer}", peer=peer)
        stack.pop_all()
    return connection
