"""The meeting of two endpoints: they form a communicator over the connection that one of them has made."""

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
    """The first words of the endpoint that connects."""

    address: bytes
    """The address of the endpoint that connects."""
    nonce: bytes
    number: int = 0
    """The number of the call. Calls of one endpoint may overtake each other; all but its last one were given up."""


class EndpointAnswer(msgspec.Struct, array_like=True):
    """The answer to these words."""

    nonce: bytes
    refusal: str = ""
    """The reason why they do not form a connection; empty: they do."""
    crossed: bool = False
    """The refusal is that the other one is connecting to this one, too."""


HELLOS: Final = ControlCodec[EndpointHello](EndpointHello, "what the other endpoint says")
ANSWERS: Final = ControlCodec[EndpointAnswer](EndpointAnswer, "what the other endpoint says")


class EndpointCall:
    """A call of another endpoint: connects, proves to be of the job, and says who this is."""

    def __init__(self, address: Address, mine: bytes, number: int, seconds: float) -> None:
        """Begin with nothing.

        :param mine: this endpoint's address.
        :param number: higher than that of this endpoint's earlier calls.
        :param seconds: for all of it.
        :raises CommError: there is no descriptor for it.
        """
        self._mine, self._number = mine, number
        self._call = wires().call(address.host, address.port, address.secret("connect"), seconds, address.name)
        self.nonce: bytes = os.urandom(16)
        """The number that this end has chosen for the seal."""
        self.hang_up: Callable[[], None] = self._call.hang_up

    def run(self) -> tuple[EndpointLine, EndpointAnswer]:
        """Make it. Blocks, until it is hung up at the latest.

        :returns: the connection, and what the endpoint answers.
        :raises PeerDiedError: no endpoint listens there.
        :raises CommTimeoutError: it does not answer.
        :raises AuthError: the endpoint has another token.
        """
        line = self._call.run()
        line.tell(HELLOS.encode(EndpointHello(self._mine, self.nonce, self._number)))
        return line, ANSWERS.decode(line.hear())


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
