"""gloo knows no strangers: what it reads in the store is signed here, and each of its connections is proved.

And it goes on listening when every rank is there, and keeps a descriptor for whoever connects: so it is made deaf.
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
from aiocomms.lowlevel import MAX_RECORD, mac, same

_MAC: Final = 32
_TAG: Final = 2
"""Of gloo: apart from those of the frames."""
_SO_ATTACH_FILTER: Final = 26


class SignedStore(Store):
    """A store in which whoever has not the key can write nothing that is believed; as much of one as gloo uses."""

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self.written = b""
        """All that was."""

    def set(self, key: str, value: Any) -> None:
        """Write a value; bytes, or text."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self.written += raw
        self._store.set(key, mac(self._key, key, raw) + raw)  # type: ignore[arg-type]  # bytes are fine

    def get(self, key: str) -> bytes:
        """Read a value.

        :raises AuthError: somebody else wrote it.
        """
        record = self._store.get(key)
        value = record[_MAC:]
        if len(value) > MAX_RECORD or not same(record[:_MAC], mac(self._key, key, value)):
            raise AuthError(f"gloo's record {key!r} in the store is not signed with this job's token")
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        """Wait until all are there."""
        self._store.wait(keys, timeout)


def prove(group: Any, rank: int, size: int, key: bytes) -> None:
    """Prove to every rank that this one knows the key, and have them prove it; blocks.

    :param group: gloo, just connected: a connection is its owner's who was first there.
    :raises AuthError: a rank does not.
    :raises RuntimeError: a connection broke, or nothing came in time.
    """
    peers = [peer for peer in range(size) if peer != rank]
    sent = [_proof(key, rank, peer) for peer in peers]
    received = [torch.empty(_MAC, dtype=torch.uint8) for _ in peers]
    works = [group.recv([tensor], peer, _TAG) for tensor, peer in zip(received, peers, strict=True)]
    works += [group.send([tensor], peer, _TAG) for tensor, peer in zip(sent, peers, strict=True)]
    for work in works:
        work.wait()
    for tensor, peer in zip(received, peers, strict=True):
        if not same(bytes(tensor.tolist()), bytes(_proof(key, peer, rank).tolist())):
            raise AuthError(f"who is connected in the place of rank {peer} does not prove to be that rank", peer=peer)


def stop_listening(written: bytes) -> None:
    """Let nobody connect any more to where gloo listens.

    Its socket cannot be closed without its knowledge; but it can be told to drop what comes. Connections that exist
    are not concerned.

    :param written: what gloo has told the others; its address, as the kernel has it, is in there.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # of what has been closed meanwhile
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as candidate:
                    internet = candidate.family in (socket.AF_INET, socket.AF_INET6)
                    listens = internet and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if listens and _address(candidate) in written:
                        candidate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _address(listener: socket.socket) -> bytes:
    """As struct sockaddr_in or sockaddr_in6, without its scope."""
    host, port, *flow = listener.getsockname()
    head = struct.pack("=H", listener.family) + struct.pack("!H", port) + (struct.pack("!I", flow[0]) if flow else b"")
    return head + socket.inet_pton(listener.family, host.partition("%")[0])


def _proof(key: bytes, src: int, dst: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(mac(key, "proof", src, dst)), dtype=torch.uint8)
