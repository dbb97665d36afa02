"""A cable between two hosts that loses, delays, reorders and repeats what passes it, for kernels without netem.

The hosts are network namespaces, each with a TAP device. A process passes every Ethernet frame from one device to the
other, when and as often as the weather says, and drops what it should.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import multiprocessing
import os
import random
import select
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hosts import CLONE_NEWNET, address, call, ip

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 65536
_QUEUE = 1000
"""Frames that wait for a slow cable; more are dropped, as by a router."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Weather:
    """The weather of a cable: events that hit frames, in both directions, unless said otherwise."""

    loss: float = 0.0
    """The share that is lost."""
    repeats: float = 0.0
    """The share that arrives twice."""
    delay: float = 0.0
    """Seconds on the way."""
    jitter: float = 0.0
    """Seconds on the way at most in addition, of each frame its own: one that is sent later may arrive before."""
    rate: float = float("inf")
    """Bytes per second."""
    cut: tuple[int, ...] = ()
    """The hosts of which no frame passes any more."""


class Cable:
    """Tells the process that passes the frames what weather there is."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def set(self, weather: Weather) -> None:
        """Change the weather; it has changed when this returns."""
        self._pipe.send(weather)
        self._pipe.recv()

    def wait(self, frames: int) -> None:
        """Wait until so many frames have passed since the weather has changed."""
        self._pipe.send(frames)
        self._pipe.recv()


@contextlib.contextmanager
def cable(mtu: int = 1500) -> Iterator[tuple[list[str], Cable]]:
    """Two hosts, by their names, and the cable between them; skips the test where they cannot be made."""
    if os.geteuid() != 0 or not shutil.which("ip") or not Path("/dev/net/tun").exists():
        pytest.skip("a cable needs root, the command ip (iproute2) and /dev/net/tun")
    names = [f"aiocomms-{os.getpid()}-c{next(_numbers)}-{host}" for host in range(2)]
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_pass_frames, args=(names, theirs))
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except Exception as error:
                pytest.skip(f"network namespaces cannot be made here: {error}")
        process.start()
        theirs.close()
        said = mine.recv()
        if said is not None:
            pytest.skip(f"TAP devices cannot be made here: {said}")
        for host, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{address(host)}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "mtu", str(mtu), "up")
        yield names, Cable(mine)
    finally:
        mine.close()
        if process.pid is not None:
            process.join()
        for name in names:
            with contextlib.suppress(Exception):
                ip("netns", "delete", name)


def _open_tap(name: str) -> int:
    with Path(f"/run/netns/{name}").open() as namespace:
        call("setns", namespace.fileno(), CLONE_NEWNET)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"net0", _IFF_TAP | _IFF_NO_PI))
    return fd


def _pass_frames(names: list[str], pipe: Connection) -> None:
    """Serve until the other end of the pipe is closed."""
    try:
        taps = [_open_tap(name) for name in names]
    except OSError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    try:
        _Forwarder(taps, pipe).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the test has ended


class _Forwarder:
    def __init__(self, taps: list[int], pipe: Connection) -> None:
        self._taps = taps
        self._pipe = pipe
        self._weather = Weather()
        self._random = random.Random(1)
        self._due: list[tuple[float, int, int, bytes]] = []  # when, a number, to which host, what
        self._count = itertools.count()
        self._free = [0.0, 0.0]  # when the cable has taken what each host sent
        self._passed = 0
        self._wanted: int | None = None

    def serve(self) -> None:
        poller = select.poll()
        for fd in (*self._taps, self._pipe.fileno()):
            poller.register(fd, select.POLLIN)
        while True:
            left = max(0.0, self._due[0][0] - time.monotonic()) * 1000 if self._due else None
            for fd, _ in poller.poll(left):
                if fd in self._taps:
                    self._take(self._taps.index(fd))
                else:
                    self._hear()
            while self._due and self._due[0][0] <= time.monotonic():
                self._pass(*heapq.heappop(self._due)[2:])

    def _hear(self) -> None:
        said = self._pipe.recv()
        if isinstance(said, Weather):
            self._weather, self._passed = said, 0
            self._pipe.send(None)
        else:
            self._wanted = said

    def _pass(self, host: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # a device that is down, or full
            os.write(self._taps[host], frame)
        self._passed += 1
        if self._wanted is not None and self._passed >= self._wanted:
            self._wanted = None
            self._pipe.send(None)

    def _take(self, host: int) -> None:
        """Read what a host sends, and decide what becomes of it."""
        weather, draw = self._weather, self._random.random
        for _ in range(64):
            try:
                frame = os.read(self._taps[host], _FRAME)
            except OSError:  # nothing more, or the device is down
                return
            if host in weather.cut or draw() < weather.loss or len(self._due) > _QUEUE:
                continue
            self._free[host] = max(time.monotonic(), self._free[host]) + len(frame) / weather.rate
            for _ in range(1 + (draw() < weather.repeats)):
                due = self._free[host] + weather.delay + weather.jitter * draw()
                heapq.heappush(self._due, (due, next(self._count), 1 - host, frame))
