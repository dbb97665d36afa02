"""Bring-up: the ranks exchange their descriptions, open control connections, and share NCCL's unique id."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from aiocomms.errors import ArgumentError, CommTimeoutError, ProtocolError
from aiocomms.lowlevel import LOOPBACK, ControlCodec, clock, host_id, listen_at, reachable_address, run_in_thread, tune
from aiocomms.transport import Rendezvous
from aiocomms_nccl import wire
from aiocomms_nccl.nccl import SEVERAL_RANKS_PER_GPU, Nccl, readable

_log = logging.getLogger("aiocomms")
_HELLO: Final = struct.Struct("<I32s")  # the rank that connects, and the token of the rank to which it connects
_SHARE: Final = 0.9
"""The fraction of the remaining time in which ranks may connect.

In the rest of the time, ranks report missing ranks.
"""
_MPS: Final = "/tmp/nvidia-mps"  # noqa: S108 - CUDA looks for MPS in this folder
_PATIENCE: Final = 2.0
"""The number of seconds within which the other end of a new connection must send its rank and token."""


class NcclHello(msgspec.Struct, array_like=True):
    """The first record that each rank sends to the other ranks."""

    byte_order: str
    host: str
    name: str
    gpu: str
    """The identifier of the rank's GPU, unique among all GPUs."""
    nccl: int
    several: bool
    """True if the rank lets NCCL put several ranks on one GPU."""
    host_override: str
    """The value of ``NCCL_HOSTID``."""
    token: bytes


class NcclPlace(msgspec.Struct, array_like=True):
    """A record with the address at which a rank accepts connections. The record of rank 0 also has NCCL's unique id."""

    address: str
    port: int
    unique_id: bytes


HELLOS: Final = ControlCodec[NcclHello](NcclHello, "the first record")
PLACES: Final = ControlCodec[NcclPlace](NcclPlace, "the place")


def hello(gpu: str, library: Nccl) -> NcclHello:
    """Return the first record that this rank sends to the other ranks."""
    several = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1"
    override = os.environ.get("NCCL_HOSTID", "")
    return NcclHello(
        sys.byteorder, host_id("net"), socket.gethostname(), gpu, library.version(), several, override,
        secrets.token_bytes(32),
    )  # fmt: skip


async def exchange_hellos(rendezvous: Rendezvous, mine: NcclHello) -> list[NcclHello]:
    """Exchange the first records, the hellos, with all ranks.

    :raises ArgumentError: the ranks cannot work together. The message says what the user can change.
    :raises ProtocolError: the ranks have different byte orders or versions.
    """
    raw = await rendezvous.exchange("nccl", wire.dialect().head + HELLOS.encode(mine))
    hellos = [HELLOS.decode(wire.dialect().check(value, f"rank {peer}", peer), peer) for peer, value in enumerate(raw)]
    check(hellos)
    await run_in_thread(functools.partial(_advise, rendezvous.rank, hellos), anyhow=True)
    return hellos


def _advise(rank: int, hellos: Sequence[NcclHello]) -> None:
    """Log a warning if this rank shares a GPU with another rank and CUDA's MPS does not run.

    Without MPS, a shared GPU is slow.
    """
    other = next((n for n, it in enumerate(hellos) if it.gpu == hellos[rank].gpu and n != rank), None)
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS))
    if other is not None and not (folder / "control").exists():
        _log.warning(
            "ranks %d and %d share a GPU without MPS, and so their processes take turns on it: "
            "start it by `nvidia-cuda-mps-control -d`, or give each rank a GPU of its own", rank, other,
        )  # fmt: skip


def check(hellos: Sequence[NcclHello]) -> None:
    """Check that the ranks can work together.

    :raises ArgumentError: the ranks cannot work together. The message says what the user can change.
    :raises ProtocolError: the ranks have different byte orders.
    """
    first = hellos[0]
    for rank, record in enumerate(hellos):
        if record.byte_order != first.byte_order:
            raise ProtocolError(
                f"rank {rank} has byte order {record.byte_order}, and rank 0 {first.byte_order}", peer=rank
            )
        if record.nccl // 100 != first.nccl // 100:
            raise ArgumentError(
                f"rank {rank} has NCCL {readable(record.nccl)}, rank 0 has {readable(first.nccl)}; "
                "install one on all ranks"
            )
    seen: dict[str, int] = {}
    for rank, record in enumerate(hellos):
        other = seen.setdefault(record.gpu, rank)
        if other != rank:
            _check_shared_gpu(hellos, other, rank)


def _check_shared_gpu(hellos: Sequence[NcclHello], a: int, b: int) -> None:
    one, two = hellos[a], hellos[b]
    if one.nccl >= SEVERAL_RANKS_PER_GPU and one.several and two.several:
        return
    if one.host_override and two.host_override and one.host_override != two.host_override:
        return
    how = (
        "or set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks (with NCCL_MAX_CTAS=1 and NCCL_NVLS_ENABLE=0)"
        if one.nccl >= SEVERAL_RANKS_PER_GPU
        else "or set NCCL_HOSTID to a value of its own for each process"
    )
    raise ArgumentError(
        f"ranks {a} and {b} are on the same GPU, which NCCL {readable(one.nccl)} refuses unless it is told otherwise; "
        f"give each rank a GPU of its own (device=f'cuda:{{local_rank}}'), {how}"
    )


async def connect(rendezvous: Rendezvous, hellos: Sequence[NcclHello], library: Nccl | None) -> tuple[Any, bytes]:
    """Connect to all other ranks.

    :param library: the library that makes NCCL's unique id; None if no unique id is needed.
    :returns: a dict from each other rank to the connection, and NCCL's unique id.
    :raises CommTimeoutError: a rank did not connect.
    """
    rank = rendezvous.rank
    address = await run_in_thread(functools.partial(_address, rendezvous, hellos), anyhow=True)
    with contextlib.closing(listen_at(address, rendezvous.size)) as listener:
        unique_id = b""
        if rank == 0 and library is not None:
            unique_id = await rendezvous.run("making a unique id for NCCL", library.unique_id)
        address, port = listener.getsockname()[:2]
        place = NcclPlace(address, port, unique_id)
        raw = await rendezvous.exchange("nccl place", PLACES.encode(place))
        places = [PLACES.decode(value, peer) for peer, value in enumerate(raw)]
        opened: dict[int, socket.socket] = {}
        abandoned = False

        def call() -> None:
            opened.update(_connect_all(rendezvous, listener, hellos, places))
            if abandoned:  # no task takes the connections
                _close(opened)

        try:
            await rendezvous.run("connecting the ranks", call)
        except BaseException:
            abandoned = True
            _close(opened)
            raise
        return opened, places[0].unique_id


def _close(sockets: Mapping[int, socket.socket]) -> None:
    for connection in sockets.values():
        connection.close()


def _address(rendezvous: Rendezvous, hellos: Sequence[NcclHello]) -> str:
    """Return the address at which the other ranks reach this rank. The call blocks if ranks are on other hosts."""
    mine = hellos[rendezvous.rank]
    others = [record.name for record in hellos if record.host != mine.host]
    return reachable_address(others, rendezvous.store) if others else LOOPBACK


def _connect_all(
    rendezvous: Rendezvous, listener: socket.socket, hellos: Sequence[NcclHello], places: Sequence[NcclPlace]
) -> dict[int, socket.socket]:
    """Connect to all lower ranks, and accept connections from all higher ranks. This function blocks."""
    rank, size = rendezvous.rank, rendezvous.size
    ends = clock.now() + _SHARE * rendezvous.left()
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            where = places[peer].address, places[peer].port
            sockets[peer] = socket.create_connection(where, timeout=max(0.001, ends - clock.now()))
            sockets[peer].sendall(_HELLO.pack(rank, hellos[peer].token))
        while len(sockets) < size - 1:
            listener.settimeout(max(0.001, ends - clock.now()))
            peer, connection = _accept(listener, hellos[rank].token)
            if rank < peer < size and peer not in sockets:
                sockets[peer] = connection
            else:
                connection.close()
    except OSError as error:
        _close(sockets)
        absent = [peer for peer in range(size) if peer != rank and peer not in sockets]
        raise CommTimeoutError(f"these ranks did not connect: {absent} ({error})", late=absent) from error
    for connection in sockets.values():
        tune(connection)
    return sockets


def _accept(listener: socket.socket, token: bytes) -> tuple[int, socket.socket]:
    """Return the next connection and the rank at its other end. The rank is -1 if the token was missing or wrong."""
    connection, _ = listener.accept()
    connection.settimeout(_PATIENCE)
    with contextlib.suppress(OSError):
        greeting = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(greeting) == _HELLO.size:
            rank, token_given = _HELLO.unpack(greeting)
            if secrets.compare_digest(token_given, token):
                return int(rank), connection
    return -1, connection
