"""Regions that two endpoints open to each other. A region is a window in which only the region's owner has memory.

Both ends open and close windows in the same order, which rank 0, the leader, decides. Rank 0 opens or closes a window
first, and then sends a note to rank 1. Rank 1 makes the same calls in the order of the notes. If rank 1 wants to open
or close a region, rank 1 asks rank 0. A note is a short message, which arrives even if no receive is pending.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from threading import get_ident
from typing import TYPE_CHECKING, Any

import anyio
import torch
from torch import Tensor

from aiocomms import arguments
from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.bootstrap.notes import Passed
from aiocomms.endpoints.credentials import FORGED, Descriptor, dtype_of
from aiocomms.endpoints.regions import REVOKED, Attachment, Region
from aiocomms.endpoints.words import (
    LEADER,
    LONGEST_WHY,
    WORDS,
    Ask,
    Bye,
    Closing,
    Grant,
    Here,
    Leave,
    OfLeases,
    Refuse,
    RegionOpening,
    Word,
    read,
)
from aiocomms.errors import (
    CommError,
    CommTimeoutError,
    ProtocolError,
    RegionError,
    UnsupportedOperation,
    as_reason,
    wrong_thread,
)
from aiocomms.ops import buffers
from aiocomms.progress.driver import Promise

if TYPE_CHECKING:
    from aiocomms.communicator.communicator import Communicator
    from aiocomms.communicator.rma import Window


class _Question:
    """A request of this endpoint to use a region of the other endpoint. The answer is an attachment or an error."""

    def __init__(self, descriptor: bytes, dtype: torch.dtype, answered: Promise) -> None:
        self.descriptor, self.dtype, self.answered = descriptor, dtype, answered
        self.answer: Attachment | CommError | None = None

    def end(self, answer: Attachment | CommError) -> None:
        self.answer = answer
        self.answered.set()


class Attachments:
    """The attachments of one connection: the open regions of both ends. All methods run on the event loop's thread."""

    def __init__(
        self,
        comm: Communicator,
        grant: Callable[[bytes], Region],
        bye: Callable[[], object],
        hear: Callable[[OfLeases], object],
    ) -> None:
        """Start to receive the other endpoint's notes.

        :param grant: a function that checks a descriptor of this endpoint, and returns the region or raises
            :class:`RegionError`.
        :param bye: a function that is called when the other endpoint closes the connection.
        :param hear: a function that is called with each note about lent blocks, even after the connection is over. The
            function may raise :class:`ProtocolError`.
        """
        self._comm, self._core = comm, comm._core
        self._driver = comm._core.driver
        self._grant, self._bye, self._hear_of_leases = grant, bye, hear
        self._me, self._other = comm.rank, 1 - comm.rank
        self._granted: dict[int, Region] = {}
        """The regions of this endpoint that the other endpoint has opened, or has permission to open."""
        self._known: dict[tuple[int, int], Attachment] = {}
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._orders: deque[RegionOpening | Closing] = deque()
        self._following = False
        self._over: CommError | None = None
        self._core.notes.on_passed = lambda rank, what: self._driver.call_threadsafe(self._hear, what)

    # ------------------------------------------------------------------------------------------ requests of this end

    async def attach(self, descriptor: bytes, says: Descriptor) -> Attachment:
        """Return the attachment of a region of the other endpoint; open the region if it is not open.

        If the call is cancelled, the opening continues, and the next call finds the region.

        :param says: the content of ``descriptor``, decoded.
        :raises RegionError: the other endpoint refuses the request.
        :raises CommError: the connection is lost or closed.
        """
        while True:
            self._check()
            found = self._known.get((self._other, says.number))
            if found is None:
                found = await self._answered(descriptor, says)
            if found.descriptor != descriptor:  # The owner has made one descriptor for each region.
                raise RegionError(FORGED)
            await found.opened
            if found.window is not None and not found.over:
                if found.window.sizes[self._other] != says.count:
                    raise RegionError(REVOKED)
                return found
            await found.closed  # After that, a new request asks the owner again.

    async def _answered(self, descriptor: bytes, says: Descriptor) -> Attachment:
        question = next((one for one in self._questions.values() if one.descriptor == descriptor), None)
        if question is None:
            question = self._ask(descriptor, says)
        await question.answered
        if isinstance(question.answer, CommError):
            raise question.answer.about()
        assert question.answer is not None
        return question.answer

    def _ask(self, descriptor: bytes, says: Descriptor) -> _Question:
        number, question = next(self._numbers), _Question(descriptor, dtype_of(says), Promise(self._driver))
        self._questions[number] = question
        self.say(Ask(number, descriptor))
        return question

    async def close(self, attachment: Attachment, why: str, timeout: OpTimeout = COMM_TIMEOUT) -> None:
        """Close an attachment: refuse new operations of both ends, and wait for pending operations. Idempotent.

        :param why: the reason that is sent to the other endpoint.
        :param timeout: the deadline in seconds; when it passes, the connection is lost.
        :raises CommTimeoutError: the deadline has passed.
        """
        self.check_thread("close")
        seconds = arguments.op_deadline(timeout, self._comm._seconds)
        with anyio.move_on_after(seconds):
            await attachment.opened
            if not attachment.leaving and self._over is None:
                attachment.leaving = True
                self._stop(attachment, why or "this endpoint has closed it")
                if self._me == LEADER:
                    self._lead(attachment, why)
                else:
                    self.say(Leave(attachment.owner, attachment.number, why[:LONGEST_WHY]))
            await attachment.closed
            return
        late = CommTimeoutError(f"the other endpoint did not release a region within {seconds:g} s")
        self._core.lose(late)
        raise late

    def stop(self, why: str) -> None:
        """Refuse new operations on all regions of the other endpoint."""
        for attachment in self._known.values():
            if attachment.owner == self._other:
                self._stop(attachment, why)

    async def settle(self) -> None:
        """Wait for all pending openings, because the other end takes part in each opening and waits for this end."""
        for question in list(self._questions.values()):
            await question.answered
        for attachment in list(self._known.values()):
            await attachment.opened

    def say_here(self, place: str, process: int) -> None:
        """Tell the other endpoint where this process runs; see :class:`Here`.

        :raises UnsupportedOperation: the transport cannot send notes.
        """
        if not self.say(Here(place, process)):
            raise UnsupportedOperation(
                "the transport has no Transport.say, which endpoints need: use another transport"
            )

    def say_bye(self) -> None:
        """Tell the other endpoint that this endpoint closes the connection."""
        self.say(Bye())

    def end(self, error: CommError) -> None:
        """End all requests and attachments, because the communicator is lost or closed.

        Only the first call has an effect.
        """
        if self._over is not None:
            return
        self._over = error
        self._bye = lambda: None  # The former callback refers to the peer.
        for question in list(self._questions.values()):
            question.end(error)
        for attachment in list(self._known.values()):
            self._stop(attachment, error.message)
            attachment.opened.set()
            self._closed(attachment)
        self._granted.clear()
        self._orders.clear()

    def hear_no_more(self) -> None:
        """Ignore further notes, because the communicator is about to be closed."""
        self._core.notes.on_passed = lambda rank, what: None

    def check_thread(self, op: str) -> None:
        """Check that the caller runs on the event loop's thread.

        :raises RuntimeError: the caller runs on another thread.
        """
        if get_ident() != self._core.thread:
            raise wrong_thread(f"{op} on '{self._comm.name}'")

    def _spawn(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in a task.

        If the coroutine raises an exception, the connection is lost, and the exception does not propagate.
        """

        async def run() -> None:
            try:
                await call()
            except Exception as error:
                if not isinstance(error, CommError):
                    self._driver.report("a region could not be opened or closed", error)
                self._core.lose(CommError(f"a region could not be opened or closed: {as_reason(error)}"))

        self._driver.spawn(run, Context())

    def _check(self) -> None:
        if self._over is not None:
            raise self._over.about()

    # ---------------------------------------------------------------------------------------- notes of the other end

    def say(self, word: Word) -> bool:
        """Send a note to the other end; return False if no transport can send the note."""
        return self._core.notes.say(self._other, Passed(WORDS.encode(word)))

    def _hear(self, what: bytes) -> None:
        try:
            word = read(what, self._me)
            if isinstance(word, OfLeases):
                self._hear_of_leases(word)
            elif self._over is None:
                self._heed(word)
        except ProtocolError as error:
            self._core.lose(error)

    def _heed(self, word: Word) -> None:
        match word:
            case Ask(question, descriptor):
                self._answer(question, descriptor)
            case Refuse(question, why):
                self._end_question(question, RegionError(f"the other endpoint refuses the descriptor: {why}"))
            case Grant(question, number):
                if question in self._questions:
                    self._begin(self._other, number, question)
            case Leave(owner, number, why):
                found = self._known.get((owner, number))
                if found is not None:
                    self._stop(found, why)
                    self._spawn(lambda: self.close(found, why))
            case RegionOpening() | Closing():
                self._obey(word)
            case Bye():
                self._bye()

    def _obey(self, order: RegionOpening | Closing) -> None:
        """Add an order to the queue of the leader's orders."""
        if isinstance(order, Closing) and (known := self._known.get((order.owner, order.number))) is not None:
            self._stop(known, order.why)
        self._orders.append(order)
        if not self._following:
            self._following = True
            self._spawn(self._follow)

    def _stop(self, attachment: Attachment, why: str) -> None:
        """Refuse new operations on an attachment."""
        attachment.over = attachment.over or why or "closed by the other endpoint"

    def _answer(self, question: int, descriptor: bytes) -> None:
        try:
            region = self._grant(descriptor)
        except RegionError as error:
            self.say(Refuse(question, error.message[:LONGEST_WHY]))
            return
        number = region._number
        known = self._known.get((self._me, number))
        if known is not None and known.over:  # The other end knew of the closing before it asked again.
            self._spawn(lambda: self._answer_when_closed(known, question, descriptor))
        elif known is not None:
            self.say(Refuse(question, "the region is open already"))
        else:
            self._granted[number] = region
            if self._me == LEADER:
                self._begin(self._me, number, question)
            else:
                self.say(Grant(question, number))

    async def _answer_when_closed(self, known: Attachment, question: int, descriptor: bytes) -> None:
        await known.closed
        if self._over is None:
            self._answer(question, descriptor)

    def _end_question(self, number: int, answer: Attachment | CommError) -> None:
        question = self._questions.pop(number, None)
        if question is not None:
            question.end(answer)

    # ----------------------------------------------------------------------------------- windows, in the leader's order

    def _begin(self, owner: int, number: int, question: int) -> None:
        """Open a region as the leader, and send an order to the other end."""
        self._open(owner, number, question)
        self.say(RegionOpening(owner, number, question))

    def _lead(self, attachment: Attachment, why: str) -> None:
        """Close an open region as the leader, and send an order to the other end."""
        if attachment.window is not None:
            self._close(attachment)
            self.say(Closing(attachment.owner, attachment.number, why[:LONGEST_WHY]))

    async def _follow(self) -> None:
        """Open and close windows as the leader's notes say, in the order of these notes."""
        try:
            while self._orders:
                order = self._orders.popleft()
                if isinstance(order, RegionOpening):
                    self._open(order.owner, order.number, order.question)
                elif (found := self._known.get((order.owner, order.number))) is not None:
                    found.leaving = True
                    self._stop(found, order.why)
                    await found.opened
                    if found.window is not None and self._over is None:
                        self._close(found)
        finally:
            self._following = False

    def _open(self, owner: int, number: int, question: int) -> None:
        region = self._granted.get(number) if owner == self._me else None
        asked = self._questions.get(question) if owner == self._other else None
        if (owner, number) in self._known or (region is None and asked is None):
            self._core.lose(ProtocolError("the other endpoint opens a region that was not requested", peer=self._other))
            return
        try:
            opening = self._comm._begin_window(self._part(region, asked), name=f"region {number}")
        except Exception as error:  # The other end has started to open the window, so the connection cannot go on.
            self._core.lose(error if isinstance(error, CommError) else CommError(as_reason(error)))
            return
        descriptor = b"" if asked is None else asked.descriptor
        attachment = Attachment(owner, number, descriptor, Promise(self._driver), Promise(self._driver))
        self._known[owner, number] = attachment
        if region is not None:
            region._opened(attachment, self.close)
        if asked is not None:
            self._end_question(question, attachment)
        self._spawn(lambda: self._finish_opening(attachment, opening, region))

    def _part(self, region: Region | None, asked: _Question | None) -> Tensor:
        """Return the tensor that this end contributes to the window.

        The tensor is empty if the other end owns the region.
        """
        if region is not None:
            return region._part()
        assert asked is not None
        return buffers.empty(0, dtype=asked.dtype, device=self._comm.device)

    async def _finish_opening(
        self, attachment: Attachment, opening: Coroutine[Any, Any, Window], region: Region | None
    ) -> None:
        try:
            attachment.window = await opening
        finally:
            attachment.opened.set()
        if region is not None and region.revoked:  # The region was revoked since it was granted.
            await self.close(attachment, REVOKED)

    def _close(self, attachment: Attachment) -> None:
        assert attachment.window is not None
        try:
            closing = attachment.window._start_closing()
        except CommError:  # The communicator is lost.
            return

        def closed(work: Any) -> None:
            work.exception()  # If it has an error, the communicator is lost.
            self._closed(attachment)

        closing.add_done_callback(closed)

    def _closed(self, attachment: Attachment) -> None:
        """Forget an attachment that neither end uses any more."""
        self._known.pop((attachment.owner, attachment.number), None)
        region = self._granted.pop(attachment.number, None) if attachment.owner == self._me else None
        if region is not None:
            region._left(attachment)
        attachment.closed.set()
