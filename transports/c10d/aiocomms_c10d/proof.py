"""gloo knows no strangers: what it reads in the store is signed here, and each of its connections is proved."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import Store

from aiocomms.errors import AuthError
from aiocomms.trust import MAX_RECORD, mac, same

_MAC: Final = 32
_TAG: Final = 2
"""Of gloo: apart from those of the frames."""


class SignedStore(Store):
    """A store in which whoever has not the key can write nothing that is believed; as much of one as gloo uses."""

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store = store
        self._key = key

    def set(self, key: str, value: Any) -> None:
        """Write a value; bytes, or text."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
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
    given = [_proof(key, rank, peer) for peer in peers]
    taken = [torch.empty(_MAC, dtype=torch.uint8) for _ in peers]
    works = [group.recv([tensor], peer, _TAG) for tensor, peer in zip(taken, peers, strict=True)]
    works += [group.send([tensor], peer, _TAG) for tensor, peer in zip(given, peers, strict=True)]
    for work in works:
        work.wait()
    for tensor, peer in zip(taken, peers, strict=True):
        if not same(bytes(tensor.tolist()), bytes(_proof(key, peer, rank).tolist())):
            raise AuthError(f"who is connected in the place of rank {peer} does not prove to be that rank", peer=peer)


def _proof(key: bytes, src: int, dst: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(mac(key, "proof", src, dst)), dtype=torch.uint8)
