"""The connections by which an endpoint calls another endpoint, over sockets (``wires.py``) or a simulated network.

An endpoint listens for calls, and other endpoints connect to it by calls. Each call opens a line, which is a connection
for messages between two endpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, Protocol

ENDPOINT: Final = "the endpoint"
"""The name of the called endpoint in the handshake, in place of a rank."""
CALLER: Final = 0
"""The rank that the connecting endpoint has in the communicator of both endpoints. The other endpoint has rank 1."""


class EndpointLine(Protocol):
    """A connection to another endpoint, for one message at a time. The connection's methods block.

    A line that :meth:`LineCall.run` returns has the deadline of its call. For a line that a :class:`Reception` has
    accepted, first call :meth:`extend`, because this method sets the deadline.
    """

    host: str
    """The address of the other end's host."""

    def tell(self, what: bytes) -> None:
        """Send a message.

        :raises PeerDiedError: the other endpoint is gone.
        :raises CommTimeoutError: the line's deadline has passed.
        """

    def hear(self) -> bytes:
        """Wait for the next message, and return it.

        :raises PeerDiedError: the other endpoint is gone, and all its messages were received.
        :raises CommTimeoutError: the line's deadline has passed.
        :raises ProtocolError: the message cannot be decoded.
        """

    def extend(self, seconds: float) -> None:
        """Set the deadline of all later messages to ``seconds`` seconds from now."""

    def close(self) -> None:
        """Close the line.

        Any thread may call this method. A thread that waits in :meth:`hear` gets :class:`PeerDiedError`.

        Idempotent.
        """


class LineCall(Protocol):
    """A call to another endpoint, which opens a line."""

    def run(self) -> EndpointLine:
        """Connect, and prove that this process belongs to the job.

        Block until the proof is complete, or until :meth:`hang_up` is called.

        :raises PeerDiedError: no endpoint listens at the address.
        :raises CommTimeoutError: the endpoint does not answer.
        :raises AuthError: the endpoint has another token.
        """

    def hang_up(self) -> None:
        """End the call and its line, and wake the threads that wait for the call or for the line.

        Any thread may call this method. Idempotent.
        """


class ReceptionDriver(Protocol):
    """The methods of :class:`aiocomms.progress.driver.LoopDriver` that a reception uses."""

    def attach(self, transport: Any) -> None:
        """Serve an :class:`aiocomms.progress.driver.Served` object from now on."""

    def detach(self, transport: Any) -> None:
        """Stop serving an object. Idempotent."""

    def spawn(self, call: Callable[[], Coroutine[Any, Any, None]], context: Context, /) -> None:
        """Start a task."""

    def call_threadsafe(self, fn: Callable[..., object], *args: object) -> bool:
        """Make a call on the loop's thread, from any thread. Return False if the loop is gone."""


class Reception(Protocol):
    """The listener of one endpoint, which accepts the calls of other endpoints."""

    host: str
    """The address of this host at which the endpoint listens."""
    port: int

    def open(self, key: bytes, let_in: Callable[[EndpointLine], object]) -> None:
        """Accept calls from now on.

        :param key: the key with which callers authenticate. If the job has a token, only processes of the job know this
            key.
        :param let_in: a function that is called on the event loop's thread with the line of each authenticated call.
        """

    def close(self) -> None:
        """Stop listening. After this call, ``let_in`` is not called any more."""


class Wires(Protocol):
    """A factory of receptions (listeners) and calls."""

    def find(self, host: str) -> Callable[[ReceptionDriver], Reception]:
        """Find the address at which an endpoint listens. This call blocks, because the lookup of a name may take time.

        :param host: a name or an address of this host.
        :returns: a function that listens at this address, on a free port, and does not block. The returned function
            raises an ArgumentError if ``host`` is a wildcard or is not an address of this host. The same error is
            raised if other hosts could reach the address and the job has no token. If listening fails, the returned
            function raises a CommError.
        :raises ArgumentError: ``host`` does not resolve to an address.
        """

    def call(self, host: str, port: int, key: bytes, seconds: float, name: str) -> LineCall:
        """Begin a call. Does not block.

        :param key: the key with which the reception was opened.
        :param seconds: the time in seconds for the call and all messages on its line, in total.
        :param name: the endpoint's name, for errors.
        :raises CommError: the process has no file descriptor left for the call.
        """
