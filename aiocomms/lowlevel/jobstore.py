"""The client of a job's store.

In the server's process, the client calls the server directly. In other processes, the client uses an authenticated
connection.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import msgspec
from torch.distributed import DistNetworkError, DistStoreError, Store

from aiocomms.errors import AuthError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.forks import Unshared
from aiocomms.lowlevel.handshake import RefusedError, connector_dialogue
from aiocomms.lowlevel.sockets import read_exactly, tune
from aiocomms.lowlevel.storeserver import LENGTH, LONGEST, OUTAGE, SERVER, StoreServer, perform

_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.05
"""The longest pause in seconds between two queries for a key that was not set yet."""


class JobStore(Store):
    """A ``torch.distributed.Store`` that uses the server of this process, or a connection to another process's server.

    torch's wrappers (``PrefixStore``) hold no reference to this object, so the user of a wrapper must keep a reference.
    When no reference is left, the store releases the server, or closes the connection.
    """

    host: str
    port: int

    def __init__(self, host: str, port: int, made_of: StoreServer | socket.socket, timeout: float) -> None:
        """Create the store.

        :param made_of: the server of this process, or an authenticated connection to another process's server.
        :param timeout: the time in seconds for which a call waits for an answer or for a key.
        """
        self._server = made_of if isinstance(made_of, StoreServer) else None
        self._connection = None if isinstance(made_of, StoreServer) else made_of
        super().__init__()
        self.timeout: timedelta  # torch's stubs do not know this attribute.
        self.set_timeout(timedelta(seconds=timeout))
        self.host, self.port = host, port
        self._lock = threading.Lock()  # A connection carries one request at a time.
        Unshared((host, port)).belongs_to(self)

    def __del__(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._server is not None and not sys.is_finalizing():  # The server's thread does not run at finalization.
            self._server.let_go()

    @property
    def serves(self) -> bool:
        """True while this process serves the store."""
        return self._server is not None and self._server.is_there

    def listening(self) -> contextlib.ExitStack:
        """Enter the context of :meth:`admitting`. Return a stack whose ``close`` exits this context.

        Both the entry and the exit block.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.admitting())
            return stack.pop_all()

    @contextlib.contextmanager
    def admitting(self) -> Iterator[None]:
        """Let new ranks connect within the context, if this process serves the store.

        When the last of these contexts ends, the store closes the port.
        """
        with contextlib.nullcontext() if self._server is None else self._server.listening():
            yield

    def _ask(self, what: str, *args: Any) -> Any:
        if self._server is not None:
            return perform(self._server.kept, what, args)
        request = msgspec.msgpack.encode((what, *args))
        if len(request) > LONGEST:
            raise DistStoreError(f"the request takes {len(request)} bytes, wanted at most {LONGEST}")
        with self._lock:
            connection = self._connection
            if connection is None:
                raise DistNetworkError("the connection with it was lost")
            try:
                connection.settimeout(self.timeout.total_seconds())
                connection.sendall(LENGTH.pack(len(request)) + request)
                (length,) = LENGTH.unpack(read_exactly(connection, LENGTH.size))
                answer = read_exactly(connection, length)
            except OSError as error:
                self._connection = None  # The rest of this answer would be taken for the next one.
                connection.close()
                raise DistNetworkError(f"the connection with it was lost: {error}") from error
        return msgspec.msgpack.decode(answer)

    # ------------------------------------------------------------------------------------ the methods of torch's stores

    def set(self, key: str, value: str | bytes) -> None:
        """See ``torch.distributed.Store.set``. In this class, the value may also be bytes."""
        self._ask("set", key, _raw(value))

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store.get``. The call waits until the key is set."""
        value: bytes | None = self._ask("get", key)
        return self.multi_get([key])[0] if value is None else value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See ``torch.distributed.Store.multi_get``. The call waits until all keys are set."""
        values: list[bytes | None] = self._ask("multi_get", keys)
        if None in values:
            self.wait(keys)
            values = self._ask("multi_get", keys)
        if None in values:
            raise DistStoreError(f"some of the keys {keys} were deleted")
        return values  # type: ignore[return-value]  # No value is None.

    def append(self, key: str, value: str | bytes) -> None:
        """See ``torch.distributed.Store.append``. In this class, the value may also be bytes."""
        self._ask("append", key, _raw(value))

    def add(self, key: str, amount: int) -> int:
        """See ``torch.distributed.Store.add``."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See ``torch.distributed.Store.compare_set``."""
        return bytes(self._ask("compare_set", key, _raw(expected), _raw(desired)))

    def check(self, keys: list[str]) -> bool:
        """See ``torch.distributed.Store.check``."""
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See ``torch.distributed.Store.wait``.

        :raises DistStoreError: a key was not set before the timeout.
        """
        patience = (self.timeout if timeout is None else timeout).total_seconds()
        ends, pause = clock.now() + patience, _FIRST_PAUSE
        while not self.check(keys):
            if clock.now() >= ends:
                raise DistStoreError(f"after {patience:g} s some of the keys {keys} were not set")
            clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def delete_key(self, key: str) -> bool:
        """See ``torch.distributed.Store.delete_key``."""
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        """See ``torch.distributed.Store.num_keys``."""
        return int(self._ask("num_keys"))

    def clone(self) -> JobStore:
        """Return the store itself. One connection is enough, because the server never waits for a key."""
        return self

    deleteKey: Final = delete_key  # noqa: N815 - torch looks these two up by their names in C++
    getNumKeys: Final = num_keys  # noqa: N815


def prove(connection: socket.socket, key: bytes, rank: int, patience: float, to: str = SERVER) -> socket.socket:
    """Prove to a server that this process is a rank of its job. Blocks.

    :param connection: a connection to the server, which is closed if this function raises an error.
    :param to: the name of the server.
    :returns: the connection.
    :raises AuthError: the server has another token.
    :raises ProtocolError: the server has another version, or uses another protocol.
    :raises OSError: the server closes the connection, or does not answer in time.
    """
    try:
        dialogue = connector_dialogue(tune(connection, OUTAGE), key, rank, to)
        connection.settimeout(patience)
        wanted = next(dialogue)
        try:
            while True:
                wanted = dialogue.send(read_exactly(connection, wanted))
        except StopIteration:
            return connection
        except RefusedError:
            raise AuthError(f"the process that answers there is not {to} of this job; check the token") from None
    except BaseException:
        connection.close()
        raise


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
