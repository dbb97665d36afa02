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

# A sender announces each message. When a receive has matched it, the receiver takes as much of it as it has room for,
# and then the sender sends that, in pieces. BYE and ABORT are last words: who hears them hangs up.
ANNOUNCE, TAKE, PIECE, BYE, ABORT = range(5)
HEADER = struct.Struct("<BBBxqqq")  # of everything: kind, channel, dtype, tag, number, size in bytes
LARGEST = 64 * 1024  # bytes of a piece, and of a reason
NUMBERED = sorted(DTYPES, key=str)  # dtypes by the number that stands for them
REASONS = lowlevel.ControlCodec(lowlevel.Reason, "the reason of an abort")


async def meet(rendezvous: Rendezvous) -> dict[int, socket.socket]:
    """Get a connection with every other rank, and with nobody else."""
    rank, key = rendezvous.rank, rendezvous.secret("tcp")
    mine = f"{lowlevel.host_id('net')} {socket.gethostname()}"
    hosts = [value.decode().split() for value in await rendezvous.exchange("tcp hosts", mine.encode())]
    others = [name for host, name in hosts if host != hosts[rank][0]]
    address = lowlevel.reachable_address(others, rendezvous.store) if others else lowlevel.LOOPBACK
    with lowlevel.listen_at(address, rendezvous.size) as listener:
        mine = f"{address} {listener.getsockname()[1]}"
        places = [value.decode().split() for value in await rendezvous.exchange("tcp places", mine.encode())]
        seconds = 0.9 * rendezvous.left()  # the rest is for saying who is missing
        below = {peer: functools.partial(socket.create_connection, places[peer], seconds) for peer in range(rank)}
        gate = lowlevel.Gate(rank, key, below, rendezvous.size)  # those above connect to this one
        return await rendezvous.run("connecting", lambda: gate.run([listener], seconds))


class Peer:
    """The connection with one rank."""

    def __init__(self, rank: int, connection: socket.socket, hear: Callable[[Self], Iterator[memoryview]]) -> None:
        self.rank, self.connection = rank, lowlevel.tune(connection)
        connection.setblocking(False)
        self.unsent = deque[Any]()  # headers, pieces, and the works that are complete when these are sent
        self.head, self.writing = memoryview(b""), False  # what is being sent
        self.coming = deque[Any]()  # taken and not here: where it goes, how its work will have ended, and the work
        self.heard = hear(self)  # yields what is to be filled next,
        self.wanted = next(self.heard)  # which is this


class TcpTransport(Transport):
    """One rank's end. It works on the loop's thread alone, and nothing of it waits."""

    capabilities = Capabilities(ops=frozenset({ops.Send, ops.Recv}), in_process=True)

    def __init__(self, rank: int, connections: dict[int, socket.socket]) -> None:
        self.rank, self.last_words, self.lock = rank, b"", threading.RLock()  # a handler may abort what it interrupts
        # Keys, which begin with the other rank; ops, or messages' numbers, dtypes and sizes; and works.
        self.announced, self.posted, self.arrived = list[Any](), list[Any](), list[Any]()
        self.epoll = select.epoll()
        self.peers = {peer: Peer(peer, connection, self.hear) for peer, connection in connections.items()}
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
        elif message := first(self.arrived, key):
            self.take(peer, message, op, work)
        else:
            self.posted.append((key, op, work))

    def take(self, peer: Peer, message: tuple[Any, int, torch.dtype, int], op: ops.Recv, work: Completion) -> None:
        """A receive has matched a message."""
        _, number, dtype, nbytes = message
        error = lowlevel.misfit(peer.rank, dtype, nbytes, op.tensor)
        room = 0 if isinstance(error, MismatchError) else min(nbytes, op.tensor.nbytes)
        peer.coming.append((octets(op.tensor)[:room], error or OP_RESULT, work))
        self.transmit(peer, HEADER.pack(TAKE, 0, 0, 0, number, room))

    def try_cancel(self, work: Completion) -> bool:
        return first(self.posted, work, field=2) is not None

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
        """Send what the connection takes now; the epoll tells when it takes more."""
        sent = list[Completion]()
        with self.lock:
            if peer.writing:
                return  # a signal handler's victim, which goes on
            peer.writing = True
            with contextlib.suppress(OSError):  # it is full; or gone, which read() notices, behind all that it has said
                while peer.head or peer.unsent:
                    if not peer.head:
                        frame, piece, work = peer.unsent.popleft()
                        peer.head = memoryview(frame + piece)  # a copy: abort() gives the tensor back to the program
                        sent += [work] if work else []
                    peer.head = peer.head[peer.connection.send(peer.head) :]
                if self.last_words:
                    peer.connection.shutdown(socket.SHUT_WR)
            peer.writing = False
        for work in sent if not self.last_words else ():
            conclude(work)  # without the lock, for this may post the next op

    def read(self, peer: Peer) -> None:
        """Take all that has come; the epoll tells when there is more."""
        try:
            while peer.rank in self.peers:
                # Behind this rank's last words nothing is heard any more: the tensors are the program's again.
                into = memoryview(bytearray(LARGEST)) if self.last_words else peer.wanted
                if not (count := peer.connection.recv_into(into)):
                    raise ConnectionResetError
                peer.wanted = into[count:]
                while not (peer.wanted or self.last_words):
                    peer.wanted = next(peer.heard)
        except BlockingIOError:
            pass
        except (OSError, CommError, StopIteration) as error:
            self.hang_up(peer)
            if not (self.last_words or isinstance(error, StopIteration)):
                self.on_failure(error if isinstance(error, CommError) else lowlevel.gone(peer.rank))

    def hear(self, peer: Peer) -> Iterator[memoryview]:
        """What a rank says, to its last words; nothing is believed unchecked."""
        frame = memoryview(bytearray(HEADER.size))
        while True:
            yield frame
            kind, channel, dtype, tag, number, nbytes = HEADER.unpack(frame)
            if kind == ANNOUNCE and dtype < len(NUMBERED) and nbytes >= 0:
                message = (peer.rank, channel, tag), number, NUMBERED[dtype], nbytes
                if receive := first(self.posted, message[0]):
                    self.take(peer, message, *receive[1:])
                else:
                    self.arrived.append(message)
            elif kind == TAKE and (sent := first(self.announced, (peer.rank, number))):
                data = octets(sent[1].tensor)[: max(0, nbytes)]
                for at in range(0, max(1, len(data)), LARGEST):
                    piece, last = data[at : at + LARGEST], at + LARGEST >= len(data)
                    self.transmit(peer, HEADER.pack(PIECE, 0, 0, 0, 0, len(piece)), piece, sent[2] if last else None)
            elif kind == PIECE and peer.coming and 0 <= nbytes <= len(peer.coming[0][0]):
                into, outcome, work = peer.coming.popleft()
                yield into[:nbytes]
                if nbytes < len(into):
                    peer.coming.appendleft((into[nbytes:], outcome, work))
                else:
                    conclude(work, outcome)
            elif kind == BYE:
                return self.leave(peer)
            elif kind == ABORT and 0 < nbytes <= LARGEST:
                yield (reason := memoryview(bytearray(nbytes)))
                return self.on_failure(REASONS.decode(reason).to_error())
            else:
                raise ProtocolError(f"rank {peer.rank} says what makes no sense: {bytes(frame).hex()}", peer=peer.rank)

    def leave(self, peer: Peer) -> None:
        """A rank has closed: what still needs it fails, and nothing else."""
        self.hang_up(peer)
        lost = [entry for entry in self.posted + self.announced if entry[0][0] == peer.rank]
        for entries in (self.posted, self.announced, self.arrived):
            entries[:] = [entry for entry in entries if entry[0][0] != peer.rank]
        for *_, work in [*lost, *peer.coming]:
            conclude(work, lowlevel.closed_by(peer.rank))

    def hang_up(self, peer: Peer) -> None:
        with self.lock:
            self.peers.pop(peer.rank, None)
            peer.connection.close()

    def part(self, words: bytes) -> None:
        """Say the last words, on any thread; the first ones stay."""
        with self.lock:
            first_ones, self.last_words = not self.last_words, self.last_words or words
            for peer in self.peers.values():
                if first_ones:
                    before = () if words[0] == ABORT else peer.unsent
                    peer.unsent = deque([*before, (words, b"", None)])
                self.write(peer)

    def abort(self, error: CommError) -> None:
        reason = REASONS.encode(lowlevel.Reason.of(error, self.rank))
        self.part(HEADER.pack(ABORT, 0, 0, 0, 0, len(reason)) + reason)

    async def aclose(self) -> None:
        self.part(HEADER.pack(BYE, 0, 0, 0, 0, 0))
        try:
            with anyio.move_on_after(2.0):  # seconds; somebody's loop may be busy
                while self.peers:  # until all have heard it, and hung up
                    await anyio.wait_readable(self.epoll)
                    self.progress()
        finally:
            for peer in list(self.peers.values()):
                self.hang_up(peer)
            self.epoll.close()


def octets(tensor: torch.Tensor) -> Any:
    return writing.octets(tensor).numpy().data


def first(entries: list[Any], value: object, field: int = 0) -> Any:
    """Take the oldest of these entries out of the list, if there is one."""
    return next((entries.pop(i) for i, entry in enumerate(entries) if entry[field] == value), None)


# A fork that kept its parent's connections open would keep the others from noticing that the parent has died.
_open = weakref.WeakSet[TcpTransport]()
os.register_at_fork(after_in_child=lambda: [os.close(p.connection.detach()) for t in _open for p in t.peers.values()])
