"""The job's token, which proves that a rank belongs to the job, and the limits of a job without a token."""

from __future__ import annotations

import errno
import functools
import hmac
import os
import stat
from collections.abc import Mapping
from typing import Final, NoReturn

from aiocomms.errors import ArgumentError, AuthError, ProtocolError
from aiocomms.lowlevel.versions import HEAD_BYTES, Dialect

MAX_RECORD: Final = 64 * 1024
"""The largest size in bytes of a rank's record in the store."""

RENDEZVOUS = Dialect("the rendezvous", b"aioR", 3)
"""The format of the rendezvous: the records that ranks write to a store, and the rules for these records."""

_TOKEN: Final = "AIOCOMMS_TOKEN"  # noqa: S105 - a variable's name
_TOKEN_FILE: Final = "AIOCOMMS_TOKEN_FILE"  # noqa: S105
_ALLOWED: Final = "AIOCOMMS_ALLOW_UNAUTHENTICATED"
_SHORTEST, _LONGEST = 16, 4096
_PLAIN, _SIGNED = b"\x01", b"\x02"
_MAC: Final = 32


def read_token(environ: Mapping[str, str]) -> bytes | None:
    """Return the job's token from ``AIOCOMMS_TOKEN`` or from the file in ``AIOCOMMS_TOKEN_FILE``; None without a token.

    :param environ: the environment, as ``os.environ``.
    :raises ArgumentError: both variables are set; the token is too short or too long; the file cannot be read; or other
        users can access the file.
    """
    text, path = environ.get(_TOKEN), environ.get(_TOKEN_FILE)
    if text is not None and path is not None:
        raise ArgumentError(f"{_TOKEN} and {_TOKEN_FILE} are both set, wanted one of them")
    if path is not None:
        return _checked(_TOKEN_FILE, _read_private(path).strip())
    return None if text is None else _checked(_TOKEN, text.strip().encode(errors="surrogateescape"))


def job_token() -> bytes | None:
    """Return this job's token; None if the job has no token.

    The token is read only once, because a read from a slow disk would block the event loop.

    :raises ArgumentError: as :func:`read_token`.
    """
    return _kept(os.environ.get(_TOKEN), os.environ.get(_TOKEN_FILE))


@functools.cache
def _kept(text: str | None, path: str | None) -> bytes | None:
    given = {_TOKEN: text, _TOKEN_FILE: path}
    return read_token({name: value for name, value in given.items() if value is not None})


def check_exposed(what: str) -> None:
    """Check that the job has a token, before a port is opened to other hosts.

    A user can also allow a job without a token, by ``AIOCOMMS_ALLOW_UNAUTHENTICATED``.

    :param what: the beginning of the error's message, which names the port that other hosts could reach.
    :raises ArgumentError: the job has no token, and ``AIOCOMMS_ALLOW_UNAUTHENTICATED`` does not allow a job without a
        token.
    """
    if os.environ.get(_ALLOWED, "0") in ("", "0") and job_token() is None:
        raise ArgumentError(
            f"{what}, and this job has no token: any process that reaches it could join. Give every rank the same "
            f"random text in {_TOKEN}, or in a file of mode 0600 that {_TOKEN_FILE} names; or, on a network that no "
            f"one else reaches, set {_ALLOWED}=1"
        )


def mac(key: bytes, *parts: bytes | str | int) -> bytes:
    """Return the HMAC-SHA256 of values and of their lengths. So ``"ab", "c"`` and ``"a", "bc"`` give different MACs."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    message = b"".join(len(part).to_bytes(8, "big") + part for part in encoded)
    return hmac.digest(key, message, "sha256")


def same(a: bytes, b: bytes) -> bool:
    """Return whether two values are equal.

    The duration of the comparison does not depend on the position of the first difference.
    """
    return hmac.compare_digest(a, b)


def claimed(record: bytes) -> bytes:
    """Return the value of a record in the store, without a check of the record's signature.

    The record may come from a rank with another version of aiocomms.
    """
    kind, rest = record[HEAD_BYTES : HEAD_BYTES + 1], record[HEAD_BYTES + 1 :]
    return rest[_MAC:] if kind == _SIGNED else rest


class Seal:
    """A signer of one rank's records in the store, which also verifies the records of the communicator's other ranks.

    If the job has no token, the seal signs nothing, and any process can compute the result of :meth:`secret`. The key
    is confidential, so ``repr`` does not show the key, and a seal cannot be pickled.
    """

    __slots__ = ("_key", "_signs")

    def __init__(self, token: bytes | None, *scope: str | int) -> None:
        """Create the seal of a communicator.

        :param scope: the values that distinguish this communicator from all others.
        """
        self._signs = token is not None
        self._key = mac(token or b"", "aiocomms", *scope)

    def child(self, *scope: str | int) -> Seal:
        """Return the seal of a communicator that has some of this communicator's ranks."""
        child = Seal(None)
        child._signs = self._signs
        child._key = mac(self._key, "child", *scope)
        return child

    def secret(self, purpose: str) -> bytes:
        """Return 32 bytes that no process without the token can know.

        All ranks of the communicator get the same bytes.
        """
        return mac(self._key, "secret", purpose)

    def sign(self, key: str, rank: int, value: bytes) -> bytes:
        """Return a signed record of a rank, for the store.

        :raises ArgumentError: the value is longer than :data:`MAX_RECORD`.
        """
        if len(value) > MAX_RECORD:
            raise ArgumentError(f"the record {key!r} has {len(value)} bytes, wanted at most {MAX_RECORD}", rank=rank)
        sign = _SIGNED + mac(self._key, RENDEZVOUS.head, key, rank, value) if self._signs else _PLAIN
        return RENDEZVOUS.head + sign + value

    def verify(self, key: str, rank: int, record: bytes) -> bytes:
        """Return the value in a record of another rank, after a check of the record.

        :raises AuthError: that rank did not sign the record.
        :raises ProtocolError: the record is too long, has another version, or does not have the format of a record.
        """
        if len(record) > HEAD_BYTES + 1 + _MAC + MAX_RECORD:
            raise ProtocolError(f"rank {rank}'s record {key!r} in the store has {len(record)} bytes", peer=rank)
        other = RENDEZVOUS.other_version(record)
        signed = record[HEAD_BYTES:] if record[:HEAD_BYTES] == RENDEZVOUS.head else b""
        if self._signs:
            value = signed[1 + _MAC :]
            if not same(signed[: 1 + _MAC], _SIGNED + mac(self._key, RENDEZVOUS.head, key, rank, value)):
                why = "has no token" if signed[:1] == _PLAIN else "has another token, or another process wrote it"
                why = f"that rank {why}" if other is None else RENDEZVOUS.differs("that rank", other)
                raise AuthError(f"rank {rank}'s record {key!r} in the store is not signed: {why}", peer=rank)
            return value
        if other is not None:
            raise ProtocolError(RENDEZVOUS.differs(f"rank {rank}", other), peer=rank)
        if signed[:1] == _SIGNED:
            raise AuthError(f"rank {rank} has a token, and this rank has none: set {_TOKEN} on all ranks", peer=rank)
        if signed[:1] != _PLAIN:
            raise ProtocolError(f"rank {rank}'s record {key!r} in the store makes no sense", peer=rank)
        return signed[1:]

    def __repr__(self) -> str:
        return f"<Seal: {'signed' if self._signs else 'not signed'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a seal cannot be pickled: its key must not leave the process")


def _checked(name: str, token: bytes) -> bytes:
    if not _SHORTEST <= len(token) <= _LONGEST:
        raise ArgumentError(f"{name} gives a token of {len(token)} bytes, wanted {_SHORTEST} to {_LONGEST} random ones")
    return token


def _read_private(path: str) -> bytes:
    """Return the first bytes of a file. Only this user may have access to the file, and the file must not be a link."""
    try:
        # With O_NONBLOCK, the opening of a pipe in place of the file does not wait for the other end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ArgumentError(f"{_TOKEN_FILE} is {path!r}, which cannot be opened: {why}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ArgumentError(f"{_TOKEN_FILE} is {path!r}, which is no regular file")
        if status.st_uid != os.geteuid():
            raise ArgumentError(
                f"{_TOKEN_FILE} is {path!r}, which belongs to user {status.st_uid}, wanted {os.geteuid()}"
            )
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ArgumentError(f"{_TOKEN_FILE} is {path!r} with mode {mode:04o}; others may use it: chmod 600")
        return os.read(fd, _LONGEST + 2)
    finally:
        os.close(fd)
