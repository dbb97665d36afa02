"""Transport ``tcp``: sends and receives over plain TCP sockets, one connection for each pair of ranks."""

import contextlib
import functools
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import anyio
import torch

from aiocomms import lowlevel, ops
from aiocomms.errors import CommError, MismatchError, ProtocolError
from aiocomms.ops import writing
from aiocomms.ops.checks import DTYPES
from aiocomms.transport import OP_RESULT, Capabilities, Completion, Rendezvous, Transport, conclude

# A sender announces each message. When a receive has matched the message, the receiver asks for as many bytes as its
# buffer holds. Then the sender sends these bytes in pieces. BYE or ABORT is the last frame of a connection.
ANNOUNCE, ASK, PIECE, BYE, ABORT = range(5)
HEADER = struct.Struct("<BBBxqqq")  # a frame's kind, channel, dtype, tag, number, size in bytes
LARGEST = 64 * 1024  # the largest piece or reason, in bytes
NUMBERED = sorted(DTYPES, key=str)  # the dtypes in the order of their numbers on the wire
REASONS = lowlevel.ControlCodec(lowlevel.Reason, "the reason of an abort")


async def meet(rendezvous: Rendezvous) -> dict[int, socket.socket]:
    """Connect to every other rank."""
    rank, key = rendezvous.rank, rendezvous.secret("tcp")
    mine = f"{lowlevel.host_id('net')} {socket.gethostname()}"
    hosts = [value.decode().split() for value in await rendezvous.exchange("tcp hosts", mine.encode())]
    others = [name for host, name in hosts if host != hosts[rank][0]]
    address = lowlevel.reachable_address(others, rendezvous.store) if others else lowlevel.LOOPBACK
    with lowlevel.listen_at(address, rendezvous.size) as listener:
        mine = f"{address} {listener.getsockname()[1]}"
        places = [value.decode().split() for value in await rendezvous.exchange("tcp places", mine.encode())]
        seconds = 0.9 * rendezvous.left()  # the rest is for an error that names the missing ranks
        below = {peer: functools.partial(socket.create_connection, places[peer], seconds) for peer in range(rank)}
        gate = lowlevel.Gate(rank, key, below, rendezvous.size)  # higher ranks connect to this rank
        return await rendezvous.run("connecting", lambda: gate.run([listener], seconds))


class Peer:
    """The connection with one rank."""

    def __init__(self, rank: int, connection: socket.socket, parse: Callable[[Self], Iterator[memoryview]]) -> None:
        self.rank, self.connection = rank, lowlevel.tune(connection)
        connection.setblocking(False)
        self.unsent = deque[Any]()  # frames, pieces, and works that complete when these are sent
        self.head, self.writing = memoryview(b""), False  # the rest of the frame that is being sent
        self.incoming = deque[Any]()  # messages that this rank has asked for: buffers, outcomes, works
        self.parser = parse(self)  # yields the memory for the next bytes
        self.space = next(self.parser)


class TcpTransport(Transport):
    """One rank's end of all connections. Its methods never block."""

    capabilities = Capabilities(ops=frozenset({ops.Send, ops.Recv}), in_process=True)

    def __init__(self, rank: int, connections: dict[int, socket.socket]) -> None:
        self.rank, self.last_frame, self.lock = rank, b"", threading.RLock()  # a signal handler may call abort()
        # Sends, receives and messages without a match. The first field is a key, which begins with the other rank.
        self.announced, self.posted, self.arrived = list[Any](), list[Any](), list[Any]()
        self.epoll = select.epoll()
        self.peers = {peer: Peer(peer, connection, self.parse) for peer, connection in connections.items()}
        for peer in self.peers.values():
            self.epoll.register(peer.connection, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        _open.add(self)

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        return None if hasattr(select, "epoll") else "it uses epoll, which only Linux has"

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Any) -> Self:
        return cls(rendezvous.rank, await meet(rendezvous) if rendezvous.size > 1 else {})

    def post(self, op: Any, work: Completion) -> None:
        rank = op.dst if isinstance(op, ops.Send) else op.src
        peer, key = self.peers.get(rank), (rank, op.channel, op.tag)
        if peer is None:
            work.fail(lowlevel.closed_by(rank))
        elif isinstance(op, ops.Send):
            self.announced.append(((rank, id(work)), op, work))
            dtype = NUMBERED.index(op.tensor.dtype)
            self.transmit(peer, HEADER.pack(ANNOUNCE, op.channel, dtype, op.tag, id(work), op.tensor.nbytes))
        elif message := oldest(self.arrived, key):
            self.ask(peer, message, op, work)
        else:
            self.posted.append((key, op, work))

    def ask(self, peer: Peer, message: tuple[Any, int, torch.dtype, int], op: ops.Recv, work: Completion) -> None:
        """Ask for a message that a receive has matched."""
        _, number, dtype, nbytes = message
        error = lowlevel.misfit(peer.rank, dtype, nbytes, op.tensor)
        room = 0 if isinstance(error, MismatchError) else min(nbytes, op.tensor.nbytes)
        peer.incoming.append((octets(op.tensor)[:room], error or OP_RESULT, work))
        self.transmit(peer, HEADER.pack(ASK, 0, 0, 0, number, room))

    def try_cancel(self, work: Completion) -> bool:
        return oldest(self.posted, work, field=2) is not None

    def waiting_for(self, work: Any) -> Sequence[int]:
        return [getattr(work.op, name) for name in ("src", "dst") if hasattr(work.op, name)]

    def fileno(self) -> int:
        return self.epoll.fileno()

    def progress(self) -> bool:
        ready = {descriptor for descriptor, _ in self.epoll.poll(0)}
        for peer in [peer for peer in self.peers.values() if peer.connection.fileno() in ready]:
            self.write(peer)
            self.read(peer)
        return bool(ready)

    def transmit(self, peer: Peer, frame: bytes, piece: Any = b"", work: Completion | None = None) -> None:
        peer.unsent.append((frame, piece, work))
        self.write(peer)

    def write(self, peer: Peer) -> None:
        """Send until the connection is full. The epoll reports when it has room again."""
        sent = list[Completion]()
        with self.lock:
            if peer.writing:
                return  # this signal handler has interrupted write(), which will continue
            peer.writing = True
            with contextlib.suppress(OSError):  # if the connection is broken, read() fails after the last frame
                while peer.head or peer.unsent:
                    if not peer.head:
                        frame, piece, work = peer.unsent.popleft()
                        peer.head = memoryview(frame + piece)  # a copy: after abort() the program may change the tensor
                        sent += [work] if work else []
                    peer.head = peer.head[peer.connection.send(peer.head) :]
                if self.last_frame:
                    peer.connection.shutdown(socket.SHUT_WR)
            peer.writing = False
        for work in sent if not self.last_frame else ():
            conclude(work)  # without the lock, because this may post an op

    def read(self, peer: Peer) -> None:
        """Read until the connection is empty. The epoll reports when it has bytes again."""
        try:
            while peer.rank in self.peers:
                # After this rank's last frame, drop all bytes: the program may use the tensors again.
                into = memoryview(bytearray(LARGEST)) if self.last_frame else peer.space
                if not (count := peer.connection.recv_into(into)):
                    raise ConnectionResetError
                peer.space = into[count:]
                while not (peer.space or self.last_frame):
                    peer.space = next(peer.parser)
        except BlockingIOError:
            pass
        except (OSError, CommError, StopIteration) as error:
            self.disconnect(peer)
            if not (self.last_frame or isinstance(error, StopIteration)):
                self.on_failure(error if isinstance(error, CommError) else lowlevel.gone(peer.rank))

    def parse(self, peer: Peer) -> Iterator[memoryview]:
        """Handle the frames of a rank, and check each field. Yield the memory for the next bytes."""
        frame = memoryview(bytearray(HEADER.size))
        while True:
            yield frame
            kind, channel, dtype, tag, number, nbytes = HEADER.unpack(frame)
            if kind == ANNOUNCE and dtype < len(NUMBERED) and nbytes >= 0:
                message = (peer.rank, channel, tag), number, NUMBERED[dtype], nbytes
                if receive := oldest(self.posted, message[0]):
                    self.ask(peer, message, *receive[1:])
                else:
                    self.arrived.append(message)
            elif kind == ASK and (sent := oldest(self.announced, (peer.rank, number))):
                data = octets(sent[1].tensor)[: max(0, nbytes)]
                for at in range(0, max(1, len(data)), LARGEST):
                    piece, last = data[at : at + LARGEST], at + LARGEST >= len(data)
                    self.transmit(peer, HEADER.pack(PIECE, 0, 0, 0, 0, len(piece)), piece, sent[2] if last else None)
            elif kind == PIECE and peer.incoming and 0 <= nbytes <= len(peer.incoming[0][0]):
                into, outcome, work = peer.incoming.popleft()
                yield into[:nbytes]
                if nbytes < len(into):
                    peer.incoming.appendleft((into[nbytes:], outcome, work))
                else:
                    conclude(work, outcome)
            elif kind == BYE:
                return self.leave(peer)
            elif kind == ABORT and 0 < nbytes <= LARGEST:
                yield (reason := memoryview(bytearray(nbytes)))
                return self.on_failure(REASONS.decode(reason).to_error())
            else:
                raise ProtocolError(f"rank {peer.rank} sent an invalid frame: {bytes(frame).hex()}", peer=peer.rank)

    def leave(self, peer: Peer) -> None:
        """Fail the works that need a rank which has closed."""
        self.disconnect(peer)
        lost = [entry for entry in self.posted + self.announced if entry[0][0] == peer.rank]
        for entries in (self.posted, self.announced, self.arrived):
            entries[:] = [entry for entry in entries if entry[0][0] != peer.rank]
        for *_, work in [*lost, *peer.incoming]:
            conclude(work, lowlevel.closed_by(peer.rank))

    def disconnect(self, peer: Peer) -> None:
        with self.lock:
            self.peers.pop(peer.rank, None)
            peer.connection.close()

    def say_last(self, frame: bytes) -> None:
        """Send the last frame, on any thread. Only the first call has an effect."""
        with self.lock:
            first, self.last_frame = not self.last_frame, self.last_frame or frame
            for peer in self.peers.values():
                if first:
                    before = () if frame[0] == ABORT else peer.unsent
                    peer.unsent = deque([*before, (frame, b"", None)])
                self.write(peer)

    def abort(self, error: CommError) -> None:
        reason = REASONS.encode(lowlevel.Reason.of(error, self.rank))
        self.say_last(HEADER.pack(ABORT, 0, 0, 0, 0, len(reason)) + reason)

    async def aclose(self) -> None:
        self.say_last(HEADER.pack(BYE, 0, 0, 0, 0, 0))
        try:
            with anyio.move_on_after(2.0):  # seconds, because the loop of a peer may be busy
                while self.peers:  # until all peers have closed their connections
                    await anyio.wait_readable(self.epoll)
                    self.progress()
        finally:
            for peer in list(self.peers.values()):
                self.disconnect(peer)
            self.epoll.close()


def octets(tensor: torch.Tensor) -> Any:
    return writing.octets(tensor).numpy().data


def oldest(entries: list[Any], value: object, field: int = 0) -> Any:
    """Remove and return the oldest entry whose field has this value, or None."""
    return next((entries.pop(i) for i, entry in enumerate(entries) if entry[field] == value), None)


# A forked child closes the connections. Otherwise peers would not notice the parent's death.
_open = weakref.WeakSet[TcpTransport]()
os.register_at_fork(after_in_child=lambda: [os.close(p.connection.detach()) for t in _open for p in t.peers.values()])
