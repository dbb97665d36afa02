"""Brings up a gloo process group whose ranks listen on one address each and on no other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from aiocomms.errors import ArgumentError, CommTimeoutError, ProtocolError
from aiocomms.transport import Rendezvous
from aiocomms_c10d import wire
from aiocomms_c10d.link import FOREVER

_THREADS: Final = 2
"""gloo's threads for collectives; each runs one at a time, in the order in which they were started."""
_CONNECT: Final = 120.0
"""Seconds that connecting may take once every rank is known to be there."""
_LOOPBACK: Final = "127.0.0.1"
_HELLO: Final = 512
_SIOCGIFADDR: Final = 0x8915


def hello() -> bytes:
    """What the ranks tell each other first: the version of their frames, the host they are on, and its name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = Path("/proc/self/ns/net").stat().st_ino  # containers of one host do not share its loopback
    return f"{wire.VERSION} {boot}/{network} {socket.gethostname()}".encode()


async def open_gloo(rendezvous: Rendezvous) -> Any:
    """Connect to all other ranks.

    :raises ArgumentError: this host's address cannot be told.
    :raises CommTimeoutError: a rank did not come, or could not be reached.
    :raises ProtocolError: a rank speaks another version.
    """
    hellos = await rendezvous.exchange("c10d", hello())
    store = rendezvous.store
    assert store is not None
    rank, size, timeout = rendezvous.rank, rendezvous.size, min(rendezvous.timeout, _CONNECT)
    return await rendezvous.run(
        "connecting gloo",
        lambda: _connect(PrefixStore("c10d/gloo", store), rank, size, listen_on(hellos, store), timeout),
    )


def listen_on(hellos: Sequence[bytes], store: Store | None) -> str:
    """Where this rank listens: loopback if all ranks share a host, else an address that the others can reach.

    :param hellos: every rank's :func:`hello`.
    :param store: where the ranks met, whose host they all can reach.
    :returns: an address.
    """
    versions, hosts, names = zip(*(value.decode().split(" ", 2) for value in hellos), strict=True)
    for peer, version in enumerate(versions):
        if version != str(wire.VERSION):
            raise ProtocolError(f"rank {peer} speaks version {version} of c10d's frames, this rank {wire.VERSION}")
    if len(set(hosts)) == 1:
        return _LOOPBACK
    interface = os.environ.get("AIOCOMMS_IFACE")
    if interface:
        return _address_of(interface)
    others = [name for name, host in zip(names, hosts, strict=True) if host != hosts[0]]
    for target in (_host_of(store), os.environ.get("MASTER_ADDR"), names[0], *others):
        address = _towards(target)
        if address is not None:
            return address
    raise ArgumentError(
        f"the ranks are on several hosts, and this one, {socket.gethostname()!r}, finds no route to them; "
        "set AIOCOMMS_IFACE to the network interface to use"
    )


def _host_of(store: Store | None) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def _towards(host: str | None) -> str | None:
    """This host's address on the way to another, or None. Sends nothing."""
    if not host:
        return None
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(address)
                mine = str(probe.getsockname()[0])
                if not mine.startswith("127.") and mine != "::1":
                    return mine
    return None


def _connect(store: Store, rank: int, size: int, address: str, timeout: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = _THREADS
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    try:
        group = ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise CommTimeoutError(f"gloo could not connect to every rank within {timeout:g} s: {first}") from error
    group._set_default_timeout(FOREVER)
    return group


def poison(group: Any) -> None:
    """Break every connection of a gloo group: all that is pending on it fails, here and on the peers.

    Its ``abort`` does nothing; what does is a wait that expires.
    """
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([torch.empty(1, dtype=torch.uint8)], 2**31 - 1).wait(timedelta(milliseconds=1))


def store_over(group: Any, device: torch.device, timeout: float) -> Store:
    """Make a store of the ranks of a process group, by its collectives; blocks.

    Rank 0 serves it, on one address.
    """
    rank, size = group.rank(), group.size()
    hellos = _all_gather(group, device, size, hello())
    server: TCPStore | None = None
    address = b""
    if rank == 0:
        host = listen_on(hellos, None)
        server, port = _serve(host, size, timeout)
        address = f"{host} {port}".encode()
    host, _, port_text = _all_gather(group, device, size, address)[0].decode().partition(" ")
    if server is not None:
        return server
    return TCPStore(host, int(port_text), size, False, timedelta(seconds=timeout), wait_for_workers=False)


def _serve(host: str, size: int, timeout: float) -> tuple[TCPStore, int]:
    # Left to itself the server listens on every interface.
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host, port, size, True, timedelta(seconds=timeout), wait_for_workers=False,
        master_listen_fd=listener.detach(), use_libuv=torch.__version__ >= "2.8",
    )  # fmt: skip
    return store, port


def _address_of(interface: str) -> str:
    name = interface.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name[:15]))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ArgumentError(
                f"AIOCOMMS_IFACE is {interface!r}, which has no IPv4 address ({error.strerror}); there are: {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _all_gather(group: Any, device: torch.device, size: int, value: bytes) -> list[bytes]:
    mine = torch.frombuffer(bytearray(value.ljust(_HELLO, b"\0")), dtype=torch.uint8).to(device)
    outputs = [torch.empty_like(mine) for _ in range(size)]
    group.allgather([outputs], [mine]).wait()
    return [bytes(output.cpu().tolist()).rstrip(b"\0") for output in outputs]
