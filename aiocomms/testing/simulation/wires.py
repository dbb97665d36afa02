"""The connections of endpoints in a simulation. The classes implement protocols of :mod:`aiocomms.lowlevel.lines`.

A blocking call runs in a simulated thread. The thread belongs to a simulated process, and
the call waits for an event in this process.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from aiocomms.errors import ArgumentError, AuthError, CommTimeoutError, PeerDiedError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.lines import ENDPOINT, EndpointLine, ReceptionDriver
from aiocomms.testing.simulation.network import SimulatedConduit, SimulatedNetwork, address_of, number_of


class Proof(NamedTuple):
    """The first frame of a connection, which proves that the connecting process belongs to the job."""

    key: bytes


class Admitted(NamedTuple):
    """The answer to the proof, which says whether the proof was valid."""

    proved: bool


class Said(NamedTuple):
    """A frame with one message of a connection."""

    what: bytes


class SimulatedLine:
    """See :class:`aiocomms.lowlevel.lines.EndpointLine`."""

    def __init__(self, conduit: SimulatedConduit, host: str, seconds: float = 0) -> None:
        """Store a connection, which :meth:`close` closes.

        :param host: the host of the other end.
        :param seconds: the time after which every wait on this line fails, in seconds from now. :meth:`extend` sets a
            new time.
        """
        self._conduit, self.host = conduit, host
        self._ends = clock.now() + seconds
        self._heard: deque[Any] = deque()
        self._news = clock.event()
        self._over = self._closed = False
        conduit.hear(self._on_frame, self._on_end)

    def tell(self, what: bytes) -> None:
        """See :meth:`EndpointLine.tell`."""
        if self._over or self._closed:
            raise PeerDiedError("the connection with the other endpoint broke")
        self._conduit.send(Said(what))

    def hear(self) -> bytes:
        """See :meth:`EndpointLine.hear`."""
        what: bytes = self.next().what
        return what

    def next(self) -> Any:
        """Wait for the next frame of any kind, and return it."""
        while not self._closed and not self._heard and not self._over:
            self._news = clock.event()
            if not self._news.wait(max(0.0, self._ends - clock.now())):
                raise CommTimeoutError("the other endpoint did not answer in time")
        if self._closed or not self._heard:
            raise PeerDiedError("the connection with the other endpoint broke")
        return self._heard.popleft()

    def answer(self, proved: bool) -> None:
        """Answer the proof of the other end."""
        self._conduit.send(Admitted(proved))

    def extend(self, seconds: float) -> None:
        """See :meth:`EndpointLine.extend`."""
        self._ends = clock.now() + seconds

    def close(self) -> None:
        """See :meth:`EndpointLine.close`."""
        self._closed = True
        self._conduit.close()
        self._news.set()

    def _on_frame(self, frame: Any) -> None:
        self._heard.append(frame)
        self._news.set()

    def _on_end(self, _: bool) -> None:
        self._over = True
        self._news.set()


class SimulatedCall:
    """See :class:`aiocomms.lowlevel.lines.LineCall`."""

    def __init__(self, network: SimulatedNetwork, host: str, port: int, key: bytes, seconds: float, name: str) -> None:
        """See :meth:`aiocomms.lowlevel.lines.Wires.call`."""
        self._network, self._host, self._port, self._key, self._seconds = network, host, port, key, seconds
        self._where = f"the endpoint {name} at {host}:{port}"
        self._answers: list[bool] = []
        self._answered = clock.event()
        self._hung_up = False
        self._conduit: SimulatedConduit | None = None
        self._line: SimulatedLine | None = None

    def run(self) -> EndpointLine:
        """See :meth:`LineCall.run`."""
        ends = clock.now() + self._seconds
        if self._hung_up:
            raise PeerDiedError(f"{self._where} cannot be reached: the call was hung up")
        self._conduit = self._network.connect(address_of(self._port), Proof(self._key), self._answer)
        try:
            if not self._answered.wait(self._seconds):
                raise CommTimeoutError("")
            if self._hung_up or not self._answers[0]:
                raise PeerDiedError("nothing listens there")
            self._line = SimulatedLine(self._conduit, self._host, ends - clock.now())
            if self._line.next().proved:
                return self._line
            raise AuthError(f"the process that answers there is not {ENDPOINT} of this job; check the token")
        except CommTimeoutError:
            self.hang_up()
            raise CommTimeoutError(f"{self._where} did not answer within {self._seconds:g} s") from None
        except PeerDiedError as error:
            raise PeerDiedError(f"{self._where} cannot be reached: {error.message}") from None

    def hang_up(self) -> None:
        """See :meth:`LineCall.hang_up`."""
        self._hung_up = True
        if self._line is not None:
            self._line.close()
        elif self._conduit is not None:
            self._conduit.close()
        self._answered.set()

    def _answer(self, welcome: bool) -> None:
        self._answers.append(welcome)
        self._answered.set()


class SimulatedReception:
    """See :class:`aiocomms.lowlevel.lines.Reception`."""

    def __init__(self, network: SimulatedNetwork, host: str, driver: ReceptionDriver) -> None:
        """Listen for connections.

        :param host: an address of this host.
        """
        self._network, self._driver, self.host = network, driver, host
        self._address = network.listen(self._arrived)
        self.port = number_of(self._address)
        self._key = b""
        self._let_in: Callable[[EndpointLine], object] | None = None

    def open(self, key: bytes, let_in: Callable[[EndpointLine], object]) -> None:
        """See :meth:`Reception.open`."""
        self._key, self._let_in = key, let_in

    def close(self) -> None:
        """See :meth:`Reception.close`."""
        self._let_in = None
        self._network.unlisten(self._address)

    def _arrived(self, conduit: clock.Conduit, proof: Proof) -> None:
        assert isinstance(conduit, SimulatedConduit)
        line = SimulatedLine(conduit, f"host{conduit.other.process.rank}")
        if proof.key == self._key:
            self._driver.call_threadsafe(self._enter, line)
        else:
            line.answer(False)
            line.close()

    def _enter(self, line: SimulatedLine) -> None:
        if self._let_in is None:
            line.close()
        else:
            line.answer(True)
            self._let_in(line)


def _everywhere(host: str) -> bool:
    with contextlib.suppress(ValueError):  # The host may be a name.
        return ipaddress.ip_address(host).is_unspecified
    return False


class SimulatedWires:
    """See :class:`aiocomms.lowlevel.lines.Wires`."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    def find(self, host: str) -> Callable[[ReceptionDriver], SimulatedReception]:
        """See :meth:`Wires.find`. Accept any name as a name of this host, so that a program runs without changes."""
        if not host or _everywhere(host):
            raise ArgumentError(f"host is {host!r}, which is every interface, wanted one address")
        return functools.partial(SimulatedReception, self._network, host)

    def call(self, host: str, port: int, key: bytes, seconds: float, name: str) -> SimulatedCall:
        """See :meth:`Wires.call`."""
        return SimulatedCall(self._network, host, port, key, seconds, name)
