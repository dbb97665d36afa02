"""The meeting of two endpoints: they form a communicator over the connection that one of them has made."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import torch

from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.endpoints.credentials import Address
from aiocomms.errors import CommError, CommTimeoutError, PeerDiedError, ProtocolError
from aiocomms.lowlevel import ControlCodec, tune
from aiocomms.lowlevel.auth import MAX_RECORD, Seal, job_token
from aiocomms.lowlevel.jobstore import prove
from aiocomms.lowlevel.sockets import read_exactly
from aiocomms.lowlevel.storeserver import LENGTH

ENDPOINT: Final = "the endpoint"
"""The name of the endpoint that is called, in place of a rank, in a proof."""
CALLER: Final = 0
"""The rank of the endpoint that connects; the other one has 1."""
_MOST: Final = 2 * MAX_RECORD


class EndpointHello(msgspec.Struct, array_like=True):
    """The first words of the endpoint that connects."""

    address: bytes
    """The address of the endpoint that connects."""
    nonce: bytes


class EndpointAnswer(msgspec.Struct, array_like=True):
    """The answer to these words."""

    nonce: bytes
    refusal: str = ""
    """The reason why they do not form a connection; empty: they do."""
    crossed: bool = False
    """The refusal is that the other one is connecting to this one, too."""


HELLOS: Final = ControlCodec[EndpointHello](EndpointHello, "what the other endpoint says")
ANSWERS: Final = ControlCodec[EndpointAnswer](EndpointAnswer, "what the other endpoint says")


class EndpointLine:
    """A connection with another endpoint, for one message after the other. It blocks."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        """Take a connection that is proved, and close it in the end.

        :param seconds: how long they may take to form.
        """
        self._connection = tune(connection)
        self.host: str = str(connection.getpeername()[0])
        self.ends: float = time.monotonic() + seconds

    def tell(self, what: bytes) -> None:
        """Send a message.

        :raises PeerDiedError: the other one has gone.
        :raises CommTimeoutError: time is up.
        """
        with self._named():
            self._connection.sendall(LENGTH.pack(len(what)) + what)

    def hear(self) -> bytes:
        """Wait for the next message.

        :raises PeerDiedError: the other one has gone.
        :raises CommTimeoutError: time is up.
        :raises ProtocolError: it makes no sense.
        """
        with self._named():
            (length,) = LENGTH.unpack(read_exactly(self._connection, LENGTH.size))
            if length > _MOST:
                raise ProtocolError(f"the other endpoint sends {length} bytes, wanted at most {_MOST}")
            return read_exactly(self._connection, length)

    def extend(self, seconds: float) -> None:
        """Give them so long from now on."""
        self.ends = time.monotonic() + seconds

    def close(self) -> None:
        """Close it; a thread that waits for it goes on."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            self._connection.settimeout(max(0.001, self.ends - time.monotonic()))
            yield
        except TimeoutError:
            raise CommTimeoutError("the other endpoint did not answer in time") from None
        except OSError as error:
            raise PeerDiedError(f"the other endpoint is gone: {error}") from error


class EndpointCall:
    """A call of another endpoint: connects, proves to be of the job, and says who this is."""

    def __init__(self, address: Address, mine: bytes, seconds: float) -> None:
        """Begin with nothing.

        :param mine: this endpoint's address.
        :param seconds: for all of it.
        :raises CommError: there is no descriptor for it.
        """
        self._address, self._mine, self._seconds = address, mine, seconds
        try:
            self._connection = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        except OSError as error:
            raise CommError(f"no connection can be made: {error}") from error
        self.nonce: bytes = os.urandom(16)
        """The number that this end has chosen for the seal."""

    def run(self) -> tuple[EndpointLine, EndpointAnswer]:
        """Make it. Blocks, until :meth:`hang_up` at the latest.

        :returns: the connection, and what the endpoint answers.
        :raises PeerDiedError: no endpoint listens there.
        :raises CommTimeoutError: it does not answer.
        :raises AuthError: the endpoint has another token.
        """
        address, ends = self._address, time.monotonic() + self._seconds
        where = f"the endpoint {address.name} at {address.host}:{address.port}"
        try:
            self._connection.settimeout(self._seconds)
            self._connection.connect((address.host, address.port))
            left = max(0.001, ends - time.monotonic())
            prove(self._connection, address.secret("connect"), CALLER, left, ENDPOINT)
            line = EndpointLine(self._connection, max(0.001, ends - time.monotonic()))
        except TimeoutError:
            raise CommTimeoutError(f"{where} did not answer within {self._seconds:g} s") from None
        except OSError as error:
            raise PeerDiedError(f"{where} cannot be reached: {error}") from error
        line.tell(HELLOS.encode(EndpointHello(self._mine, self.nonce)))
        return line, ANSWERS.decode(line.hear())

    def hang_up(self) -> None:
        """End it; a thread that makes it goes on."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Pair(StoreRendezvous):
    """Two endpoints as the ranks of a communicator: they meet over a connection, in place of a store."""

    home: dict[Any, Any] | None

    def __init__(
        self,
        line: EndpointLine,
        rank: int,
        name: str,
        device: torch.device,
        timeout: float,
        seal: Seal,
        home: dict[Any, Any],
    ) -> None:
        super().__init__(None, rank, 2, name=name, device=device, timeout=timeout, seal=seal)
        self._line, self.home = line, home
        self.hosts: Sequence[str] = (line.host,)

    async def exchange(self, key: str, value: bytes) -> list[bytes]:
        """See :meth:`aiocomms.transport.Rendezvous.exchange`."""
        theirs = await self.run(f"meeting the other endpoint ({key})", lambda: self._swap(key, value))
        return [value, theirs] if self.rank == CALLER else [theirs, value]

    def _swap(self, key: str, value: bytes) -> bytes:
        other = 1 - self.rank
        self._line.tell(self._seal.sign(key, self.rank, value))
        return self._seal.verify(key, other, self._line.hear())


def seal_of(caller: Address, called: Address, *nonces: bytes) -> Seal:
    """Return the seal of what the two say while they form; the same for both."""
    return Seal(job_token(), "endpoints", caller.endpoint.hex(), called.endpoint.hex()).child(
        *(nonce.hex() for nonce in nonces)
    )
