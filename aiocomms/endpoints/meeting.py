"""The handshake of two endpoints, which then form a communicator over the connection that one of them made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch

from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.endpoints.credentials import Address
from aiocomms.lowlevel import ControlCodec
from aiocomms.lowlevel.auth import Seal, job_token
from aiocomms.lowlevel.lines import CALLER, EndpointLine
from aiocomms.lowlevel.wires import wires


class EndpointHello(msgspec.Struct, array_like=True):
    """The first message of the endpoint that connects."""

    address: bytes
    """The address of the endpoint that connects."""
    nonce: bytes
    number: int = 0
    """The number of the call.

    Calls may overtake each other. Of several calls of one endpoint, only the call with the highest number has an
    effect.
    """


class EndpointAnswer(msgspec.Struct, array_like=True):
    """The answer to an :class:`EndpointHello`."""

    nonce: bytes
    refusal: str = ""
    """The reason why the two endpoints cannot form a connection; empty if they can."""
    crossed: bool = False
    """True if the called endpoint refuses because its own call to the caller takes precedence."""


HELLOS: Final = ControlCodec[EndpointHello](EndpointHello, "what the other endpoint says")
ANSWERS: Final = ControlCodec[EndpointAnswer](EndpointAnswer, "what the other endpoint says")


class EndpointCall:
    """A call to another endpoint.

    The call connects, proves that this process belongs to the job, and sends this endpoint's address.
    """

    def __init__(self, address: Address, mine: bytes, number: int, seconds: float) -> None:
        """Prepare the call.

        :param mine: this endpoint's address.
        :param number: a number above the numbers of this endpoint's earlier calls.
        :param seconds: the deadline of the whole call.
        :raises CommError: the process has no file descriptor left.
        """
        self._mine, self._number = mine, number
        self._call = wires().call(address.host, address.port, address.secret("connect"), seconds, address.name)
        self.nonce: bytes = os.urandom(16)
        """The random bytes that this end contributes to the result of :func:`seal_of`."""
        self.hang_up: Callable[[], None] = self._call.hang_up

    def run(self) -> tuple[EndpointLine, EndpointAnswer]:
        """Make the call. Block until the answer arrives, or until ``hang_up`` ends the call.

        :returns: the connection, and the answer of the other endpoint.
        :raises PeerDiedError: no endpoint listens at the address.
        :raises CommTimeoutError: the endpoint does not answer in time.
        :raises AuthError: the endpoint has another token.
        """
        line = self._call.run()
        line.tell(HELLOS.encode(EndpointHello(self._mine, self.nonce, self._number)))
        return line, ANSWERS.decode(line.hear())


class Pair(StoreRendezvous):
    """A rendezvous of two endpoints as ranks 0 and 1. The rendezvous uses a connection instead of a store."""

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
    """Return the seal that signs the messages of two endpoints while they connect. Both ends get the same seal."""
    return Seal(job_token(), "endpoints", caller.endpoint.hex(), called.endpoint.hex()).child(
        *(nonce.hex() for nonce in nonces)
    )
