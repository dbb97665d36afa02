"""The hand-overs of one connection. In a hand-over, one endpoint lends blocks to the other endpoint.

:mod:`aiocomms.endpoints.lending` decides the state of each hand-over, and this module runs the actions. The two
endpoints exchange notes, which arrive in order. Some notes have a body. If a body is too long for one note, further
notes contain the rest of the body.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, Final

import anyio

from aiocomms.arguments import wrong_type
from aiocomms.core.core import CLOSE_GRACE
from aiocomms.endpoints import lending
from aiocomms.endpoints.lending import Act, Borrowed, BorrowedStep, Borrowing, Do, Lent, LentStep, Out
from aiocomms.endpoints.pools import Lease, LeaseLedger, Pool
from aiocomms.endpoints.regions import all_of
from aiocomms.endpoints.words import LONGEST_WHY, GiveBack, Here, Lend, LetGo, OfLeases, Piece, Recall, Shelf
from aiocomms.errors import ArgumentError, CommError, CommTimeoutError, LeaseError, ProtocolError
from aiocomms.lowlevel.shielding import shielded
from aiocomms.ops import codec
from aiocomms.progress.driver import Bell, LoopDriver, Promise

MOST_BODY: Final = 256 * 1024
"""The largest size in bytes of a note's body.

The body contains the program's object, and in a :class:`Lend` also the indices of the blocks.
"""
_PIECE: Final = 1600
"""The largest number of bytes of a body in one note."""
_MOST_WAITING: Final = 1024
"""The largest number of pending hand-overs from the other endpoint. A further hand-over is a protocol error."""
_PARTING: Final = 1.0
"""The seconds for which :meth:`HandOvers.part` waits until the other end has released the lent blocks."""


class Counter:
    """The hand-over state that all connections of an endpoint share."""

    def __init__(self, driver: LoopDriver, place: str, process: int) -> None:
        """Start without hand-overs.

        :param place: see :class:`Here`.
        :param process: the id of this process in ``place``.
        """
        self.place, self.process = place, process
        self.ledger = LeaseLedger(driver)
        self.came: dict[Incoming, Any] = {}
        """The incoming hand-overs that no task has taken yet, each with the :class:`Peer` that lends the blocks."""
        self.arrival = Bell(driver)
        self.connected: dict[bytes, HandOvers] = {}
        """The open connections, by the number of the other endpoint."""
        self.closed = False

    def close(self) -> None:
        """End the iterators that wait for hand-overs, because the endpoint is closed."""
        self.closed = True
        self.came.clear()
        self.arrival.ring()
        self.ledger.close()


class Outgoing:
    """A hand-over of this endpoint's blocks to the other endpoint."""

    def __init__(self, of: HandOvers, lease: Lease, number: int, slot: int, lent: Lent) -> None:
        self.lease, self.number, self.slot, self.lent = lease, number, slot, lent
        self._of = of
        self.over, self.why = Promise(of.driver), ""
        self.answer: Any = None
        self.error: CommError | None = LeaseError("the hand-over has ended")

    @property
    def ended(self) -> bool:
        """True once the hand-over has ended. If the connection was lost, the borrower may still use the blocks."""
        return self.over.is_set

    async def take_back(self, why: str) -> None:
        """Recall the blocks, and wait until the hand-over has ended.

        If the borrower has not released the blocks after 5 s, treat the connection as lost.
        """
        self.why = self.why or why
        self._of.step(self, lending.recall(self.lent), LeaseError(f"the lease was taken back: {self.why}"))
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CLOSE_GRACE):
                await self.over
            if not self.over.is_set:
                self._of.step(self, lending.overdue(self.lent))
                await self.over

    def result(self) -> Any:
        """Return the borrower's answer.

        :raises CommError: there is no answer; the error says why.
        """
        if self.error is not None:
            raise self.error.about()
        return self.answer


class Incoming:
    """A hand-over of the other endpoint's blocks to this endpoint."""

    def __init__(self, of: HandOvers, lend: Lend, shelf: Shelf, blocks: tuple[int, ...], meta: Any) -> None:
        self.number, self.slot, self.write = lend.number, lend.slot, lend.write
        self.shelf, self.blocks, self.meta = shelf, blocks, meta
        self.borrowed = Borrowed()
        self._of = of
        self.ended, self._news = Promise(of.driver), Bell(of.driver)
        self.error: CommError | None = None
        """The reason why the blocks are unusable; None if they are usable or were given back."""
        self.answer: bytes | None = None
        """The body of the answer with which the program gives the blocks back; None if there is no answer."""
        self.told = False
        """True once an error told the program that the blocks are unusable."""

    def check(self) -> None:
        """Check that the blocks are usable.

        :raises CommError: the blocks are not usable.
        """
        if self.borrowed.state is not Borrowing.OPEN:
            self.told = True
            raise (self.error or LeaseError("the lease was given back")).about()

    def begin(self, *, write: bool = False) -> None:
        """Count an operation that begins. Call :meth:`check` first."""
        self.borrowed = lending.begin(self.borrowed, write=write)

    def done(self) -> None:
        """Record that an operation has ended."""
        self._step(lending.done(self.borrowed))

    async def idle(self) -> None:
        """Wait until no operation is pending."""
        while self.borrowed.busy > 0:
            await self._news

    def end(self, answer: bytes | None, error: CommError | None) -> None:
        """Release the blocks as soon as no operation is pending. Only the first call has an effect."""
        if self.borrowed.state is Borrowing.OPEN:
            self.answer, self.error = answer, error
            self._step(lending.end(self.borrowed))

    def flushed(self) -> None:
        """Record that all writes are visible to the owner."""
        self._step(lending.flushed(self.borrowed))

    def lose(self, error: CommError) -> None:
        """Record that the connection is over."""
        if self.borrowed.state not in (Borrowing.CUT, Borrowing.OVER):
            self.answer, self.error = None, error
        self._step(lending.lose(self.borrowed))
        self.ended.set()

    def hush(self) -> None:
        """Record that no operation of the lost connection moves data any more."""
        self._step(lending.hush(self.borrowed))

    def _step(self, step: BorrowedStep) -> None:
        self.borrowed, actions = step
        self._news.ring()
        for act in actions:
            if act is Act.FLUSH:
                self._of.flush(self)
            else:
                self._of.let_go(self, over=act is Act.PART)
                self.ended.set()


class HandOvers:
    """The hand-overs of one connection; all methods run on the event loop's thread."""

    def __init__(
        self, counter: Counter, peer: Any, driver: LoopDriver, borrower: bytes,
        say: Callable[[OfLeases], bool], flush: Callable[[bytes], Awaitable[None]],
        earlier: Callable[[], Awaitable[None]], lose: Callable[[CommError], object],
    ) -> None:  # fmt: skip
        """Start without hand-overs.

        :param counter: the hand-over state that all connections of the endpoint share.
        :param peer: the :class:`Peer` of the connection. Each :class:`HandedLease` of the connection contains it.
        :param borrower: the number of the other endpoint.
        :param say: a function that sends a note to the other end.
        :param flush: a function that gets a region's descriptor, and waits until the puts into this region are visible
            to its owner.
        :param earlier: a function that waits until this endpoint has closed its end of all earlier connections with the
            borrower.
        :param lose: a function that gets an error, and records the connection as lost.
        """
        self.driver = driver
        self._counter, self._ledger, self._peer, self._borrower = counter, counter.ledger, peer, borrower
        self._say, self._flush, self._earlier, self._lose = say, flush, earlier, lose
        self._there: Here | None = None
        self._introduced, self._news = Promise(driver), Bell(driver)
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Incoming] = {}
        self._told: set[Pool] = set()
        self._shelves: dict[int, Shelf] = {}
        self._partial: Lend | GiveBack | None = None
        self._over: CommError | None = None

    # -------------------------------------------------------------------------------------------------------- lending

    async def hand_over(self, lease: Lease, meta: Any, write: bool, seconds: float) -> Any:
        """Lend the blocks of a lease, wait for the end of the hand-over, and return the borrower's answer."""
        body = self._body(lease, meta)
        if not isinstance(write, bool):
            raise wrong_type("write", write, "a bool")
        out: Outgoing | None = None
        late = anyio.CancelScope()
        try:
            with anyio.move_on_after(seconds) as late:
                out = await self._lend(lease, body, write)
                await out.over
        finally:
            if out is not None and not out.ended:
                late_why = f"the other endpoint has not given the lease back within {seconds:g} s"
                why = late_why if late.cancelled_caught else "its owner was cancelled"
                await shielded(functools.partial(out.take_back, why))
        if out is None or (late.cancelled_caught and out.error is not None):
            raise CommTimeoutError(f"the other endpoint has not given the lease back within {seconds:g} s")
        return out.result()

    def _body(self, lease: Lease, meta: Any) -> bytes:
        if not isinstance(lease, Lease):
            raise wrong_type("lease", lease, "a lease of a pool of this endpoint")
        if lease.pool._ledger is not self._ledger:
            raise ArgumentError("lease is of a pool of another endpoint, wanted one of this endpoint's")
        return encoded("meta", [struct.pack(f"<{len(lease)}I", *lease.blocks), meta])

    async def _lend(self, lease: Lease, body: bytes, write: bool) -> Outgoing:
        await self._introduced
        number, slot = await self._ledger.take()
        try:
            if self._over is not None:
                raise self._over.about()
            there = self._there
            lasting = write and there is not None and there.place == self._counter.place
            out = Outgoing(self, lease, number, slot, Lent(lasting))
            lease._lend(out)
        except BaseException:
            self._ledger.wipe(slot)
            raise
        self._out[number] = out
        pool = lease.pool
        if pool not in self._told:
            self._told.add(pool)
            self._say(
                Shelf(pool._number, pool._region.descriptor, self._ledger.region.descriptor, tuple(pool._rows.shape))
            )
        self._say_long(Lend(number, slot, pool._number, write, body))
        return out

    def step(self, out: Outgoing, step: LentStep, error: CommError | None = None) -> None:
        """Enter the next state of a hand-over, and carry out its actions.

        :param error: the error to record for the hand-over, if its state was :attr:`Out.LENT` before this step.
        """
        if error is not None and out.lent.state is Out.LENT:
            out.error = error
        out.lent, actions = step
        for do in actions:
            match do:
                case Do.RECALL:
                    self._say(Recall(out.number, out.why[:LONGEST_WHY]))
                case Do.LOSE:
                    self._lose(CommTimeoutError(f"the other endpoint did not release a lease within {CLOSE_GRACE:g} s"))
                case Do.END:
                    self._end(out)
                case Do.ASK:
                    if (again := self._counter.connected.get(self._borrower)) is not None:
                        again.recall_held()
                case Do.FREE:
                    out.lease._settled(out)

    def _end(self, out: Outgoing) -> None:
        self._ledger.wipe(out.slot)  # This must come before any other use of the blocks.
        del self._out[out.number]
        if out.lent.state is Out.OVER:
            out.lease._settled(out)
        else:
            process = 0 if self._there is None else self._there.process
            self._ledger.hold(self._borrower, out.number, process, lambda: self.step(out, lending.returned(out.lent)))
        out.over.set()
        self._news.ring()

    # ------------------------------------------------------------------------------------------------------ borrowing

    def flush(self, incoming: Incoming) -> None:
        """Start to wait until all writes are visible to the owner. If the wait fails, the connection is lost."""

        async def settle() -> None:
            try:
                await self._flush(incoming.shelf.blocks)
            except CommError:
                return
            incoming.flushed()

        self.driver.spawn(settle, Context())

    def let_go(self, incoming: Incoming, *, over: bool) -> None:
        """Tell the owner that this side has released the blocks."""
        self._in.pop(incoming.number, None)
        self._counter.came.pop(incoming, None)
        if incoming.answer is not None:
            self._say_long(GiveBack(incoming.number, incoming.answer))
        else:
            why = "" if incoming.error is None else incoming.error.message
            self._say(LetGo(incoming.number, why[:LONGEST_WHY], over))

    # ---------------------------------------------------------------------------------------- notes of the other end

    def hear(self, word: OfLeases) -> None:
        """Handle a note from the other end.

        :raises ProtocolError: the other end must not send this note in the connection's current state.
        """
        if (self._partial is None) == isinstance(word, Piece):
            raise ProtocolError(f"the other endpoint says {type(word).__name__} in the middle of another message")
        if self._over is not None and not isinstance(word, Piece | GiveBack | LetGo):
            return  # After the end of the connection, only notes about this endpoint's own blocks matter.
        match word:
            case Here():
                self._there = word
                self._introduced.set()
            case Shelf(pool):
                if len(word.shape) < 1 or not all(size > 0 for size in word.shape):
                    raise ProtocolError(f"the other endpoint has a pool of shape {word.shape}")
                self._shelves[pool] = word
            case Piece(body):
                assert self._partial is not None
                self._partial.body += body
                self._partial.more -= 1
                self._hear_long(self._partial)
            case Lend() | GiveBack():
                self._hear_long(word)
            case Recall(number, why):
                self._recalled(number, why)
            case LetGo(number, _, True) if number in self._out:
                out = self._out[number]
                self.step(out, lending.parted(out.lent))
            case LetGo(number, why):
                self._returned(number, LeaseError(f"the other endpoint has dropped the lease: {why}"))

    def _hear_long(self, word: Lend | GiveBack) -> None:
        if not 0 <= word.more <= MOST_BODY // _PIECE:
            raise ProtocolError(f"the other endpoint says something in {word.more} pieces")
        self._partial = word if word.more else None
        if word.more:
            return
        if isinstance(word, GiveBack):
            self._returned(word.number, None, word.body)
        elif self._over is None:
            self._lent(word)

    def _lent(self, lend: Lend) -> None:
        shelf, (packed, meta) = self._shelves.get(lend.pool), _decoded(lend.body, 2)
        if shelf is None or lend.number in self._in or len(self._in) >= _MOST_WAITING:
            raise ProtocolError("the other endpoint lends blocks of no pool of its, or too many")
        if type(packed) is not bytes or len(packed) % 4 or not packed:
            raise ProtocolError("the other endpoint lends blocks without their indices")
        blocks = struct.unpack(f"<{len(packed) // 4}I", packed)
        if max(blocks) >= shelf.shape[0]:
            raise ProtocolError(f"the other endpoint lends block {max(blocks)} of {shelf.shape[0]}")
        incoming = self._in[lend.number] = Incoming(self, lend, shelf, blocks, meta)
        self._counter.came[incoming] = self._peer
        self._counter.arrival.ring()

    def _recalled(self, number: int, why: str) -> None:
        incoming = self._in.get(number)
        if incoming is not None:
            incoming.end(None, LeaseError(f"the owner has taken the lease back: {why}"))
            return

        async def answer() -> None:
            await self._earlier()
            self._say(LetGo(number, "the lease is not used any more"))

        # The hand-over has ended here. Perhaps it was of an earlier connection, which has lost the note about its end.
        self.driver.spawn(answer, Context())

    def _returned(self, number: int, error: CommError | None, body: bytes = b"") -> None:
        out = self._out.get(number)
        if out is None:
            self._ledger.let_go(self._borrower, number)
            return
        if error is None:
            (out.answer,), out.error = _decoded(body, 1), None
        self.step(out, lending.returned(out.lent), error)

    def _say_long(self, word: Lend | GiveBack) -> None:
        pieces = [word.body[at : at + _PIECE] for at in range(0, len(word.body), _PIECE)]
        word.body, word.more = pieces[0], len(pieces) - 1
        self._say(word)
        for piece in pieces[1:]:
            self._say(Piece(piece))

    # --------------------------------------------------------------------------------------------------------- the end

    def begin(self) -> None:
        """Record that the connection is formed, and recall blocks that the borrower holds from earlier connections."""
        self._counter.connected[self._borrower] = self
        self.recall_held()

    def recall_held(self) -> None:
        """Recall the blocks that the other endpoint still holds from earlier connections."""
        for number in self._ledger.held_by(self._borrower):
            self._say(Recall(number, "the connection was lost"))

    async def settle(self, why: str) -> None:
        """Take all lent blocks back."""
        await all_of([functools.partial(out.take_back, why) for out in self._out.values()])

    def cut(self, error: CommError, *, in_order: bool) -> None:
        """Record that the connection is over. Only the first call sets the reason.

        :param in_order: True if the other end has closed the connection.
        """
        self._over = self._over or error
        if self._counter.connected.get(self._borrower) is self:
            del self._counter.connected[self._borrower]
        self._introduced.set()
        for incoming in list(self._in.values()):
            self._counter.came.pop(incoming, None)
            incoming.lose(error)
        for out in list(self._out.values()):
            self.step(out, lending.cut(out.lent, in_order=in_order), error)

    async def part(self) -> None:
        """Release the borrowed blocks, and wait up to 1 s until the other end has released the lent blocks."""
        for incoming in list(self._in.values()):
            incoming.hush()
        with anyio.move_on_after(_PARTING, shield=True):
            while any(out.lent.lasting for out in self._out.values()):
                await self._news

    def close(self) -> None:
        """Record that this end of the connection is closed."""
        self._told.clear()
        for out in list(self._out.values()):
            self.step(out, lending.quiet(out.lent))


def encoded(name: str, value: list[Any]) -> bytes:
    """Encode the body of a hand-over or of an answer.

    :raises ArgumentError: the value cannot be encoded, or is too long.
    """
    try:
        body = bytes(codec.encode(value))
    except ArgumentError as error:
        raise type(error)(error.message.replace("obj", name, 1)) from error.__cause__
    if len(body) > MOST_BODY:
        raise ArgumentError(f"{name} takes {len(body)} bytes with the blocks, wanted at most {MOST_BODY}")
    return body


def _decoded(body: bytes, count: int) -> list[Any]:
    """Decode a body of ``count`` parts.

    :raises ProtocolError: the body does not have ``count`` parts.
    """
    found = codec.decode(body)
    if type(found) is not list or len(found) != count:
        raise ProtocolError("the other endpoint says something else with a lease than it should")
    return found
