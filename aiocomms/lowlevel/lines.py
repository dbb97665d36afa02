"""The wire between two processes, as endpoints need it: sockets are one (``wires.py``), a simulation has another.

A process listens, and others call it. A call leads to a line, on which the two say one message after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, Protocol

ENDPOINT: Final = "the endpoint"
"""The name of the endpoint that is called, in place of a rank, in a proof."""
CALLER: Final = 0
"""The rank of the endpoint that connects; the other one has 1."""


class EndpointLine(Protocol):
    """A connection with another endpoint, for one message after the other. It blocks.

    That of a call has the time that the call has left. One that was let in has none before :meth:`extend`.
    """

    host: str
    """The address of the other end's host."""

    def tell(self, what: bytes) -> None:
        """Send a message.

        :raises PeerDiedError: the other one has gone.
        :raises CommTimeoutError: time is up.
        """

    def hear(self) -> bytes:
        """Wait for the next message.

        :raises PeerDiedError: the other one has gone, and all that it has said was heard.
        :raises CommTimeoutError: time is up.
        :raises ProtocolError: it makes no sense.
        """

    def extend(self, seconds: float) -> None:
        """Give them so long from now on."""

    def close(self) -> None:
        """Close it, on any thread; one that waits for it goes on with :class:`PeerDiedError`. Idempotent."""


class LineCall(Protocol):
    """A call of an endpoint."""

    def run(self) -> EndpointLine:
        """Make it, and prove to be of the job. Blocks, until :meth:`hang_up` at the latest.

        :raises PeerDiedError: no endpoint listens there.
        :raises CommTimeoutError: it does not answer.
        :raises AuthError: the endpoint has another token.
        """

    def hang_up(self) -> None:
        """End it and its line, on any thread; one that makes it or waits for its line goes on. Idempotent."""


class ReceptionDriver(Protocol):
    """The part of :class:`aiocomms.progress.driver.LoopDriver` that serves a reception."""

    def attach(self, transport: Any) -> None:
        """Serve something from now on, which is :class:`aiocomms.progress.driver.Served`."""

    def detach(self, transport: Any) -> None:
        """Stop serving it. Idempotent."""

    def spawn(self, call: Callable[[], Coroutine[Any, Any, None]], context: Context, /) -> None:
        """Start a task."""

    def call_threadsafe(self, fn: Callable[..., object], *args: object) -> bool:
        """Make a call on the loop's thread, from any thread. False: the loop is gone."""


class Reception(Protocol):
    """The place at which one endpoint is called."""

    host: str
    """The address of this host at which it listens."""
    port: int

    def open(self, key: bytes, let_in: Callable[[EndpointLine], object]) -> None:
        """Let others in from now on.

        :param key: what only who belongs to the job can know, if it has a token.
        :param let_in: called on the loop's thread with the line of each call that is proved.
        """

    def close(self) -> None:
        """Listen no more. ``let_in`` is not called afterwards."""


class Wires(Protocol):
    """The maker of both."""

    def find(self, host: str) -> Callable[[ReceptionDriver], Reception]:
        """Find where an endpoint listens. Blocks: a name has to be looked up.

        :param host: a name or an address of this host.
        :returns: a function that listens there, on a free port, and does not block. It raises an ArgumentError if the
            host is not one address of this one, or others could reach it and the job has no token; and a CommError if
            nothing can listen.
        :raises ArgumentError: the host is no address.
        """

    def call(self, host: str, port: int, key: bytes, seconds: float, name: str) -> LineCall:
        """Begin a call. It does not block.

        :param key: what the reception was opened with.
        :param seconds: for all of it, and for what is said on its line.
        :param name: the endpoint's, for messages.
        :raises CommError: there is no descriptor for it.
        """
