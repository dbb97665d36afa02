"""Credentials of an endpoint, as bytes: its address, by which others connect, and descriptors of its regions.

A process with the job's token can check an address, and so no process is led to a stranger. A descriptor is checked by
the endpoint that made it, and by no other: its key never leaves that endpoint.
"""

from __future__ import annotations

import math
import secrets
from typing import Final

import msgspec
import torch

from aiocomms import arguments
from aiocomms.core.postmortem import printable
from aiocomms.errors import ArgumentError, AuthError, ProtocolError, RegionError
from aiocomms.lowlevel import HEAD_BYTES, ControlCodec, Dialect, clock, mac, same
from aiocomms.lowlevel.auth import job_token
from aiocomms.ops import checks

FORGED: Final = "its owner has not made this descriptor, or it was changed"
_MAC: Final = 32
LONGEST: Final = 1024
"""Bytes of an address, and of a descriptor."""
LONGEST_LABEL: Final = 64
"""Characters of a name that an address has room for."""
_ADDRESS: Final = Dialect("an endpoint's address", b"aioA", 1)
_DESCRIPTOR: Final = Dialect("a region's descriptor", b"aioD", 1)
DTYPES: Final = {str(dtype): dtype for dtype in checks.DTYPES}


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address of an endpoint: where it is, and the transports that it speaks."""

    endpoint: bytes
    """16 random bytes, which tell it from every other one."""
    host: str
    port: int
    transports: dict[str, str]
    """Names of transports by family of ops."""
    device: str
    expires: float
    """The time after which no endpoint connects by it, in seconds since 1970; infinity: there is none."""
    label: str = ""
    """The beginning of the name that it was opened with; empty: it has none."""

    @property
    def name(self) -> str:
        """Its name for people: the label, and the beginning of the endpoint's number."""
        number = self.endpoint.hex()[:8]
        return f"{printable(self.label, LONGEST_LABEL)}@{number}" if self.label else number

    def pack(self) -> bytes:
        """Return it as bytes, signed with the job's token if there is one."""
        payload = _ADDRESSES.encode(self)
        return _ADDRESS.head + mac(_key(), "address", _ADDRESS.head, payload) + payload

    def secret(self, purpose: str) -> bytes:
        """Return a key for the connections that this address makes. Without a token everybody knows it."""
        return mac(_key(), purpose, self.endpoint)


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """A region, and what may be done with it."""

    endpoint: bytes
    """Its owner."""
    number: int
    """The number of the region on its owner. It is never used again, and so it is the region's generation, too."""
    dtype: str
    count: int
    """Elements."""
    read: bool
    write: bool
    expires: float
    """See :attr:`Address.expires`."""

    def pack(self, key: bytes) -> bytes:
        """Return it as bytes, signed.

        :param key: the owner's own.
        """
        payload = _DESCRIPTORS.encode(self)
        return _DESCRIPTOR.head + mac(key, "descriptor", _DESCRIPTOR.head, payload) + payload


_ADDRESSES = ControlCodec[Address](Address, "it", limit=LONGEST)
_DESCRIPTORS = ControlCodec[Descriptor](Descriptor, "it", limit=LONGEST)


def new_key() -> bytes:
    """Return a key that no other process knows."""
    return secrets.token_bytes(32)


def expiry(name: str, lifetime: arguments.Timeout) -> float:
    """Return when something expires that is made now.

    :param lifetime: seconds, or None for ever.
    :raises ArgumentError: it is neither.
    """
    seconds = arguments.deadline(name, lifetime)
    return math.inf if seconds == math.inf else clock.wall() + seconds


def expired(expires: float) -> bool:
    """Return whether it has expired, by this host's clock."""
    return clock.wall() >= expires


def read_address(data: object, *, late: bool = False) -> Address:
    """Decode an address, and check it.

    :param late: it may have expired: only who connects by it is to mind that.
    :raises ArgumentTypeError: it is not bytes.
    :raises ArgumentError: it is no address, or has expired.
    :raises AuthError: it was not made with this job's token.
    """
    raw = _bytes("address", data)
    try:
        payload = _ADDRESS.check(raw, "address")
    except ProtocolError as error:
        raise ArgumentError(f"address is not an endpoint's: {error.message}") from None
    if not same(payload[:_MAC], mac(_key(), "address", _ADDRESS.head, payload[_MAC:])):
        raise AuthError("address was not made with this job's token, or was changed")
    try:
        address = _ADDRESSES.decode(payload[_MAC:])
    except ProtocolError as error:
        raise ArgumentError(f"address is not an endpoint's: {error.message}") from None
    if not late and expired(address.expires):
        raise ArgumentError(f"address has expired {clock.wall() - address.expires:.3g} s ago: ask for a fresh one")
    return address


def read_descriptor(data: object) -> Descriptor:
    """Decode a descriptor. What it says is not to be believed before its owner has checked it.

    :raises ArgumentTypeError: it is not bytes.
    :raises RegionError: it is no descriptor.
    """
    raw = _bytes("descriptor", data)
    try:
        found = _DESCRIPTORS.decode(_DESCRIPTOR.check(raw, "descriptor")[_MAC:])
    except ProtocolError as error:
        raise RegionError(f"descriptor is not a region's: {error.message}") from None
    if found.dtype not in DTYPES or not 0 <= found.count < 2**62 or not 0 <= found.number < 2**62:
        raise RegionError("descriptor is not a region's: it makes no sense")
    return found


def check_descriptor(data: bytes, key: bytes) -> Descriptor:
    """Decode a descriptor of this endpoint's.

    :param key: with which this endpoint signs them.
    :raises RegionError: this endpoint has not made it, or it has expired.
    """
    found = read_descriptor(data)
    if not same(data, found.pack(key)):  # This refuses the same content in another encoding, too.
        raise RegionError(FORGED)
    if expired(found.expires):
        raise RegionError("the descriptor has expired")
    return found


def dtype_of(descriptor: Descriptor) -> torch.dtype:
    """Return the dtype of a region."""
    return DTYPES[descriptor.dtype]


def _key() -> bytes:
    return mac(job_token() or b"", "aiocomms", "endpoint")


def _bytes(name: str, data: object) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise arguments.wrong_type(name, data, "bytes")
    raw = bytes(data)
    return raw if HEAD_BYTES + _MAC < len(raw) <= LONGEST else b""
