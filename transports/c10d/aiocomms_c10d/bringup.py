"""Bring-up of a gloo process group in which each rank listens on only one address."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import anyio
import torch
from torch.distributed import DistNetworkError, PrefixStore, ProcessGroupGloo, Store

from aiocomms.errors import ArgumentError, CommTimeoutError, ProtocolError, StoreLostError
from aiocomms.lowlevel import (
    LOOPBACK,
    buffers,
    clock,
    closed_on_exec,
    gone,
    host_id,
    mac,
    reach_store,
    reachable_address,
    run_in_thread,
    serve_store,
    store_errors,
)
from aiocomms.transport import Rendezvous
from aiocomms_c10d import wire
from aiocomms_c10d.auth import SignedStore, prove, stop_listening
from aiocomms_c10d.control import FOREVER

_THREADS: Final = 2
"""The number of gloo's threads for collectives.

Each thread runs one collective at a time, in the order in which collectives are started.
"""
_CONNECT: Final = 120.0
"""The largest number of seconds for connecting, after every rank has called :func:`open_gloo`."""
_SHARE: Final = 0.5
"""The fraction of the remaining time that all ranks use for connecting.

The remaining time is that of the rank with the least time left. In the rest of this time, the ranks find out which
ranks are missing.
"""
_HELLO: Final = 512
"""The size in bytes of a record that a process group gathers."""


def hello(adopt: bool, left: float) -> bytes:
    """Return this rank's first record for the other ranks.

    :param adopt: whether this rank has a user's process group over which it can run its collectives.
    :param left: the seconds that this rank still has for connecting.
    :returns: this rank's frame version and byte order, ``adopt``, the remaining milliseconds, a nonce that makes this
        group's key unique, and the host's identity and name.
    """
    left_ms = max(0, int(left * 1000))
    once = secrets.token_hex(16)
    return f"{_dialect()} {adopt:d} {left_ms} {once} {host_id('net')} {socket.gethostname()}".encode()


async def open_gloo(rendezvous: Rendezvous, adopt: bool) -> tuple[Any, bool]:
    """Connect to all other ranks.

    :param adopt: whether this rank has a user's process group over which it can run its collectives.
    :returns: the gloo group, and whether all ranks have a user's group for their collectives.
    :raises ArgumentError: the address of this host cannot be determined.
    :raises CommTimeoutError: a rank is missing or could not be reached.
    :raises ProtocolError: a rank uses another version of the frames.
    :raises AuthError: a rank does not have this job's token.
    """
    began = clock.now()
    mine = await run_in_thread(lambda: hello(adopt, rendezvous.left()), anyhow=True)
    hellos = await rendezvous.exchange("c10d", mine)
    key = mac(rendezvous.secret("c10d"), *hellos)
    store = rendezvous.store
    assert store is not None
    rank, size = rendezvous.rank, rendezvous.size
    timeout = min(_SHARE * max(0.0, began + _fewest_seconds(hellos) - clock.now()), _CONNECT)

    def connect() -> Any:
        with closed_on_exec():
            return _connect(store, rank, size, listen_on(hellos, store), timeout, key)

    late = CommTimeoutError(f"gloo could not connect to every rank within {timeout:g} s")
    with anyio.move_on_after(timeout):
        try:
            return await rendezvous.run("connecting gloo", connect), all(value.split()[1] == b"1" for value in hellos)
        except CommTimeoutError as error:
            late = error
    await rendezvous.exchange("c10d waits", b"")  # gloo does not name missing ranks, but this call does.
    raise late


def listen_on(hellos: Sequence[bytes], store: Store | None) -> str:
    """Return the address on which this rank listens.

    If all ranks share a host, the address is loopback. If not, it is an address that the other hosts can reach.

    :param hellos: the :func:`hello` of every rank.
    :param store: the store through which the ranks met. All ranks can reach the store's host.
    """
    *_, hosts, names = zip(*(_parse(peer, value) for peer, value in enumerate(hellos)), strict=True)
    if len(set(hosts)) == 1:
        return LOOPBACK
    others = [name for name, host in zip(names, hosts, strict=True) if host != hosts[0]]
    return reachable_address((names[0], *others), store)


def _fewest_seconds(hellos: Sequence[bytes]) -> float:
    """Return the shortest remaining time among all ranks, in seconds.

    With this limit all ranks stop connecting at the same time, and each rank can still ask which rank is missing.
    """
    return min(int(_parse(peer, value)[2]) for peer, value in enumerate(hellos)) / 1000


def _dialect() -> str:
    return f"{wire.VERSION}/{sys.byteorder}"


def _parse(peer: int, value: bytes) -> list[str]:
    parts = value.decode(errors="replace").split(" ", 5)
    if parts[0] != (ours := _dialect()):
        raise ProtocolError(f"rank {peer} speaks version {parts[0][:16]} of c10d's frames, this rank {ours}", peer=peer)
    if len(parts) != 6 or parts[1] not in ("0", "1") or re.fullmatch("[0-9]{1,15}", parts[2]) is None:
        raise ProtocolError(f"rank {peer} introduces itself in the form of another version", peer=peer)
    return parts


def _connect(store: Store, rank: int, size: int, address: str, timeout: float, key: bytes) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = _THREADS
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    try:
        # gloo gets its own connection, because its waits for ranks block all other users of the connection.
        signed = SignedStore(PrefixStore("c10d/gloo", _with_own_connection(store)), key)
        group = ProcessGroupGloo(signed, rank, size, options)
        signed.unshared.belongs_to(group)
        prove(group, rank, size, key)
        # With TORCH_GLOO_LAZY_INIT gloo connects when the group is first used.
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "0":
            stop_listening(signed.written)
    except DistNetworkError:
        with store_errors():
            raise
    except RuntimeError as error:
        raise CommTimeoutError(
            f"gloo could not connect to every rank within {timeout:g} s: {_first_line(error)}"
        ) from error
    group._set_default_timeout(FOREVER)
    return group


def _with_own_connection(store: Store) -> Store:
    clone: Callable[[], Store] | None = getattr(store, "clone", None)  # torch 2.6 has no clone()
    return store if clone is None else clone()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def poison(group: Any) -> None:
    """Break every connection of a gloo group, so that all pending operations fail on this rank and on the peers.

    gloo's ``abort`` does nothing, but gloo closes its connections when a wait times out. So this function lets a wait
    time out.
    """
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([buffers.empty(1, dtype=torch.uint8, device="cpu")], 2**31 - 1).wait(
            timedelta(milliseconds=1)
        )


def store_over(group: Any, timeout: float) -> Store:
    """Make a store for the ranks of a process group. This function runs collectives of the group, and blocks.

    Rank 0 serves the store at one address.

    :raises ArgumentError: the group cannot gather tensors on the CPU, or other hosts could reach the store although the
        job has no token.
    :raises PeerDiedError: a rank of the group has ended.
    :raises StoreLostError: rank 0 could not serve the store.
    """
    rank, size = group.rank(), group.size()
    hellos = _all_gather(group, size, hello(adopt=True, left=timeout))
    server: Store | None = None
    address, failure = b"", None
    if rank == 0:
        try:
            host = listen_on(hellos, None)
            server, port = serve_store(host, timeout)
            address = f"{host} {port}".encode()
        except Exception as error:  # the other ranks must not wait in the user's group without end
            failure = error
    place = _all_gather(group, size, address)[0].decode()
    if failure is not None:
        raise failure
    if server is not None:
        return server
    host, _, port_text = place.partition(" ")
    if not port_text:
        raise StoreLostError("rank 0 could not serve a store: see the error there", peer=0)
    return reach_store(host, int(port_text), rank, timeout)


def _all_gather(group: Any, size: int, value: bytes) -> list[bytes]:
    mine = torch.frombuffer(bytearray(value.ljust(_HELLO, b"\0")), dtype=torch.uint8)
    outputs = [torch.empty_like(mine) for _ in range(size)]
    try:
        gathering = group.allgather([outputs], [mine])
    except RuntimeError as error:
        raise ArgumentError(f"the group to adopt cannot gather tensors on the cpu: {_first_line(error)}") from error
    try:
        gathering.wait()
    except RuntimeError as error:
        raise gone(None, _first_line(error)) from error
    return [bytes(output.tolist()).rstrip(b"\0") for output in outputs]
