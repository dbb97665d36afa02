"""``torch.distributed`` stores: one's own, and what their errors mean. Everything here blocks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch
from torch.distributed import TCPStore

from aiocomms.errors import StoreLostError
from aiocomms.lowlevel.forks import Unshared

# The libuv server limits the size of a stranger's request, and never waits for the rest of one. Since torch 2.8
# (PR 150215) it can serve a listening socket that it did not make.
USE_LIBUV: Final = torch.__version__ >= "2.8"


@contextlib.contextmanager
def store_errors(what: str = "the rendezvous store is gone", *, rank: int | None = None) -> Iterator[None]:
    """Raise a :class:`StoreLostError` in place of what torch's stores raise; also a decorator.

    This is the one place that knows torch's errors: all are RuntimeErrors, some with a stack trace in their text.

    :param what: the beginning of the message.
    :param rank: this rank, where the caller does not add it.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise StoreLostError(f"{what}: {reason}", rank=rank) from error


def keep_from_children(store: TCPStore, host: str, port: int) -> TCPStore:
    """Have a forked child close its copies of a store's connections.

    :param host: the literal address of its server.
    :returns: the store.
    """
    Unshared((host, port)).belongs_to(store)
    return store


def serve_store(host: str, size: int, timeout: float) -> tuple[TCPStore, int]:
    """Serve a new store at one address of this machine, on a free port. Blocks.

    :param host: the address.
    :param size: the number of ranks.
    :param timeout: the store's default timeout, in seconds.
    :returns: the store, which is served as long as it lives, and its port.
    :raises StoreLostError: torch cannot serve it.
    :raises OSError: it is no address of this machine.
    """
    # Without a socket of ours the server would listen on every interface.
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = int(listener.getsockname()[1])
    with store_errors(f"no store can be served at {host}"):
        store = TCPStore(
            host, port, size, True, timedelta(seconds=timeout), wait_for_workers=False,
            master_listen_fd=listener.detach(), use_libuv=USE_LIBUV,
        )  # fmt: skip
    return keep_from_children(store, host, port), port


def reach_store(host: str, port: int, size: int, timeout: float) -> TCPStore:
    """Connect to a store that another rank serves; blocks.

    :raises StoreLostError: nobody serves it there.
    """
    with store_errors(f"the new store at {host}:{port} cannot be reached"):
        store = TCPStore(host, port, size, False, timedelta(seconds=timeout), wait_for_workers=False)
    return keep_from_children(store, host, port)
