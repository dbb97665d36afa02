"""Authentication for gloo: signed records in the store, and a proof on each connection that the peer knows a key.

gloo does not authenticate peers. After all ranks have connected, gloo still listens, and keeps a descriptor for each
process that connects. So this module makes gloo's listening socket drop all new connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed import Store

from aiocomms.errors import AuthError
from aiocomms.lowlevel import MAX_RECORD, Unshared, buffers, mac, same

_MAC: Final = 32
_TAG: Final = 2
"""The gloo tag of the messages with proofs; frames use other tags."""
_SO_ATTACH_FILTER: Final = 26


class SignedStore(Store):
    """A store that signs the values that it writes, and checks the values that it reads.

    The store has only the methods that gloo uses.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self.unshared = Unshared()
        """The values that the ranks have written. These values contain the addresses at which gloo listens."""
        self.written = b""
        """The concatenation of all written values."""

    def set(self, key: str, value: Any) -> None:
        """Write a value of bytes or text."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self.written += raw
        self.unshared.add(raw)
        self._store.set(key, mac(self._key, key, raw) + raw)  # type: ignore[arg-type]  # torch takes bytes, too.

    def get(self, key: str) -> bytes:
        """Read a value.

        :raises AuthError: the process that wrote the value did not have this job's token.
        """
        record = self._store.get(key)
        value = record[_MAC:]
        if len(value) > MAX_RECORD or not same(record[:_MAC], mac(self._key, key, value)):
            raise AuthError(f"gloo's record {key!r} in the store is not signed with this job's token")
        self.unshared.add(value)
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether the store has all of ``keys``."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        """Wait until the store has all of ``keys``."""
        self._store.wait(keys, timeout)


def prove(group: Any, rank: int, size: int, key: bytes) -> None:
    """Prove to every rank that this rank knows ``key``, and check the proofs of all ranks. This function blocks.

    :param group: a new gloo group. gloo itself accepts any process that connects and claims to be a rank.
    :raises AuthError: a peer does not know ``key``.
    :raises RuntimeError: a connection broke, or a proof did not arrive in time.
    """
    peers = [peer for peer in range(size) if peer != rank]
    sent = [_proof(key, rank, peer) for peer in peers]
    received = [buffers.empty(_MAC, dtype=torch.uint8, device="cpu") for _ in peers]
    works = [group.recv([tensor], peer, _TAG) for tensor, peer in zip(received, peers, strict=True)]
    works += [group.send([tensor], peer, _TAG) for tensor, peer in zip(sent, peers, strict=True)]
    for work in works:
        work.wait()
    for tensor, peer in zip(received, peers, strict=True):
        if not same(bytes(tensor.tolist()), bytes(_proof(key, peer, rank).tolist())):
            raise AuthError(
                f"the process in the place of rank {peer} does not prove to be that rank; check tokens", peer=peer
            )


def stop_listening(written: bytes) -> None:
    """Drop all new connections to the socket on which gloo listens.

    Only gloo can close this socket, but a socket filter can make the socket drop new connections. Existing connections
    are not affected.

    :param written: the bytes that gloo has written to the store. These bytes contain gloo's address in the kernel's
        format.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # the BPF program "return 0"
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor may be closed by now
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as candidate:
                    internet = candidate.family in (socket.AF_INET, socket.AF_INET6)
                    listens = internet and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if listens and _address(candidate) in written:
                        candidate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _address(listener: socket.socket) -> bytes:
    """Return a socket's address as a ``struct sockaddr_in``, or as a ``sockaddr_in6`` without its scope."""
    host, port, *flow = listener.getsockname()
    head = struct.pack("=H", listener.family) + struct.pack("!H", port) + (struct.pack("!I", flow[0]) if flow else b"")
    return head + socket.inet_pton(listener.family, host.partition("%")[0])


def _proof(key: bytes, src: int, dst: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(mac(key, "proof", src, dst)), dtype=torch.uint8)
