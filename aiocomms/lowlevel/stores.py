"""Functions that open a job's store, and a function that replaces the errors of ``torch.distributed`` stores.

All these functions except :func:`admitting` block.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import cast

import anyio
from torch.distributed import Store

from aiocomms.errors import StoreLostError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import mac, read_token
from aiocomms.lowlevel.jobstore import JobStore, prove
from aiocomms.lowlevel.sockets import listen_at
from aiocomms.lowlevel.storeserver import StoreServer
from aiocomms.lowlevel.threads import run_in_thread


@contextlib.contextmanager
def store_errors(what: str = "the rendezvous store is lost", *, rank: int | None = None) -> Iterator[None]:
    """Raise :class:`StoreLostError` in place of an error of torch's stores.

    Use this function as a context manager or decorator.

    All errors of torch's stores are RuntimeErrors. The texts of some errors contain a stack trace, which this function
    drops.

    :param what: the beginning of the error's message.
    :param rank: this rank; None if the caller adds the rank to the error.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise StoreLostError(f"{what}: {reason}", rank=rank) from error


def new_server(listener: socket.socket) -> StoreServer:
    """Serve a new store to the ranks of this job.

    :param listener: the listening socket, which the server owns and closes from now on.
    :raises CommError: no descriptor or no thread is left for the server.
    """
    token = read_token(os.environ)
    return StoreServer(listener, _key(token), guarded=token is None)


def enter(connection: socket.socket, host: str, port: int, rank: int, timeout: float) -> JobStore:
    """Return the store at the other end of a connection.

    :param connection: the connection, which the store closes when the store ends. If this function raises an error, it
        has closed the connection.
    :raises AuthError: the server has another token.
    :raises ProtocolError: the server is a store of another version, or is not the store of a job.
    :raises OSError: the server does not answer.
    """
    return JobStore(host, port, prove(connection, _key(read_token(os.environ)), rank, timeout), timeout)


def serve_store(host: str, timeout: float) -> tuple[JobStore, int]:
    """Serve a new store at one address of this machine, on a free port. Blocks.

    :param host: the address.
    :param timeout: the store's default timeout, in seconds.
    :returns: the store and its port. The server runs at least as long as the store object exists.
    :raises OSError: the host is not an address of this machine.
    :raises CommError: no descriptor or no thread is left for the server.
    """
    if clock.simulation is not None:
        return cast("tuple[JobStore, int]", clock.simulation.serve_store())
    listener = listen_at(host)
    port = int(listener.getsockname()[1])
    return JobStore(host, port, new_server(listener), timeout), port


def reach_store(host: str, port: int, rank: int, timeout: float) -> JobStore:
    """Connect to a store that another rank serves. Blocks.

    :param rank: this rank.
    :raises StoreLostError: no process serves a store at this host and port.
    :raises AuthError: the server has another token.
    :raises ProtocolError: the server is a store of another version, or is not the store of a job.
    """
    try:
        if clock.simulation is not None:
            return cast("JobStore", clock.simulation.reach_store(host, port, timeout))
        return enter(socket.create_connection((host, port), timeout), host, port, rank, timeout)
    except OSError as error:
        raise StoreLostError(f"the new store at {host}:{port} cannot be reached: {error}") from error


@contextlib.asynccontextmanager
async def admitting(store: Store | None) -> AsyncIterator[None]:
    """Let ranks connect to a store while the caller forms a communicator.

    If this process serves the store, the store stops listening at the end of the context, unless another of these
    contexts is open.
    """
    if not isinstance(store, JobStore) or not store.serves:
        yield
        return
    with anyio.CancelScope(shield=True):  # The server's thread does this at once.
        listening = await run_in_thread(store.listening, anyhow=True)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await run_in_thread(listening.close, anyhow=True)


def _key(token: bytes | None) -> bytes:
    return mac(token or b"", "aiocomms", "store")
