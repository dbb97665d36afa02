"""The description of a job, and the checks of this description."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from aiocomms.errors import ArgumentError, ArgumentTypeError
from aiocomms.lowlevel.auth import check_exposed, read_token
from aiocomms.lowlevel.sockets import listen_at

Restart = Literal["never", "on-failure"]
"""The reaction to the death of a rank."""


class At(NamedTuple):
    """The host and the port of a listening address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """The program, the number of its ranks, and the options of ``aiocomms run`` for the supervision of the ranks."""

    program: Sequence[str]
    """The arguments that follow ``python``, for example ``["server.py", "--debug"]`` or ``["-m", "server"]``."""
    ranks: int = 1
    """The number of ranks on each host."""
    restart: Restart = "never"
    """The reaction to the death of a rank: ``never`` ends all ranks; ``on-failure`` starts a new process for this
    rank."""
    max_restarts: int = 8
    """The largest number of restarts of one rank within 60 s. A further failure ends the job."""
    grace: float = 30.0
    """The seconds between SIGTERM and SIGKILL when the supervisor ends a rank."""
    nnodes: int = 1
    """The number of hosts, each with one supervisor."""
    node_rank: int = 0
    """The number of this host."""
    rendezvous: str | None = None
    """``HOST:PORT`` on the first host, to which the supervisors of the other hosts connect."""
    health: str | None = None
    """``PORT`` or ``HOST:PORT`` at which the supervisor serves ``/healthz`` and ``/readyz``."""
    listen: str | None = None
    """``HOST:PORT`` of a listening socket, which rank 0 gets as file descriptor 3 (systemd's protocol)."""
    log_dir: str | None = None
    """The folder in which each process gets a file with its output; None: no files."""
    preload: Sequence[str] = ()
    """Modules that are imported once for all ranks."""

    @property
    def size(self) -> int:
        """The number of ranks on all hosts together."""
        return self.ranks * self.nnodes

    def check(self, environ: Mapping[str, str]) -> None:
        """Check the job before any process starts.

        :raises ArgumentError: an option has a wrong value. The error names the option and the wanted value.
        :raises ArgumentTypeError: an option has a wrong type.
        """
        for name, value, least in (
            ("ranks", self.ranks, 1), ("nnodes", self.nnodes, 1), ("max_restarts", self.max_restarts, 0)
        ):  # fmt: skip
            if type(value) is not int or value < least:
                raise ArgumentError(f"{name} is {value!r}, wanted an integer >= {least}")
        if self.restart not in get_args(Restart):
            raise ArgumentError(f"restart is {self.restart!r}, wanted one of {', '.join(get_args(Restart))}")
        self._check_types()
        if not 0 <= self.grace <= 86400:
            raise ArgumentError(f"grace is {self.grace!r}, wanted 0 to 86400 seconds")
        self._check_hosts()
        self._check_program()
        for name in ("health", "listen"):
            if getattr(self, name) is not None:
                place(name, getattr(self, name))
        read_token(environ)

    def _check_types(self) -> None:
        try:
            msgspec.convert({name: _plain(value) for name, value in msgspec.structs.asdict(self).items()}, Job)
        except msgspec.ValidationError as error:
            raise ArgumentTypeError(f"the job is wrong: {error}") from None

    def _check_hosts(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise ArgumentError(f"node_rank is {self.node_rank}, wanted 0 <= node_rank < nnodes={self.nnodes}")
        if (self.rendezvous is None) != (self.nnodes == 1):
            raise ArgumentError(
                "rendezvous is missing, wanted HOST:PORT of the first host"
                if self.nnodes > 1
                else f"rendezvous is {self.rendezvous!r}, and nnodes is 1: supervisors of several hosts meet there"
            )
        if self.rendezvous is not None:
            if place("rendezvous", self.rendezvous).port == 0:
                raise ArgumentError(f"rendezvous is {self.rendezvous!r}, wanted a port that all supervisors know")
            check_exposed(f"the rendezvous of {self.nnodes} supervisors would be open at {self.rendezvous}")
        if self.listen is not None and self.node_rank:
            raise ArgumentError(
                f"listen is {self.listen!r} on host {self.node_rank}: rank 0, which gets it, is on host 0"
            )

    def _check_program(self) -> None:
        if not self.program or list(self.program) == ["-m"]:
            raise ArgumentError("no program is given, wanted FILE.py or -m MODULE")
        first = self.program[0]
        if first == "-m":
            top = self.program[1].partition(".")[0]
            if PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:  # noqa: PTH109
                raise ArgumentError(f"there is no module {self.program[1]!r}")
        elif not first or not Path(first).exists():  # The path "" is the current folder.
            raise ArgumentError(f"there is no file {first!r}")

    def warnings(self, environ: Mapping[str, str], cores: int) -> list[str]:
        """Return warnings about the job on a host with ``cores`` cores: the job may start too many ranks or threads."""
        threads = environ.get("OMP_NUM_THREADS", "1")
        if self.ranks > cores:
            return [
                f"{self.ranks} ranks share {cores} cores of this host: start at most {cores} (-n) where speed counts"
            ]
        if threads.isdecimal() and self.ranks * int(threads) > cores:
            return [
                f"{self.ranks} ranks with OMP_NUM_THREADS={threads} each share {cores} cores of this host: "
                f"set OMP_NUM_THREADS={max(1, cores // self.ranks)}"
            ]
        return []


def _plain(value: object) -> object:
    """Convert a path, a subclass of float, or a sequence other than str to a builtin type."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return str(value) if isinstance(value, os.PathLike) else value


def place(name: str, text: str) -> At:
    """Parse an address of the form ``HOST:PORT``, ``[HOST]:PORT`` or ``PORT``.

    If ``text`` has no host, the host is the loopback address.

    :param name: the name of the option, for the error.
    :raises ArgumentError: ``text`` has another form.
    """
    host, colon, port = text.rpartition(":")
    host = (host[1:-1] if host.startswith("[") and host.endswith("]") else host) if colon else "127.0.0.1"
    if not (port.isascii() and port.isdigit() and int(port) < 65536) or not host or {*host} & {*"[]"}:
        raise ArgumentError(f"{name} is {text!r}, wanted HOST:PORT with a port of 0 to 65535")
    return At(host, int(port))


def reason_of(error: OSError) -> str:
    """Return the reason of an error, without the address that Python adds to some errors."""
    if error.errno is None:
        return str(error)
    # If a name has no address, the number is below 0 and has no text of the system.
    return os.strerror(error.errno) if error.errno > 0 else str(error.strerror).partition(" (")[0]


def listen(name: str, at: At) -> socket.socket:
    """Return a listening socket at an address.

    :param name: the option that gives the address.
    :raises ArgumentError: the address cannot be bound.
    """
    try:
        listener = listen_at(at.host, port=at.port)
    except OSError as error:
        raise ArgumentError(f"{name} cannot be at {at}: {reason_of(error)}") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Accepted connections inherit this.
    return listener
