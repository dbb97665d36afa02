"""One-sided operations (RMA) over sends and receives, for communicators without a transport that has RMA.

Each rank serves its part of a window to every other rank. The rank receives the requests of each other rank, and
executes them one at a time. So requests of one rank take effect in the order of the calls. The owner of the part must
run its event loop, but need not call any method. A put to a rank with a busy event loop waits, unlike a put over a
transport with RMA.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from aiocomms import ops
from aiocomms.cuda import crossing
from aiocomms.errors import CommError, ProtocolError, UnsupportedOperation
from aiocomms.lowering.runs import AloneError, Poster, Run, Steps
from aiocomms.ops import buffers
from aiocomms.ops.writing import write, writing
from aiocomms.transport import OP_RESULT, Capabilities, Completion, Rendezvous, Transport

# The fields are the kind, the offset, the count or first operand, and the second operand or whether to signal.
_REQUEST = struct.Struct("<B7xqqq")
_PUT, _GET, _ADD, _SWAP, _SIGNAL, _FLUSH, _CLOSE = range(7)


class _Window:
    """This rank's part of one window."""

    def __init__(self, tag: int, tensor: Tensor, rank: int) -> None:
        self.tag = tag
        self.mapped = (rank,)
        """The ranks whose memory this process has mapped: only this rank."""
        self.flat = tensor.view(-1)
        self.signals: Counter[int] = Counter()
        """The number of signals that no wait has consumed yet, by source."""
        self.waiting: defaultdict[int, deque[Completion]] = defaultdict(deque)
        """The pending waits for signals, by source."""
        self.serving = 0
        """The number of running services: one per rank that may still send requests."""
        self.closing: Completion | None = None

    def signal(self, src: int) -> None:
        """Handle a signal of rank ``src``: complete the oldest wait for that rank, or count the signal."""
        if self.waiting[src]:
            self.waiting[src].popleft().complete()
        else:
            self.signals[src] += 1

    def served(self) -> None:
        """Record that one service has ended, because the rank that it serves sends no more requests."""
        self.serving -= 1
        self.check_closed()

    def check_closed(self) -> None:
        """Complete the close of the window if no service is left."""
        if self.closing is not None and not self.serving:
            self.closing.complete()

    def span(self, offset: int, count: int) -> Tensor:
        """Return ``count`` elements of this rank's part, from ``offset`` on.

        :raises ProtocolError: the range does not lie within this part.
        """
        if not (offset >= 0 and count >= 0 and offset + count <= self.flat.numel()):
            raise ProtocolError(f"a request for {count} elements from {offset} on of a window of {self.flat.numel()}")
        return self.flat[offset : offset + count]

    def atomic(self, what: int, offset: int, first: int, second: int) -> int:
        """Execute an atomic operation, and return the element's previous value.

        The method does not yield to the event loop between the read and the write.
        """
        element = self.span(offset, 1)
        before = int(element.item())
        with writing(element):
            if what == _ADD:
                element.add_(first)
            elif before == first:
                element.fill_(second)
        return before


class TwoSided(Transport):
    """A transport of one-sided operations that uses the communicator's own sends and receives."""

    capabilities: Capabilities = Capabilities(ops=ops.RMA)

    def __init__(self, comm: Poster) -> None:
        self._comm = comm
        self._windows = 0

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        """See :meth:`Transport.probe`."""
        return "it is part of a communicator"

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.open`."""
        raise NotImplementedError("a communicator makes its own")

    def post(self, op: ops.Op, work: Completion) -> None:
        """See :meth:`Transport.post`."""
        match op:
            case ops.WindowOpen(tensor):
                self._open(tensor, work)
            case ops.WindowClose(window):
                self._close(window.handle, work)
            case ops.WaitSignal(window, src) if window.handle.signals[src]:
                window.handle.signals[src] -= 1
                work.complete()
            case ops.WaitSignal(window, src):
                window.handle.waiting[src].append(work)
            case ops.MapRemoteTensor(window, rank) if rank == self._comm.rank:
                work.complete(window.tensor.detach())
            case ops.MapRemoteTensor():
                self._refuse_map()
            case _:
                self._run(self._ask(op), work)

    def progress(self) -> bool:
        """See :meth:`Transport.progress`. The transport that carries the messages does the work."""
        return False

    def fileno(self) -> int | None:
        """See :meth:`Transport.fileno`."""
        return None

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`. Only waits for signals can be withdrawn."""
        op: Any = work.op
        waiting = op.window.handle.waiting[op.src]
        if work not in waiting:
            return False
        waiting.remove(work)
        return True

    def abort(self, error: CommError) -> None:
        """See :meth:`Transport.abort`. The transport that carries the messages notifies the peers."""

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`. There is nothing to release."""

    # ------------------------------------------------------------------------------------ this rank's own requests

    def _ask(self, op: Any) -> Steps:
        """Send a request and its data. If the request has a reply, wait for the reply."""
        window: _Window = op.window.handle
        if isinstance(op, ops.Flush) and op.dst is None:
            for dst in range(self._comm.size):
                yield from self._ask(ops.Flush(op.window, dst))
            return None
        peer = op.src if isinstance(op, ops.Get) else op.dst
        if peer == self._comm.rank:
            return self._act(window, op)
        request = ops.Send(self._request(op), peer, window.tag, ops.RMA_REQUEST)
        if isinstance(op, ops.Signal):
            yield [request]
        elif isinstance(op, ops.Put):
            data = [ops.Send(op.tensor, peer, window.tag, ops.RMA_DATA)] if op.tensor.numel() else []
            yield [request, *data]
        elif isinstance(op, ops.Get):
            yield [request, ops.Recv(op.tensor, peer, window.tag, ops.RMA_REPLY)]
        else:
            reply = buffers.empty(1, dtype=torch.int64, device=self._comm.device)
            yield [request, ops.Recv(reply, peer, window.tag, ops.RMA_REPLY)]
            return None if isinstance(op, ops.Flush) else int(crossing.to_host(reply).item())
        return None

    def _act(self, window: _Window, op: Any) -> int | None:
        """Execute an operation on this rank's own part."""
        what, offset, first, second = _REQUEST.unpack(self._packed(op))
        if isinstance(op, ops.Put):
            write(window.span(offset, first), op.tensor)
            if second:
                window.signal(self._comm.rank)
        elif isinstance(op, ops.Get):
            write(op.tensor, window.span(offset, first))
        elif isinstance(op, ops.Signal):
            window.signal(self._comm.rank)
        elif isinstance(op, (ops.FetchAdd, ops.CompareSwap)):
            return window.atomic(what, offset, first, second)
        return None

    @staticmethod
    def _packed(op: Any) -> bytes:
        match op:
            case ops.Put(_, tensor, _, offset):
                return _REQUEST.pack(_PUT, offset, tensor.numel(), isinstance(op, ops.PutSignal))
            case ops.Get(_, tensor, _, offset):
                return _REQUEST.pack(_GET, offset, tensor.numel(), 0)
            case ops.FetchAdd(_, _, offset, value):
                return _REQUEST.pack(_ADD, offset, value, 0)
            case ops.CompareSwap(_, _, offset, expected, value):
                return _REQUEST.pack(_SWAP, offset, expected, value)
            case ops.Signal():
                return _REQUEST.pack(_SIGNAL, 0, 0, 0)
            case ops.Flush():
                return _REQUEST.pack(_FLUSH, 0, 0, 0)
        return _REQUEST.pack(_CLOSE, 0, 0, 0)

    def _request(self, op: Any) -> Tensor:
        return crossing.to_tensor(self._packed(op), self._comm.device)

    # ----------------------------------------------------------------------------------- the other ranks' requests

    def _open(self, tensor: Tensor, work: Completion) -> None:
        self._windows += 1  # Opening is collective, so all ranks have the same count.
        window = _Window(self._windows & 0x7FFFFFFF, tensor, self._comm.rank)
        for peer in range(self._comm.size):
            if peer != self._comm.rank:
                window.serving += 1
                self._run(self._serve(window, peer), _Service(work.op, window))
        work.complete(window)

    def _close(self, window: _Window, work: Completion) -> None:
        peers = [r for r in range(self._comm.size) if r != self._comm.rank]
        farewell: list[ops.Op] = []
        for peer in peers:
            reply = buffers.empty(1, dtype=torch.int64, device=self._comm.device)
            farewell.append(ops.Send(self._request(work.op), peer, window.tag, ops.RMA_REQUEST))
            farewell.append(ops.Recv(reply, peer, window.tag, ops.RMA_REPLY))

        def close() -> Steps:
            yield farewell

        window.closing = work
        # This count keeps the window open until the peers have answered, when all earlier requests of this rank are
        # done. The close also runs on a rank that left its body with an error and does not await the close.
        window.serving += 1
        self._run(close(), _Service(work.op, window))

    def _serve(self, window: _Window, peer: int) -> Steps:
        """Execute one rank's requests until that rank closes the window or sends an invalid request."""
        try:
            yield from self._requests(window, peer)
        except ProtocolError as error:
            raise AloneError(error) from error

    def _requests(self, window: _Window, peer: int) -> Steps:
        request = buffers.empty(_REQUEST.size, dtype=torch.uint8, device=self._comm.device)
        while True:
            yield [ops.Recv(request, peer, window.tag, ops.RMA_REQUEST)]
            what, offset, first, second = _REQUEST.unpack(crossing.to_bytes(request))
            if what == _PUT:
                if first:
                    yield [ops.Recv(window.span(offset, first), peer, window.tag, ops.RMA_DATA)]
                if second:
                    window.signal(peer)
            elif what == _GET:
                yield [ops.Send(window.span(offset, first), peer, window.tag, ops.RMA_REPLY)]
            elif what == _SIGNAL:
                window.signal(peer)
            elif what in (_ADD, _SWAP, _FLUSH, _CLOSE):
                before = window.atomic(what, offset, first, second) if what in (_ADD, _SWAP) else 0
                reply = crossing.to_device(buffers.int64([before], device="cpu"), self._comm.device)
                yield [ops.Send(reply, peer, window.tag, ops.RMA_REPLY)]
                if what == _CLOSE:
                    return
            elif what != _PUT:
                raise ProtocolError(f"rank {peer} asked for operation {what} on a window", peer=peer)

    def _run(self, steps: Steps, work: Completion) -> None:
        Run(self._comm, steps, work).advance()

    def _refuse_map(self) -> NoReturn:
        raise UnsupportedOperation("the ranks share no memory: no transport of this communicator has RMA")


class _Service:
    """The object that records the end of a service for one rank, or of a window's close.

    No program awaits this object.
    """

    __slots__ = ("__weakref__", "_done", "_window", "op")

    hints = None

    def __init__(self, op: ops.Op, window: _Window) -> None:
        self.op = op
        self._done = False
        self._window = window

    def done(self) -> bool:
        """See :class:`Completion`."""
        return self._done

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :class:`Completion`."""
        self._done = True
        self._window.served()

    def fail(self, error: CommError) -> None:
        """See :class:`Completion`. The peer is gone or has violated the protocol, so the service for the peer ends."""
        self._done = True
        self._window.served()
