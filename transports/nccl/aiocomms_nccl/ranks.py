"""What the other ranks say and do: whether they call the same, close, give up, or die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from aiocomms import ops
from aiocomms.errors import CommError, ProtocolError
from aiocomms.lowlevel import Reason, closed_by, gone
from aiocomms.transport import Completion
from aiocomms_nccl import wire
from aiocomms_nccl.agreement import Agreement
from aiocomms_nccl.control import Mesh
from aiocomms_nccl.matching import Messages

_NONE: Final = -1


class Ranks:
    """The other ranks, as this one knows them, and the collectives that are under way with them."""

    def __init__(self, mesh: Mesh, rank: int, compares: bool, fail: Callable[[CommError], object]) -> None:
        """Begin.

        :param compares: whether no collective is complete before all ranks have told that they call it.
        :param fail: called when the communicator is lost.
        """
        self.messages: Messages
        """Set by the transport, before anything is heard."""
        self.pending: dict[int, Completion] = {}
        """The collectives that are not done, by their numbers."""
        self._mesh = mesh
        self._rank = rank
        self._compares = compares
        self._fail = fail
        self._agreement = Agreement(rank, mesh.peers)
        self._moved: dict[int, Completion] = {}  # done as far as NCCL knows
        self._left: dict[int, int] = {}  # ranks that have closed, and how many collectives they had called
        self._disputed = _NONE  # the collective in which ranks disagree

    # ----------------------------------------------------------------------------------------- this rank's own part

    def call(self, op: ops.Op, work: Completion | None) -> int:
        """This rank has called a collective, which NCCL has enqueued.

        :param work: completed by :meth:`moved`; None: it was captured.
        :returns: its number.
        """
        index, wrong = self._agreement.call(op)
        if work is not None:
            self.pending[index] = work
        if wrong is not None:
            self._dispute(index, wrong)
        elif self._left:
            self._reconsider(index)
        if self._compares:
            self.tell()
        return index

    def moved(self, index: int) -> None:
        """A collective's data has moved, as far as NCCL knows."""
        if self._compares and self._agreement.missing(index):
            self._moved[index] = self.pending[index]
        else:
            self._complete(index)

    def _complete(self, index: int) -> None:
        work = self.pending.pop(index)
        if not work.done():
            work.complete()

    def knows(self, work: Completion) -> bool:
        """Whether a work is a collective that is not done."""
        return any(other is work for other in self.pending.values())

    def missing(self, work: Completion) -> Sequence[int]:
        """The ranks that a pending collective waits for. Any thread."""
        found = [index for index, other in list(self.pending.items()) if other is work]
        return self._agreement.missing(found[0]) if found else ()

    def tell(self) -> None:
        """This rank waits: tell the others in what."""
        for peer in self._mesh.peers:
            self._answer(peer)

    def say_bye(self) -> None:
        """This rank has closed."""
        for peer in self._mesh.peers:
            self._mesh.send(peer, wire.Bye(self._agreement.calls))

    def say_why(self, error: CommError) -> None:
        """This rank has given up. Any thread."""
        for peer in self._mesh.peers:
            self._mesh.send(peer, wire.Abort(Reason.of(error, self._rank), self._disputed))

    def closed_by(self, peer: int) -> CommError | None:
        """What fails that needs a rank which has closed; None: it has not."""
        return closed_by(peer) if peer in self._left else None

    # ------------------------------------------------------------------------------------------- what the others say

    def hear(self, said: Sequence[tuple[int, wire.Frame | ProtocolError | None]]) -> None:
        """Act on what :meth:`Mesh.poll` has brought."""
        for peer, frame in said:
            try:
                self._hear(peer, frame)
            except ProtocolError as error:
                self._fail(error)

    def _hear(self, peer: int, said: wire.Frame | ProtocolError | None) -> None:
        if said is None:
            if peer not in self._left:
                self._fail(gone(peer))
        elif isinstance(said, ProtocolError):
            raise said
        elif isinstance(said, wire.Announce):
            self.messages.hear_announce(peer, said)
        elif isinstance(said, wire.Take):
            self.messages.hear_take(peer, said)
        elif isinstance(said, wire.Lane):
            self.messages.hear_lane(peer, said)
        elif isinstance(said, wire.Calls):
            self._hear_calls(peer, said)
        elif isinstance(said, wire.Bye):
            self._hear_bye(peer, said)
        else:
            self._dispute(said.index, said.reason.to_error())

    def _hear_calls(self, peer: int, said: wire.Calls) -> None:
        wrong = self._agreement.hear(peer, said)
        if wrong is not None:
            self._dispute(*wrong)
            return
        self._answer(peer)
        for index in [index for index in self._moved if not self._agreement.missing(index)]:
            del self._moved[index]
            self._complete(index)

    def _answer(self, peer: int) -> None:
        frame = self._agreement.tell(peer)
        if frame is not None:
            self._mesh.send(peer, frame)

    def _hear_bye(self, peer: int, said: wire.Bye) -> None:
        self._left[peer] = said.calls
        self.messages.leave(peer, closed_by(peer))
        for index in list(self.pending):
            self._reconsider(index)

    def _reconsider(self, index: int) -> None:
        """Whether a pending collective can still come to its end."""
        for peer, calls in self._left.items():
            if index >= calls:
                self._dispute(index, closed_by(peer))
                return

    def _dispute(self, index: int, error: CommError) -> None:
        """All is lost, and one collective is at fault."""
        self._disputed = index
        work = self.pending.get(index)
        if work is not None and not work.done():
            work.fail(error)
        self._fail(error)
