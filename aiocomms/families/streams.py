"""The method ``open_stream`` and ``TensorStream``, an anyio object stream of tensors between two ranks.

Each end announces the tag under which it receives, and its capacity: the number of messages that it holds, which is the
other end's first number of credits. A message is a header of fixed size, which says dtype and shape, followed by the
tensor. The receiving end receives messages ahead of the program, so that the next one is there when the program wants
it. It returns a credit for each message that the program has taken. No task runs for a stream: the completion of one
message's receive posts the next receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import torch
from anyio.abc import ObjectStream
from torch import Tensor

from aiocomms import ops
from aiocomms.errors import ArgumentError, CommAbortedError, CommError, ProtocolError
from aiocomms.families import greeting
from aiocomms.families.issuer import Issuer
from aiocomms.ops import checks, codec
from aiocomms.progress.driver import Driver, Promise
from aiocomms.progress.inflight import StartedWork
from aiocomms.progress.work import Work

_FOREVER = checks.TIMEOUT_MAX
_DATA, _EOF = 0, 1
_HEADER_BYTES = 8 + codec.TENSOR_BYTES
_CLOSED = -1  # sent in place of a number of credits by an end that is closed
_BROKEN = -2  # and by one that can do nothing with what it got, so that nothing is taken any more


class Streams(Issuer):
    """The method that opens streams of tensors."""

    _streams = 0

    async def open_stream(self, peer: int, capacity: int = 8, name: str = "") -> TensorStream:
        """Open a stream to another rank, which opens one to this rank with the same name.

        :param peer: the other rank.
        :param capacity: the number of messages that this end holds before its program takes them: 1 to 2**20.
        :param name: distinguishes streams between the same two ranks. Streams of one name are paired in the order
            opened. At most 100 bytes of UTF-8.
        :returns: a duplex :class:`anyio.abc.ObjectStream` of tensors of any shape and dtype.
        :raises ArgumentError: an argument is wrong; nothing was sent.
        :raises ProtocolError: the other rank opened something else.
        :raises CommError: the communicator is lost.
        """
        try:
            checks.other("peer", peer, self._core)
            greeting.check(capacity, name)
        except ArgumentError as error:
            raise error.about(op="open_stream", rank=self.rank) from None
        self._streams += 1
        stream = TensorStream(self, peer, capacity, name, self._streams)
        try:
            await stream._opened()
        except BaseException:
            await stream.aclose()
            raise
        return stream


class TensorStream(ObjectStream[Tensor]):
    """A duplex stream of tensors to one other rank; made by :meth:`Communicator.open_stream`.

    One end receives what the other end sends, in the same order. The two directions are independent.
    """

    def __init__(self, comm: Any, peer: int, capacity: int, name: str, number: int) -> None:
        self._comm = comm
        self.peer = peer
        """The other rank."""
        self.name = name
        """The name with which the stream was opened."""
        self._capacity = capacity
        self._in_tag = (number << 2) & 0x7FFFFFFC  # of headers; +1: of payloads; +2: of credits for this end's sends
        self._out_tag = 0
        self._credits = 0
        self._owed = 0  # credits that this end has yet to return
        self._returning = False
        self._messages: deque[Tensor] = deque()
        self._changed = Promise(Driver.current())
        self._failure: CommError | None = None  # why nothing more can be received
        self._send_failure: CommError | None = None  # why nothing more can be sent; messages may still be received
        self._is_open = self._closed = self._eof_sent = self._eof_received = self._peer_closed = False
        self._under_way: list[StartedWork[Any]] = []
        """The payloads that this end sends."""
        self._header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=comm.device)
        self._credit = torch.empty(1, dtype=torch.int64, device=comm.device)
        self._hello = torch.empty(greeting.GREETING_BYTES, dtype=torch.uint8, device=comm.device)
        self._shake_hands()

    # -------------------------------------------------------------------------------------------- for the program

    async def send(self, item: Tensor) -> None:
        """Send a tensor. Waits for a credit, and returns when the send is done and the tensor may be changed.

        :param item: a contiguous tensor on the communicator's device, of any dtype and at most 14 dimensions.
        :raises ArgumentError: the tensor cannot be sent; nothing was sent.
        :raises anyio.ClosedResourceError: this end was closed, or :meth:`send_eof` was called.
        :raises anyio.BrokenResourceError: the other end was closed.
        :raises CommError: the communicator is lost.
        """
        checks.readable("item", item, self._comm._core)
        header = self._make_header(_DATA, item)
        self._check_sending()
        while not self._credits and not self._peer_closed:
            await self._wait()
            self._check_sending()
        if self._peer_closed:
            raise anyio.BrokenResourceError
        self._credits -= 1
        self._send_control(header, self._out_tag)
        if item.numel():
            await self._send_payload(item)

    async def receive(self) -> Tensor:
        """Receive the next tensor.

        :returns: a new tensor, on the communicator's device.
        :raises anyio.EndOfStream: the other end has sent its last tensor, and all of them have been received.
        :raises anyio.ClosedResourceError: this end was closed.
        :raises CommError: the communicator is lost.
        """
        while not self._messages:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._failure is not None:
                raise self._failure.about()
            if self._eof_received:
                raise anyio.EndOfStream
            await self._wait()
        message = self._messages.popleft()
        self._owed += 1
        self._return_credits()
        return message

    async def send_eof(self) -> None:
        """Tell the other end that this end sends nothing more. This end can still receive. Idempotent.

        :raises anyio.ClosedResourceError: this end was closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        self._finish()

    async def aclose(self) -> None:
        """Close both directions, and drop what the program has not received. Idempotent."""
        if not self._closed:
            self._finish()
            self._closed = True
            self._messages.clear()
            self._return_credits()
            self._notify()

    # ------------------------------------------------------------------------------------------------- handshake

    async def _opened(self) -> None:
        """Wait until the other end has been opened.

        :raises CommError: the communicator is lost, or the other end speaks another version of the protocol.
        """
        while not self._is_open:
            failure = self._failure or self._send_failure
            if failure is not None:
                raise failure.about()
            await self._wait()

    def _shake_hands(self) -> None:
        tag = greeting.tag_of(self.name)
        hello = greeting.greet(self._in_tag, self._capacity, self.name)
        self._send_control(codec.to_tensor(hello, self._comm.device), tag, ops.STREAM)
        self._post(ops.Recv(self._hello, self.peer, tag, ops.STREAM)).add_done_callback(self._on_hello)

    def _on_hello(self, work: Work[Any]) -> None:
        if self._failed(work):
            return
        try:
            tag, capacity = greeting.understand(codec.to_bytes(self._hello), self.peer, self.name)
        except ProtocolError as error:
            self._break(error)
            return
        self._out_tag, self._credits, self._is_open = tag, capacity, True
        self._fetch()
        self._await_credits()
        if self._closed:  # this end was closed before the other one was opened
            self._eof_sent = False
            self._finish()
            self._return_credits()
        self._notify()

    # ------------------------------------------------------------------------------------------------- receiving

    def _fetch(self) -> None:
        self._expect(self._header, self._in_tag, self._on_header)

    def _on_header(self, work: Work[Any]) -> None:
        if self._failed(work):
            return
        try:
            message = self._announced(codec.to_bytes(self._header))
        except ProtocolError as error:
            self._break(error)
            return
        if message is None:
            self._eof_received = True
            self._notify()
        elif message.numel():
            self._expect(message, self._in_tag + 1, self._on_payload)
        else:
            self._deliver(message)

    def _announced(self, header: bytes) -> Tensor | None:
        """Make the tensor that a header announces, of its dtype and shape; None if it announces the end.

        :raises ProtocolError: the header makes no sense.
        """
        dtype, shape, nbytes = codec.parse_tensor(header[8:])
        if header[0] not in (_DATA, _EOF):
            raise ProtocolError(f"rank {self.peer} sent a message of kind {header[0]} on stream {self.name!r}")
        if header[0] == _EOF:
            return None
        try:
            return torch.empty(shape, dtype=dtype, device=self._comm.device)
        except RuntimeError as error:
            raise ProtocolError(f"rank {self.peer} announced a tensor of {nbytes} bytes: {error}") from error

    def _on_payload(self, work: Work[Any]) -> None:
        if not self._failed(work):
            self._deliver(work.result())

    def _deliver(self, message: Tensor) -> None:
        if self._closed:
            self._owed += 1
        else:
            self._messages.append(message)
            self._notify()
        self._fetch()

    # --------------------------------------------------------------------------------------------------- credits

    def _return_credits(self) -> None:
        """Return the credits that are owed, in one message at a time. A closed end says that it is closed instead."""
        if self._returning or not self._is_open or not self._usable() or not (self._owed or self._closed):
            return
        owed, self._owed = self._owed, 0
        credit = torch.tensor([_CLOSED if self._closed else owed], device=self._comm.device)
        self._returning = True
        work = self._post(ops.Send(credit, self.peer, self._out_tag + 2, ops.STREAM_DATA))
        work.add_done_callback(self._send_failed if self._closed else self._on_returned)

    def _on_returned(self, work: Work[Any]) -> None:
        if not self._send_failed(work):
            self._returning = False
            self._return_credits()

    def _await_credits(self) -> None:
        self._expect(self._credit, self._in_tag + 2, self._on_credits)

    def _on_credits(self, work: Work[Any]) -> None:
        if self._send_failed(work):
            return
        count = int(self._credit.item())
        if count == _CLOSED:
            self._peer_closed = True
        elif count == _BROKEN:
            self._broken_off()
        elif 0 < count <= greeting.MAX_CAPACITY:
            self._credits += count
            self._await_credits()
        else:
            self._break(ProtocolError(f"rank {self.peer} returned {count} credits on stream {self.name!r}"))
        self._notify()

    # --------------------------------------------------------------------------------------------------- sending

    async def _send_payload(self, item: Tensor) -> None:
        work = self._post(ops.Send(item, self.peer, self._out_tag + 1, ops.STREAM_DATA))
        self._under_way.append(work)
        try:
            await work
        finally:
            self._under_way.remove(work)

    # ---------------------------------------------------------------------------------------------------- common

    def _usable(self) -> bool:
        """Return whether anything can still be sent to the other end."""
        return self._failure is self._send_failure is None and not self._comm.closed and not self._comm.aborted

    def _post(self, op: ops.Op) -> StartedWork[Any]:
        work: StartedWork[Any] = self._comm._issue(op, None, _FOREVER)
        return work

    def _send_control(self, message: Tensor, tag: int, channel: int = ops.STREAM_DATA) -> None:
        """Send a message whose end nobody awaits. If the send fails, nothing more is sent."""
        self._post(ops.Send(message, self.peer, tag, channel)).add_done_callback(self._send_failed)

    def _expect(self, message: Tensor, tag: int, then: Callable[[Work[Any]], object]) -> None:
        """Post a receive. If it fails, or the communicator is lost already, the stream fails too."""
        if self._failure is None:
            try:
                self._post(ops.Recv(message, self.peer, tag, ops.STREAM_DATA)).add_done_callback(then)
            except CommError as error:
                self._fail(error)

    def _make_header(self, kind: int, item: Tensor) -> Tensor:
        outline = codec.describe_tensor(item, "item")
        return codec.to_tensor(bytes([kind]).ljust(8, b"\0") + outline, self._comm.device)

    def _finish(self) -> None:
        if not self._eof_sent:
            self._eof_sent = True
            if self._is_open and self._usable():
                self._send_control(self._make_header(_EOF, torch.empty(0)), self._out_tag)

    def _check_sending(self) -> None:
        if self._closed or self._eof_sent:
            raise anyio.ClosedResourceError
        failure = self._failure or self._send_failure
        if failure is not None:
            raise failure.about()

    def _send_failed(self, work: Work[Any]) -> bool:
        """Note whether a send failed, after which nothing more is sent.

        What has been received stays valid: the other end may have sent its last tensor and closed its communicator.
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
            self._failure = error
        self._notify()

    def _break(self, error: ProtocolError) -> None:
        """This end can do nothing with what it got. The other one is told: it has no deadline, and would wait for ever.

        Before the stream is open there is no way to tell it but the communicator's end.
        """
        if not self._is_open:
            self._comm._core.lose(error.about(op="open_stream", rank=self._comm.rank))
        elif self._usable():
            self._send_control(torch.tensor([_BROKEN], device=self._comm.device), self._out_tag + 2)
        self._fail(error)

    def _broken_off(self) -> None:
        """The other end has broken off: what it has not taken of this end's messages it never takes."""
        error = CommAbortedError(f"rank {self.peer} broke off stream {self.name!r}: see its own error", peer=self.peer)
        for work in self._under_way:
            work.abandon(error)
        self._fail(error)

    async def _wait(self) -> None:
        await self._changed

    def _notify(self) -> None:
        changed, self._changed = self._changed, Promise(Driver.current())
        changed.set()
