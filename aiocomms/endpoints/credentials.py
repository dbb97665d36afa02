"""Credentials of an endpoint, as bytes: the address to which other endpoints connect, and descriptors of regions.

Every process with the job's token can check an address, and refuses a forged address. Only the endpoint that made a
descriptor can check the descriptor, because the key that signs descriptors never leaves that endpoint.
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
"""The largest number of bytes of an address, and of a descriptor."""
LONGEST_LABEL: Final = 64
"""The largest number of characters of a name in an address."""
_ADDRESS: Final = Dialect("an endpoint's address", b"aioA", 1)
_DESCRIPTOR: Final = Dialect("a region's descriptor", b"aioD", 1)
DTYPES: Final = {str(dtype): dtype for dtype in checks.DTYPES}


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address of an endpoint: its host and port, its transports and its device."""

    endpoint: bytes
    """The endpoint's number: 16 random bytes."""
    host: str
    port: int
    transports: dict[str, str]
    """The name of the transport for each family of ops."""
    device: str
    expires: float
    """The time when the address expires, in seconds since 1970; infinity if it never does."""
    label: str = ""
    """The beginning of the endpoint's name; empty if it has no name."""

    @property
    def name(self) -> str:
        """The endpoint's name in error messages: the label and the beginning of the endpoint's number."""
        number = self.endpoint.hex()[:8]
        return f"{printable(self.label, LONGEST_LABEL)}@{number}" if self.label else number

    @property
    def where(self) -> str:
        """The description of the endpoint in errors: its name, host and port."""
        return f"the endpoint {self.name} at {self.host}:{self.port}"

    def pack(self) -> bytes:
        """Return the address as bytes, signed with the job's token if there is one."""
        payload = _ADDRESSES.encode(self)
        return _ADDRESS.head + mac(_key(), "address", _ADDRESS.head, payload) + payload

    def secret(self, purpose: str) -> bytes:
        """Return a key for connections to this address. If the job has no token, the key is no secret."""
        return mac(_key(), purpose, self.endpoint)


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """A region and the rights to it."""

    endpoint: bytes
    """The number of the region's owner."""
    number: int
    """The number of the region. The region's owner never uses this number for another region."""
    dtype: str
    count: int
    """The number of the region's elements."""
    read: bool
    write: bool
    expires: float
    """See :attr:`Address.expires`."""

    def pack(self, key: bytes) -> bytes:
        """Return the descriptor as signed bytes.

        :param key: the owner's key.
        """
        payload = _DESCRIPTORS.encode(self)
        return _DESCRIPTOR.head + mac(key, "descriptor", _DESCRIPTOR.head, payload) + payload


_ADDRESSES = ControlCodec[Address](Address, "it", limit=LONGEST)
_DESCRIPTORS = ControlCodec[Descriptor](Descriptor, "it", limit=LONGEST)


def new_key() -> bytes:
    """Return a random key of 32 bytes."""
    return secrets.token_bytes(32)


def expiry(name: str, lifetime: arguments.Timeout) -> float:
    """Return the end of a lifetime that begins now, in seconds since 1970.

    :param lifetime: seconds; None for no end.
    :raises ArgumentError: the lifetime is neither None nor a valid number of seconds.
    """
    seconds = arguments.deadline(name, lifetime)
    return math.inf if seconds == math.inf else clock.wall() + seconds


def expired(expires: float) -> bool:
    """Return whether a time has passed, by this host's clock."""
    return clock.wall() >= expires


def read_address(data: object, *, late: bool = False) -> Address:
    """Decode and check an address.

    :param late: whether to accept an expired address. An endpoint does not connect to an expired address. But the
        endpoint accepts a connection from an endpoint whose address has expired.
    :raises ArgumentTypeError: the data is not bytes.
    :raises ArgumentError: the data is no address, or the address has expired.
    :raises AuthError: the address was not made with this job's token.
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
    """Decode a descriptor.

    Only the endpoint that made the descriptor can check the signature, so this function does not check it.

    :raises ArgumentTypeError: the data is not bytes.
    :raises RegionError: the data is no descriptor.
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
    """Decode and check a descriptor that this endpoint has made.

    :param key: the key that signs this endpoint's descriptors.
    :raises RegionError: this endpoint has not made the descriptor, or the descriptor has expired.
    """
    found = read_descriptor(data)
    if not same(data, found.pack(key)):  # The comparison also refuses the same content in another encoding.
        raise RegionError(FORGED)
    if expired(found.expires):
        raise RegionError("the descriptor has expired: ask the owner of the region for a fresh one")
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
