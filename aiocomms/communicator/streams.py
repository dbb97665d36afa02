"""Streams of items between two ranks. The streams implement ``ObjectStream`` of anyio.

Each end announces the tag under which it receives, and its capacity in messages and bytes. The capacity is the other
end's initial credit. :mod:`aiocomms.communicator.items` defines the messages in which an item is sent. The receiving
end receives the next item even before the program calls ``receive``. When ``receive`` has returned an item to the
program, the receiving end returns the item's credit to the sending end. A stream has no task of its own. When the
receive of one message completes, the stream posts the receive of the next message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import torch
from anyio.abc import ObjectStream
from torch import Tensor

from aiocomms import ops
from aiocomms.communicator import greeting
from aiocomms.communicator.expected import Expected
from aiocomms.communicator.greeting import Greeting
from aiocomms.communicator.items import Arriving, Kind
from aiocomms.cuda import crossing
from aiocomms.diagnosis.stream_counts import StreamCounts, StreamStatistics
from aiocomms.errors import CommAbortedError, CommError, ProtocolError
from aiocomms.lowlevel.handles import Handle
from aiocomms.lowlevel.threads import call_in_thread, run_in_thread
from aiocomms.ops import buffers
from aiocomms.progress.inflight import StartedWork
from aiocomms.progress.work import Work

T = TypeVar("T")

_HELLO = -1  # This key stands for the receive of the other end's greeting.
_EOF, _GONE = 1, 3  # The first byte of a header is one of these after send_eof, or after aclose alone.
_CLOSED = -1  # The value that a closed end sends in place of a number of credits.
_BROKEN = -2  # The value that an end sends after an invalid message; it takes no more.


class ItemStream(Handle, ObjectStream[T]):
    """A duplex stream of items of one type to one other rank; made by :meth:`Communicator.open_stream`.

    Each end receives the items in the order in which the other end sends them. The two directions are independent.
    """

    def __init__(self, comm: Any, peer: int, end: Greeting, name: str, kind: Kind[T], number: int) -> None:
        self._comm = comm
        self.peer = peer
        """The other rank."""
        self.name = name
        """The name with which the stream was opened."""
        self._kind = kind
        self._end = end
        self._in_tag = end.tag  # The tag of headers; +1: that of the messages behind them; +2: that of credits.
        self._out_tag = 0
        self._credits = 0
        self._room = self._held = 0  # The bytes that the other end can hold (0: any number), and that it holds.
        self._line: deque[object] = deque()  # The senders wait here for credits, in the order of their calls.
        self._owed = self._owed_bytes = 0  # This end has yet to return these credits.
        self._returning = False
        self._messages: deque[tuple[Any, int]] = deque()
        self._counts = StreamCounts(name, number, peer, end.capacity, self._messages)
        self._sending, self._receiving = self._counts.sending, self._counts.receiving
        self._expected = Expected(comm._core.in_flight, self._counts.words)
        self._failure: CommError | None = None  # The reason why nothing more can be received.
        # The reason why nothing more can be sent; messages may still be received.
        self._send_failure: CommError | None = None
        self._is_open = self._closed = self._eof_sent = self._eof_received = self._peer_closed = False
        self._gone = False  # True once the other end was closed without send_eof.
        self._under_way: dict[StartedWork[Any], None] = {}
        """A dictionary whose keys are the works of the unfinished sends of tensor data. The values are None."""
        self._header = buffers.empty(kind.header_bytes, dtype=torch.uint8, device=comm.device)
        self._credit = buffers.empty(2, dtype=torch.int64, device=comm.device)
        self._hello = buffers.empty(greeting.GREETING_BYTES, dtype=torch.uint8, device=comm.device)
        self._shake_hands()

    # -------------------------------------------------------------------------------------------- for the program

    async def send(self, item: T) -> None:
        """Send an item: wait for free capacity at the other end, and return when the item may be changed.

        :param item: an item of the stream's type. A tensor is contiguous, on the communicator's device, and has any
            dtype and at most 14 dimensions. Mappings and dataclasses may contain the values that
            :meth:`Communicator.send_object` accepts, at most 64 MiB in total.
        :raises ArgumentError: the item cannot be sent; nothing was sent.
        :raises anyio.ClosedResourceError: this end was closed, or :meth:`send_eof` was called.
        :raises anyio.BrokenResourceError: the other end was closed.
        :raises CommError: the communicator is lost.
        """
        self._comm._core.caller_stream()  # This call refuses a CUDA capture before anything is copied to a GPU.
        packed = self._kind.pack(item, self._comm._core)
        self._check_sending()
        if packed.prepare is not None:
            packed = await run_in_thread(packed.prepare)
            self._check_sending()
        if self._line or not self._has_room(packed.nbytes):
            await self._wait_for_room(packed.nbytes)
        if self._peer_closed:
            raise anyio.BrokenResourceError
        self._credits -= 1
        self._held += packed.nbytes
        self._counts.sent += 1
        self._send_control(packed.header, self._out_tag)
        if packed.messages:
            await self._send_messages(packed.messages)

    async def receive(self) -> T:
        """Receive the next item.

        :returns: a new item. A tensor is on the communicator's device. Mappings and dataclasses contain tensors as
            :meth:`Communicator.recv_object` returns them.
        :raises anyio.EndOfStream: the other end has called :meth:`send_eof`, and all its items have been received.
        :raises anyio.BrokenResourceError: the other end was closed without :meth:`send_eof`, and all its items have
            been received.
        :raises anyio.ClosedResourceError: this end was closed.
        :raises CommError: the communicator is lost.
        """
        receiving = self._receiving
        while not self._messages:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._failure is not None:
                raise self._failure.about()
            if self._eof_received:
                raise anyio.BrokenResourceError if self._gone else anyio.EndOfStream
            receiving.begin()
            try:
                await self._expected.change(self._in_tag)
            finally:
                receiving.end()
        arrived, nbytes = self._messages.popleft()
        self._counts.received += 1
        self._owed += 1
        self._owed_bytes += nbytes
        self._return_credits()
        return self._kind.make(arrived)

    async def send_eof(self) -> None:
        """Report to the other end that this end sends no more items. This end can still receive items. Idempotent.

        :raises anyio.ClosedResourceError: this end was closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        self._finish(_EOF)

    async def aclose(self) -> None:
        """Close both directions, and drop the items that the program has not received. Idempotent."""
        if not self._closed:
            self._finish(_GONE)
            self._closed = True
            self._comm._core.recorder.streams.close(self._counts)
            self._messages.clear()
            self._return_credits()
            self._notify()

    def statistics(self) -> StreamStatistics:
        """Return this end's counts of items, and the seconds for which tasks were suspended in its methods.

        Any thread may call this method.
        """
        return self._counts.statistics()

    async def __anext__(self) -> T:
        """Receive the next item.

        This method replaces the method of anyio, so that reports of aiocomms show a line of the program, not a line of
        anyio.
        """
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    # ------------------------------------------------------------------------------------------------- handshake

    async def _opened(self) -> None:
        """Wait until the other end has been opened.

        :raises CommError: the communicator is lost, or the other end uses another version of the protocol.
        """
        while not self._is_open:
            failure = self._failure or self._send_failure
            if failure is not None:
                raise failure.about()
            await self._expected.change(_HELLO)

    def _shake_hands(self) -> None:
        tag = greeting.tag_of(self.name)
        self._counts.has("recv", self._in_tag)
        if self.name:  # Ends without a name are paired in their order. No greeting identifies them.
            self._counts.has("send", tag, ops.STREAM)
            self._counts.has("recv", tag, ops.STREAM)
        self._comm._core.recorder.streams.add(self._counts)
        hello = greeting.greet(self._end, self._kind, self.name)
        self._send_control(crossing.to_tensor(hello, self._comm.device), tag, ops.STREAM)
        work = self._post(ops.Recv(self._hello, self.peer, tag, ops.STREAM))
        self._expected.note(_HELLO, work)
        work.add_done_callback(self._on_hello)

    def _on_hello(self, work: Work[Any]) -> None:
        if self._failed(work):
            return
        try:
            other = greeting.understand(crossing.to_bytes(self._hello), self.peer, self._kind, self.name)
        except ProtocolError as error:
            self._break(error)
            return
        (self._out_tag, self._credits, self._room), self._is_open = other, True
        self._counts.has("send", self._out_tag)
        self._counts.open()
        self._fetch()
        self._await_credits()
        if self._closed:  # This end was closed before the other end was opened.
            self._eof_sent = False
            self._finish(_GONE)
            self._return_credits()
        self._notify()

    # ------------------------------------------------------------------------------------------------- receiving

    def _fetch(self) -> None:
        self._expect(self._header, self._in_tag, self._on_header)

    def _on_header(self, work: Work[Any]) -> None:
        if self._failed(work):
            return
        header = crossing.to_bytes(self._header)
        if header[0] in (_EOF, _GONE):
            self._eof_received, self._gone = True, header[0] == _GONE
            self._notify()
        else:
            self._go_on(self._kind.arriving(header, self._comm.device))

    def _go_on(self, steps: Arriving) -> None:
        """Continue the generator ``steps``, which receives one item, until its next step or its end."""
        try:
            step = next(steps)
        except StopIteration as end:
            self._deliver(*end.value)
        except ProtocolError as error:
            self._break_at(error)
        else:
            if isinstance(step, list):
                self._expect_all(step, steps)
            else:
                driver = self._comm._core.driver
                call_in_thread(step, lambda error: driver.call_threadsafe(self._called, steps, error))

    def _expect_all(self, messages: list[Tensor], steps: Arriving) -> None:
        left = len(messages)

        def arrived(work: Work[Any]) -> None:
            nonlocal left
            left -= 1
            if not self._failed(work) and not left:
                self._go_on(steps)

        for message in messages:
            self._expect(message, self._in_tag + 1, arrived)

    def _called(self, steps: Arriving, error: Exception | None) -> None:
        if error is None:
            self._go_on(steps)
        else:
            self._break_at(error)

    def _deliver(self, arrived: Any, nbytes: int) -> None:
        if self._closed:
            self._owed += 1
            self._owed_bytes += nbytes
        else:
            self._messages.append((arrived, nbytes))
            self._notify()
        self._fetch()

    # --------------------------------------------------------------------------------------------------- credits

    def _return_credits(self) -> None:
        """Return credits to the other end, one message at a time.

        A closed end sends no credits, but reports to the other end that it is closed.
        """
        if self._returning or not self._is_open or not self._usable() or not (self._owed or self._closed):
            return
        owed, self._owed, nbytes, self._owed_bytes = self._owed, 0, self._owed_bytes, 0
        credit = self._numbers(_CLOSED if self._closed else owed, nbytes)
        self._returning = True
        work = self._post(ops.Send(credit, self.peer, self._out_tag + 2, ops.STREAM_DATA))
        work.add_done_callback(self._send_failed if self._closed else self._on_returned)

    def _numbers(self, *values: int) -> Tensor:
        return crossing.to_device(buffers.int64(values, device="cpu"), self._comm.device)

    def _on_returned(self, work: Work[Any]) -> None:
        if not self._send_failed(work):
            self._returning = False
            self._return_credits()

    def _await_credits(self) -> None:
        self._expect(self._credit, self._in_tag + 2, self._on_credits)

    def _on_credits(self, work: Work[Any]) -> None:
        if self._send_failed(work):
            return
        count, nbytes = crossing.to_host(self._credit).tolist()
        if count == _CLOSED:
            self._peer_closed = True
        elif count == _BROKEN:
            self._broken_off()
        elif 0 < count <= greeting.MAX_CAPACITY and 0 <= nbytes <= self._held:
            self._credits += count
            self._held -= nbytes
            self._await_credits()
        else:
            self._break(
                ProtocolError(f"rank {self.peer} returned too much on stream {self.name!r}: {count} items, {nbytes} B")
            )
        self._notify()

    # --------------------------------------------------------------------------------------------------- sending

    def _has_room(self, nbytes: int) -> bool:
        """Return whether the other end can accept an item.

        If the other end holds no item, the other end accepts an item of any size.
        """
        return self._credits > 0 and (not self._room or not self._held or self._held + nbytes <= self._room)

    async def _wait_for_room(self, nbytes: int) -> None:
        """Wait for free capacity in the order of the calls, so that small items never overtake a large item."""
        place = object()
        self._line.append(place)
        self._sending.begin()
        try:
            while not self._peer_closed and (self._line[0] is not place or not self._has_room(nbytes)):
                await self._expected.change(self._in_tag + 2)
                self._check_sending()
        finally:
            self._sending.end()
            self._line.remove(place)
            self._notify()

    async def _send_messages(self, messages: list[Tensor]) -> None:
        works = [self._post(ops.Send(m, self.peer, self._out_tag + 1, ops.STREAM_DATA)) for m in messages]
        for work in works:
            self._under_way[work] = None
        suspended = not works[-1].done()
        if suspended:
            self._sending.begin()
        try:
            for work in works:
                await work
        finally:
            if suspended:
                self._sending.end()
            for work in works:
                del self._under_way[work]

    # ---------------------------------------------------------------------------------------------------- common

    def _usable(self) -> bool:
        """Return whether this end can still send to the other end."""
        core = self._comm._core
        return self._failure is self._send_failure is None and not core.closed and core.life.failure is None

    def _post(self, op: ops.Op) -> StartedWork[Any]:
        work: StartedWork[Any] = self._comm._issue(op, None, None)
        return work

    def _send_control(self, message: Tensor, tag: int, channel: int = ops.STREAM_DATA) -> None:
        """Send a message, and do not wait until the send is complete.

        If the send fails, this end sends nothing more.
        """
        self._post(ops.Send(message, self.peer, tag, channel)).add_done_callback(self._send_failed)

    def _expect(self, message: Tensor, tag: int, then: Callable[[Work[Any]], object]) -> None:
        """Post a receive. If the receive fails, or the communicator is already lost, the stream also fails."""
        if self._failure is None:
            try:
                work = self._post(ops.Recv(message, self.peer, tag, ops.STREAM_DATA))
                self._expected.note(tag, work, ", for room" if message is self._credit else "")
                work.add_done_callback(then)
            except CommError as error:
                self._fail(error)

    def _finish(self, how: int) -> None:
        if not self._eof_sent:
            self._eof_sent = True
            if self._is_open and self._usable():
                header = bytes([how]).ljust(self._kind.header_bytes, b"\0")
                self._send_control(crossing.to_tensor(header, self._comm.device), self._out_tag)

    def _check_sending(self) -> None:
        if self._closed or self._eof_sent:
            raise anyio.ClosedResourceError
        failure = self._failure or self._send_failure
        if failure is not None:
            raise failure.about()

    def _send_failed(self, work: Work[Any]) -> bool:
        """Return whether a send failed, and record the failure. After a failure this end sends nothing more.

        The program can still receive the items that have already arrived, because the other end may have closed its
        communicator after its last item.
        """
        error = work.exception()
        if error is not None:
            self._send_failure = self._send_failure or error
            self._notify()
        return error is not None

    def _failed(self, work: Work[Any]) -> bool:
        error = work.exception()
        if error is not None:
            self._fail(error)
        return error is not None

    def _fail(self, error: CommError) -> None:
        if self._failure is None:
            self._failure = self._comm._core.worded(error)
        self._notify()

    def _break_at(self, error: Exception) -> None:
        """End the stream as :meth:`_break` does, with an error that names the rank and the stream."""
        text = error.message if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
        self._break(ProtocolError(f"rank {self.peer}, on stream {self.name!r}: {text}", peer=self.peer))

    def _break(self, error: ProtocolError) -> None:
        """End the stream after an invalid message, and report the end to the other rank.

        The sends of the other rank have no deadline, so without this report they would never end.

        If the stream is not open yet, end the communicator instead, because no message can report the end of the
        stream.
        """
        if not self._is_open:
            self._comm._core.lose(error.about(op="open_stream", rank=self._comm.rank))
        elif self._usable():
            self._send_control(self._numbers(_BROKEN, 0), self._out_tag + 2)
        self._fail(error)

    def _broken_off(self) -> None:
        """Fail this end's unfinished sends of tensor data, because an error at the other end has ended the stream."""
        error = CommAbortedError(f"rank {self.peer} ended stream {self.name!r} early: see its error", peer=self.peer)
        for work in list(self._under_way):
            work.abandon(error)
        self._fail(error)

    def _notify(self) -> None:
        self._expected.changed()


class TensorStream(ItemStream[Tensor]):
    """An :class:`ItemStream` of tensors of any shape and dtype."""
