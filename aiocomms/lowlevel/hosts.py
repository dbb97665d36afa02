"""The identifiers of hosts and processes, and the address at which other hosts reach this host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torch.distributed import PrefixStore, Store, TCPStore

from aiocomms.errors import ArgumentError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import check_exposed
from aiocomms.lowlevel.jobstore import JobStore

LOOPBACK: Final = "127.0.0.1"
PROCESS_BITS: Final = 46
"""The number of bits of a process number, see :func:`process_number`."""
_PID_BITS: Final = 22
_SIOCGIFADDR: Final = 0x8915


def host_id(*namespaces: str) -> str:
    """Return an identifier of this host, and of some namespaces of this process.

    :param namespaces: kinds of namespaces that the identifier includes. With ``"net"``, ranks with the same identifier
        share a loopback interface.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join((boot, *(str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in namespaces)))


def this_process() -> tuple[str, int]:
    """Return an identifier of this process's host and pid namespace, and the number of this process in that namespace.

    Processes with the same identifier of host and namespace can map each other's memory. In a simulation, each rank has
    its own identifier, and the number is 0.
    """
    if clock.simulation is not None:
        return clock.simulation.host(), 0
    return host_id("pid"), process_number(os.getpid())


def process_number(pid: int) -> int:
    """Return a number that identifies a process; 0 if no process has the pid.

    Later processes with this pid get other numbers.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0
    started = int(fields[19])  # Field 22 of proc_pid_stat(5), in ticks since boot.
    return (started << _PID_BITS | pid) % (1 << PROCESS_BITS)


def process_descriptor(number: int) -> int | None:
    """Return a descriptor that becomes readable when a process of this pid namespace ends; see ``pidfd_open(2)``.

    :param number: the process's number, see :func:`process_number`.
    :returns: the descriptor; None if the kernel refuses to open a descriptor, or ``number`` is 0.
    :raises ProcessLookupError: the process has ended. Another process may now have the same pid.
    """
    pid = number % (1 << _PID_BITS)
    if not pid:
        return None
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None
    # A process that this user may not see has the number 0. Otherwise the number that is read belongs to the process of
    # the descriptor, unless that process has ended.
    if process_number(pid) not in (0, number) or _ended(fd):
        os.close(fd)
        raise ProcessLookupError(f"process {pid} is another one, or has ended")
    return fd


def _ended(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def reachable_address(names: Iterable[str], store: Store | None) -> str:
    """Return the address at which ranks on other hosts reach this host. The address is never a wildcard.

    The environment variable ``AIOCOMMS_IFACE`` may name the network interface whose address is returned. If this
    variable is not set, the function uses the interface through which this host reaches the store, ``MASTER_ADDR``, or
    the host of another rank.

    :param names: the names or addresses of the hosts on which other ranks run.
    :param store: the store through which the ranks have found each other. All ranks can reach the store's host.
    :raises ArgumentError: no address is found, or the job has no token. Without a token, no port may be open to other
        hosts.
    """
    if clock.simulation is not None:
        return clock.simulation.host()
    check_exposed("the ranks are on several hosts")
    interface = os.environ.get("AIOCOMMS_IFACE")
    if interface:
        return _address_of(interface)
    for target in (_host_of(store), os.environ.get("MASTER_ADDR"), *names):
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
    return store.host if isinstance(store, (TCPStore, JobStore)) else None


def _towards(host: str | None) -> str | None:
    """Return this host's address on the route to another host, or None. The function sends nothing."""
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
