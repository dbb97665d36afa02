"""Newcomers: processes that claim the lost ranks of a communicator, and that the survivors invite."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from torch.distributed import PrefixStore, Store

from aiocomms.bootstrap.forming import FORMS_AGAIN, Transports, formed, kept, tell
from aiocomms.bootstrap.records import pauses, read, write
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.errors import CommAbortedError, CommTimeoutError, MismatchError, ProtocolError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import Seal, read_token
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.stores import store_errors


class Invitation(msgspec.Struct, array_like=True):
    """The invitation that the survivors write for a newcomer."""

    epoch: int
    size: int
    key: str


_INVITATIONS = ControlCodec[Invitation](Invitation, "what the ranks have decided")


class Claims:
    """The claims of newcomers.

    Each claim asks for a rank in the communicator's next *epoch*, which begins with the next reconfiguration. Each call
    blocks until the store answers. Newcomers know only the name that the communicator had before any reconfiguration.
    So the ranks meet newcomers at the root store.
    """

    def __init__(self, rendezvous: StoreRendezvous, root: Store) -> None:
        """Create the access to the claims, on a newcomer or on a survivor."""
        self._store = PrefixStore(f"aiocomms/{rendezvous.base}", root)
        self._seal = Seal(read_token(os.environ), rendezvous.base)

    @store_errors()
    def newest(self, rank: int) -> str:
        """Return the last claim to a rank if that claim has no answer yet, else an empty text.

        :raises StoreLostError: the store is gone.
        """
        claim = self.last(rank)
        return claim if claim and not self._answered(rank, claim) else ""

    @store_errors()
    def answered(self, rank: int) -> str:
        """Return the last claim to a rank if that claim has an answer, else an empty text.

        :raises StoreLostError: the store is gone.
        """
        claim = self.last(rank)
        return claim if claim and self._answered(rank, claim) else ""

    @store_errors()
    def last(self, rank: int) -> str:
        """Return the last claim to a rank, with or without an answer; an empty text if there is no claim.

        :raises StoreLostError: the store is gone.
        """
        try:
            return self._claim(rank) or ""
        except ProtocolError:  # AuthError is a ProtocolError: the claimant does not belong to the job.
            return ""

    @store_errors()
    def answer(self, rank: int, claim: str, invitation: Invitation) -> None:
        """Answer a claim with an invitation. Idempotent.

        :raises StoreLostError: the store is gone.
        """
        write(self._store, self._seal, f"join {claim}", rank, f"join/{rank}/{claim}", _INVITATIONS.encode(invitation))

    @store_errors()
    def claim(self, rank: int, given_up: clock.ThreadEvent) -> Invitation | None:
        """Claim a rank, and wait until a survivor answers or until ``given_up`` is set.

        :returns: the invitation; None if ``given_up`` was set first.
        :raises StoreLostError: the store is gone.
        :raises CommAbortedError: another process has claimed the same rank after this process.
        :raises AuthError: the process that answers does not belong to the job.
        """
        mine = secrets.token_hex(8)
        write(self._store, self._seal, "claim", rank, f"join/{rank}", mine.encode())
        for pause in pauses(1):
            if given_up.wait(pause):
                break
            answer = read(self._store, self._seal, f"join {mine}", rank, f"join/{rank}/{mine}")
            if answer is not None:
                return _INVITATIONS.decode(answer)
            if self._claim(rank) != mine:
                raise CommAbortedError(f"another process has joined later as rank {rank}: was a rank started twice?")
        return None

    def _answered(self, rank: int, claim: str) -> bool:
        return bool(self._store.check([f"join/{rank}/{claim}"]))

    def _claim(self, rank: int) -> str | None:
        claim = read(self._store, self._seal, "claim", rank, f"join/{rank}")
        return None if claim is None else claim.decode(errors="replace")


async def join(
    newcomer: StoreRendezvous, root: Store, form: Callable[[StoreRendezvous], Awaitable[Transports]]
) -> tuple[StoreRendezvous, Transports]:
    """Take part in a reconfiguration: form a communicator's next epoch together with the ranks of an earlier epoch.

    Retry a failed attempt as long as there is time.

    :param newcomer: the rendezvous of this process, which contains its rank, the size, and the time to wait.
    :param form: a function that opens the transports of an epoch.
    :returns: the rendezvous of the new epoch, and its transports.
    :raises CommTimeoutError: no rank invited this process.
    :raises StoreLostError: the store is gone.
    """
    failed = f"do the others call reconfigure(size={newcomer.size})?"
    while True:
        rendezvous = await _invited(newcomer, root, failed)
        try:
            transports = await formed(rendezvous, form(rendezvous))
            if await kept(rendezvous, transports):
                return rendezvous, transports
        except FORMS_AGAIN as error:
            if newcomer.left() <= 0:
                raise
            failed = f"the last attempt failed: {error.message}"


async def _invited(newcomer: StoreRendezvous, root: Store, failed: str) -> StoreRendezvous:
    """Wait until the ranks of an earlier epoch invite this process, and return the rendezvous of the next epoch.

    :param failed: the end of the error's message if no rank invites this process.
    """
    rank, size, given_up = newcomer.rank, newcomer.size, clock.event()
    claims = Claims(newcomer, root)
    try:
        invitation: Invitation = await newcomer.run("waiting to be taken in", lambda: claims.claim(rank, given_up))
    except CommTimeoutError as error:
        raise CommTimeoutError(
            f"within {newcomer.timeout} s no communicator took this process in as rank {rank}: {failed}",
            comm=newcomer.name, rank=rank,
        ) from error  # fmt: skip
    finally:
        given_up.set()
    left = max(0.001, newcomer.left())
    rendezvous = newcomer.successor(root, invitation.key, invitation.epoch, rank, size, left)
    if invitation.size != size:
        wrong = MismatchError(f"size is {size}, and the others have agreed on {invitation.size}", rank=rank)
        await tell(rendezvous, wrong)
        raise wrong
    return rendezvous
