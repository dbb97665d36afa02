"""The connection of a rank to its job's key-value store: rank 0's ``JobStore``, or a launcher's ``TCPStore``.

All functions of this module block. torch waits without limit for a server that accepts a connection and then sends
nothing. So call these functions in a thread that may be abandoned.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakSet

from torch.distributed import TCPStore  # The module torch.distributed lists no exports.

from aiocomms.errors import ArgumentError, ProtocolError, StoreLostError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import check_exposed
from aiocomms.lowlevel.forks import Unshared
from aiocomms.lowlevel.jobstore import JobStore
from aiocomms.lowlevel.stores import enter, new_server, store_errors
from aiocomms.lowlevel.storeserver import StoreServer

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["connect_store"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.5
# One connection attempt gets so many seconds, so that a silent address does not use up the time for other addresses.
_ATTEMPT: Final = 5.0

# These are the servers of this process. Its second communicator uses the server of the first one, even if only another
# rank still needs that server.
_served: WeakSet[StoreServer] = WeakSet()
_serving = threading.Lock()


class _Address(NamedTuple):
    family: socket.AddressFamily
    sockaddr: Any
    literal: str


class _Target(NamedTuple):
    """The address of the store, the rank that connects to the store, and the deadline of the connection."""

    host: str
    port: int
    rank: int
    size: int
    timeout: float
    deadline: float

    def __str__(self) -> str:
        return f"the store at MASTER_ADDR={self.host!r}, MASTER_PORT={self.port}"

    def remaining(self) -> float:
        return max(0.0, self.deadline - clock.now())

    def refused(self, why: str) -> ArgumentError:
        return ArgumentError(f"{self} {why}", rank=self.rank)

    def lost(self, why: str) -> StoreLostError:
        return StoreLostError(f"{self} {why}", rank=self.rank)


def connect_store(
    host: str, port: int, rank: int, size: int, *, agent_store: bool, elsewhere: bool = False, timeout: float
) -> Store:
    """Serve the job's store if this is rank 0. Otherwise wait until the store is served, and connect to it.

    Rank 0 listens on the address of ``host`` only, never on every interface, and accepts ranks of this job only. A
    second call of rank 0 in one process uses the server of the first call. The server lives until the last returned
    store object is gone.

    :param host: a name or an IPv4 or IPv6 address of rank 0's machine.
    :param port: the TCP port of the store, 1 to 65535.
    :param rank: this rank, ``0 <= rank < size``.
    :param size: the number of ranks.
    :param agent_store: whether the launcher serves the store, so that rank 0 connects like the other ranks.
    :param elsewhere: whether ranks are on other hosts, which do not reach a loopback address.
    :param timeout: the time limit for the connection in seconds; also the default timeout of the store's calls.
    :returns: a store object that only the caller uses.
    :raises ArgumentError: the host does not resolve, is a wildcard address, or is a loopback address although ranks are
        on other hosts. Rank 0 also raises this error if the host is not the machine of rank 0, if the port is in use,
        or if other hosts could reach the store and the job has no token.
    :raises StoreLostError: no server answered at the address in time.
    :raises AuthError: the server at the address has another token.
    :raises ProtocolError: the server is a store of another version, or no store of a job at all.
    """
    target = _Target(host, port, rank, size, timeout, clock.now() + timeout)
    serves = rank == 0 and not agent_store
    store = _serve(target, elsewhere=elsewhere) if serves else _join(target, agent_store=agent_store)
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _serve(target: _Target, *, elsewhere: bool) -> JobStore:
    addresses = _resolve_patiently(target)
    # The name of this machine may also resolve to loopback (/etc/hosts), where other machines cannot reach the store.
    addresses.sort(key=lambda address: _is_loopback(address.literal))
    if elsewhere and _is_loopback(addresses[0].literal):
        raise target.refused(
            f"would be at {addresses[0].literal}, as this host resolves its name, and ranks are on other hosts: take "
            "that out of /etc/hosts, or set MASTER_ADDR to an address that they reach"
        )
    if not _serving.acquire(timeout=target.remaining()):
        raise target.lost(f"is still being opened by another thread after {target.timeout:g} s")
    try:
        server = _served_here(target, addresses)
        if server is None:
            server = new_server(_listen(target, addresses))
            _served.add(server)
        return JobStore(server.address[0], target.port, server, target.timeout)
    finally:
        _serving.release()


def _served_here(target: _Target, addresses: list[_Address]) -> StoreServer | None:
    """Return this process's server at the target's address; None if there is no server.

    If a server is there, add one to the number of its users.

    :raises ArgumentError: this process serves the same port on another address.
    """
    for server in list(_served):
        here = any(server.address == address.sockaddr for address in addresses)
        if (here or server.address[1] == target.port) and server.take():
            if here:
                return server
            server.let_go()
            raise target.refused(
                f"cannot be opened: this process serves that port on {server.address[0]} already: set MASTER_PORT to a "
                "free one"
            )
    return None


def _join(target: _Target, *, agent_store: bool) -> Store:
    pause = _FIRST_PAUSE
    while True:
        reached = _knock(_resolve_patiently(target), target, agent_store=agent_store)
        if not isinstance(reached, str):
            return reached
        if target.remaining() <= pause:
            raise target.lost(
                f"did not answer within {target.timeout:g} s ({reached}): check that rank 0 runs, that both variables "
                "are the same on all ranks and, if these are on several machines, that the address is not loopback"
            )
        clock.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _agents_store(target: _Target, literal: str) -> TCPStore:
    """Open a TCPStore at an address that has answered.

    If no server answered at the address, torch would print a stack trace for each failed attempt.
    """
    patience = timedelta(seconds=max(0.1, target.remaining()))
    with store_errors(f"{target} could not be opened", rank=target.rank):
        store = TCPStore(literal, target.port, target.size, False, patience, wait_for_workers=False)
    Unshared((literal, target.port)).belongs_to(store)
    return store


def _knock(addresses: list[_Address], target: _Target, *, agent_store: bool) -> Store | str:
    """Return the store at the first address that has one, or the reason why there is no store at the last address.

    The reason is a text, because an error would keep the frames of its traceback alive. These frames would keep the
    store alive until a garbage collection.
    """
    failure = "connection refused"
    for address in addresses:
        patience = min(max(0.01, target.remaining()), _ATTEMPT)
        try:
            with contextlib.ExitStack() as stack:
                probe = stack.enter_context(socket.socket(address.family, socket.SOCK_STREAM))
                probe.settimeout(patience)
                probe.connect(address.sockaddr)
                # While no server listens, the kernel may choose the same port as the source port, and connect the
                # socket to itself.
                if probe.getsockname() == probe.getpeername():
                    continue
                if not agent_store:
                    stack.pop_all()
                    return _entered(probe, address, target, patience)
            return _agents_store(target, address.literal)
        except OSError as error:
            failure = str(error)
    return failure


def _entered(connection: socket.socket, address: _Address, target: _Target, patience: float) -> JobStore:
    try:
        return enter(connection, address.literal, target.port, target.rank, patience)
    except ProtocolError as error:  # AuthError is a ProtocolError.
        raise type(error)(f"{target} could not be opened: {error.message}", rank=target.rank, peer=0) from error
    except OSError as error:  # The server may have refused one connection too many.
        raise ConnectionError(f"it could not be opened: {error}") from error


def _listen(target: _Target, addresses: list[_Address]) -> socket.socket:
    """Listen on the first address that belongs to this machine.

    :raises ArgumentError: no address belongs to this machine, the port cannot be used, or other hosts could reach the
        port and the job has no token.
    """
    failures: list[OSError] = []
    for address in addresses:
        try:
            listener = socket.create_server(address.sockaddr, family=address.family, backlog=socket.SOMAXCONN)
        except OSError as error:
            # With its traceback the error would hold this frame, and the frame would hold the store.
            failures.append(error.with_traceback(None))
        else:
            if not _is_loopback(address.literal):
                with contextlib.ExitStack() as stack:
                    stack.enter_context(listener)
                    check_exposed(f"{target} would be open to other hosts at {address.literal}")
                    stack.pop_all()
            return listener
    raise _cannot_listen(target, failures)


def _cannot_listen(target: _Target, failures: list[OSError]) -> ArgumentError:
    advice = {
        errno.EADDRINUSE: "the port is in use: set MASTER_PORT to a free one, or pass the store that uses it",
        errno.EACCES: "the port is privileged: set MASTER_PORT to one above 1023",
        errno.EADDRNOTAVAIL: "rank 0 hosts it, but that is no address of this machine: set MASTER_ADDR to one",
    }
    known = {error.errno: error for error in failures}
    number = next((number for number in advice if number in known), None)
    error = failures[-1] if number is None else known[number]
    refused = target.refused(f"cannot be opened: {error if number is None else advice[number]}")
    refused.__cause__ = error
    return refused


def _resolve_patiently(target: _Target) -> list[_Address]:
    """Resolve the host's addresses.

    Retry until the deadline, because a name may be unknown until its machine has started.

    :raises ArgumentError: the name does not resolve in time.
    """
    warned = False
    while True:
        try:
            return _resolve(target)
        except socket.gaierror as error:
            if target.remaining() <= _LONGEST_PAUSE:
                raise target.refused(
                    f"has a name that does not resolve ({error.strerror}): set MASTER_ADDR to rank 0's host"
                ) from error
            if not warned:
                _log.warning("%s has a name that does not resolve yet (%s)", target, error.strerror)
            warned = True
        clock.sleep(_LONGEST_PAUSE)


def _resolve(target: _Target) -> list[_Address]:
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise target.refused("has no valid host name: set MASTER_ADDR to rank 0's host") from error
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    addresses = [_Address(f, sa, socket.getnameinfo(sa, flags)[0]) for f, _, _, _, sa in found]
    if any(_is_wildcard(address.literal) for address in addresses):
        raise target.refused("would be on every interface, wanted one address: set MASTER_ADDR to rank 0's")
    return addresses


def _ip(literal: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(literal)
    return ip if ip.version == 4 else ip.ipv4_mapped or ip


def _is_wildcard(literal: str) -> bool:
    return _ip(literal).is_unspecified


def _is_loopback(literal: str) -> bool:
    return _ip(literal).is_loopback
