"""The opening of a communicator: the ranks share memory on each host, and test whether they can exchange messages.

Before the user's first message, pairs of ranks (see :data:`_ALL`) exchange a message of each kind. So a fault in the
environment of a rank is found while the communicator forms, and all ranks report the fault. Without these messages, the
fault could later look like the death of a rank.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import anyio
import msgspec
import torch

from aiocomms import ops
from aiocomms.errors import ArgumentError, CommAbortedError, CommError, PeerDiedError
from aiocomms.lowlevel import ControlCodec, buffers, run_in_thread, unaffected
from aiocomms.transport import OP_RESULT, Rendezvous
from aiocomms_ucx._engine import create_segment
from aiocomms_ucx.bringup import blame
from aiocomms_ucx.circumstances import hindrances
from aiocomms_ucx.member import FormingMember
from aiocomms_ucx.windows import open_segment

_NONE: Final = -1
_CHANNEL: Final = 15
"""The channel of the test messages. No other messages use this channel."""
_SIZES: Final = (8, 128 * 1024)
"""The sizes of the test messages in bytes.

UCX copies the small message. The large message is copied by the receiver, or by UCX's rendezvous protocol.
"""
_WORD: Final = 8
"""The size of one element of a test message, in bytes.

With smaller elements, torch would use threads that spin on all cores.
"""
_ALL: Final = 16
"""The largest number of ranks with which all pairs exchange test messages.

If there are more ranks, only pairs whose rank numbers differ by a power of two, modulo the number of ranks, exchange
test messages.
"""
_MOST_HERE: Final = 2048
"""The largest number of ranks of one host.

The limit exists because in all_to_all, a slot of the shared memory has a cache line for each rank.
"""
_SHARE: Final = 0.5
"""The test messages may take this fraction of the remaining time.

In the rest of the time, the ranks exchange reports of failures.
"""
_PAUSE: Final = 0.0002


class MemberRecord(msgspec.Struct, array_like=True):
    """The record that each rank sends to the other ranks when a communicator opens."""

    number: int
    """The communicator's number in the rank's engine."""
    segment: int
    """The descriptor of the host's shared memory if this rank is the first rank of its host; else -1."""
    reads: bool
    """True if the rank may read the memory of all ranks on its host."""
    trouble: str = ""
    """The fault that this rank has found; empty if there is none."""
    hindrances: list[str] = []
    """The circumstances of this rank that may cause a failure on any rank."""


MEMBERS: Final = ControlCodec[MemberRecord](MemberRecord, "the record of a member")


async def meet(transport: FormingMember, rendezvous: Rendezvous, *, first: bool) -> None:
    """Open the communicator. All ranks must call this function.

    :param first: True if this is the first communicator of these engines, which have not yet exchanged messages.
    :raises CommError: a rank could not open the communicator. All ranks raise the same error.
    """
    rank, size = transport.rank, transport.size
    check_crowd(transport.hosts)
    here = [peer for peer in range(size) if not transport.far(peer)]
    pooled = first and rendezvous.home is None  # an endpoint's connections share no pool
    segment, trouble = _create(rank, here, pooled)
    try:
        reads, why = transport.engine.reads_all(transport.peers), await run_in_thread(hindrances, anyhow=True)
        mine = MemberRecord(transport.group, segment, reads, trouble, why)
        raw = await rendezvous.exchange("ucx members", MEMBERS.encode(mine))
        members = [MEMBERS.decode(value, peer) for peer, value in enumerate(raw)]
        all_of = [member.hindrances for member in members]
        blame(rank, [member.trouble for member in members], all_of)
        transport.named([member.number for member in members])
        trouble = _open(transport, members, here, pooled)
        if first and transport.proves:
            trouble = await _prove(transport, trouble, _SHARE * rendezvous.left())
        # After this exchange no rank opens the descriptor.
        raw = await rendezvous.exchange("ucx opened", trouble.encode())
        blame(rank, [value.decode(errors="replace") for value in raw], all_of)
    finally:
        if segment != _NONE:
            os.close(segment)


def check_crowd(hosts: Sequence[str]) -> None:
    """Check that no host has more ranks than this transport supports on one host. All ranks get the same result.

    :raises ArgumentError: a host has too many ranks.
    """
    for host, count in Counter(hosts).items():
        if count > _MOST_HERE:
            raise ArgumentError(
                f"{count} ranks are on one host ({host}), and transport 'ucx' takes at most {_MOST_HERE} there"
            )


def _create(rank: int, here: list[int], pooled: bool) -> tuple[int, str]:
    """Create this host's shared memory, but only on the first rank of the host.

    :returns: the descriptor of the memory (-1: none), and the text of a failure (empty: no failure).
    """
    if here[0] != rank or len(here) == 1:
        return _NONE, ""
    try:
        return create_segment(len(here), pooled), ""
    except (RuntimeError, OSError) as error:
        return _NONE, f"rank {rank} cannot create shared memory: {error}"


def _open(transport: FormingMember, members: list[MemberRecord], here: list[int], pooled: bool) -> str:
    """Open the communicator in the engine, and return the text of a failure; empty if there is none.

    A failure is not raised as an error, because the tests of other ranks must continue.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(transport.hosts))}
    hosts = [numbers[host] for host in transport.hosts]
    readable = all(members[peer].reads for peer in here)
    fd, trouble = _NONE, ""
    try:
        if len(here) > 1:
            fd = open_segment(here[0], transport.pids[here[0]], members[here[0]].segment)
    except CommError as error:
        trouble = f"on rank {transport.rank}: {error.message}"
    try:
        names = [member.number for member in members]
        transport.engine.open_group(transport.group, names, fd, pooled, hosts, readable, transport.in_place)
        transport.segment = 0 if fd == _NONE else os.fstat(fd).st_size
    except (RuntimeError, OSError) as error:
        trouble = f"rank {transport.rank} cannot use the shared memory of its host: {error}"
    finally:
        if fd != _NONE:
            os.close(fd)
    return trouble


class _Trial:
    """A test message, which the transport treats as a user's message."""

    hints = None

    def __init__(self, op: ops.Send | ops.Recv) -> None:
        self.op = op
        self._error: CommError | None = None
        self._ended = False

    def done(self) -> bool:
        return self._ended

    def complete(self, value: Any = OP_RESULT) -> None:
        self._ended = True

    def fail(self, error: CommError) -> None:
        self._ended, self._error = True, error

    @unaffected
    def trouble(self, rank: int) -> str:
        """Return the text of the test message's failure on ``rank``; empty if the message has not failed."""
        if self._error is not None:
            return f"rank {rank} could not {self}: {self._error.message}"
        if isinstance(self.op, ops.Recv) and self._ended and not self._is_right(self.op):
            return f"rank {rank} could not {self}: other bytes came than were sent"
        return ""

    def _is_right(self, op: ops.Recv) -> bool:
        return bool((op.tensor.view(torch.int64) == _word(op.src)).all())

    def __str__(self) -> str:
        size = f"a message of {self.op.tensor.nbytes} bytes"
        return (
            f"send {size} to rank {self.op.dst}"
            if isinstance(self.op, ops.Send)
            else f"receive {size} of rank {self.op.src}"
        )


async def _prove(transport: FormingMember, trouble: str, seconds: float) -> str:
    """Exchange test messages with other ranks. Return the text of this rank's failure; empty if there is none.

    :param trouble: the text of a failure that is already known; empty if there is none.
    :param seconds: the time limit for the messages, in seconds.
    :raises PeerDiedError: a rank has died during the exchange.
    """
    trials = list(_trials(transport))
    for trial in trials:
        if transport.failure is None and not trouble:
            transport.post(trial.op, trial)
    with anyio.move_on_after(seconds):
        while transport.failure is None and not trouble and not all(trial.done() for trial in trials):
            if transport.gone:
                break
            if not transport.progress():
                await anyio.sleep(_PAUSE)
    if isinstance(transport.failure, PeerDiedError):
        raise transport.failure
    trouble = next((text for text in (trouble, *(trial.trouble(transport.rank) for trial in trials)) if text), "")
    late = next((str(trial) for trial in trials if not trial.done()), "")
    if trouble or isinstance(transport.failure, CommAbortedError):
        pass  # the failure is known, or the rank that has aborted reports it
    elif transport.failure is not None:
        trouble = f"on rank {transport.rank}: {transport.failure.message}"
    elif late and transport.gone:
        trouble = f"rank {min(transport.gone)} has given up before rank {transport.rank} could {late}"
    elif late:
        trouble = f"within {seconds:.3g} s rank {transport.rank} could not {late}"
    if trouble:
        transport.abort(CommError(trouble))  # other ranks must not wait for this rank's proofs
    return trouble


def _trials(transport: FormingMember) -> Iterator[_Trial]:
    rank, size = transport.rank, transport.size
    for peer in _partners(rank, size):
        for size_ in _SIZES:
            mine, theirs = _filled(size_, _word(rank)), _filled(size_, 0)
            yield _Trial(ops.Recv(theirs, peer, 0, _CHANNEL))
            yield _Trial(ops.Send(mine, peer, 0, _CHANNEL))


def _word(rank: int) -> int:
    """Return the element that fills a rank's test messages."""
    return int.from_bytes(bytes([1 + rank % 255]) * _WORD, sys.byteorder, signed=True)


@unaffected
def _filled(nbytes: int, word: int) -> torch.Tensor:
    return buffers.full((nbytes // _WORD,), word, dtype=torch.int64, device="cpu").view(torch.uint8)


def _partners(rank: int, size: int) -> list[int]:
    """Return the ranks with which a rank exchanges test messages.

    These ranks also exchange test messages with this rank.
    """
    if size <= _ALL:
        return [peer for peer in range(size) if peer != rank]
    steps = [1 << n for n in range((size - 1).bit_length())]
    return sorted({(rank + sign * step) % size for step in steps for sign in (1, -1)} - {rank})
