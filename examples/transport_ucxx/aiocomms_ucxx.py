"""Transport ``ucxx``: sends and receives over UCX, through the Python API of ucx-py, which UCXX carries on."""

import asyncio
import itertools
import struct
import threading
from collections import namedtuple
from importlib import import_module, util
from typing import Any, Self

from msgspec import structs
from torch import Tensor, device

from aiocomms import ops
from aiocomms.errors import CommAbortedError, CommError, MismatchError
from aiocomms.lowlevel import ControlCodec, Inbox, Reason, closed_by, gone, misfit, run_in_thread
from aiocomms.ops import checks, writing
from aiocomms.transport import Capabilities, Completion, Rendezvous, Transport

# All frames have one size, because UCXX reports a message that is shorter than its buffer as truncated. Data that does
# not fit into its frame is a separate UCX message with a number. CLOSE and ABORT are a rank's last frames.
Frame = namedtuple("Frame", "kind channel dtype tag nbytes number data", defaults=(0, 0, 0, 0, 0, b""))  # noqa: PYI024
HELLO, MESSAGE, CLOSE, ABORT = range(4)
HEADER, SIZE, ROOM = struct.Struct("<BBBxqqq"), 256, 228  # bytes
DTYPES = sorted(checks.DTYPES, key=str)
REASONS = ControlCodec(Reason, "the reason of an abort")
LIBRARY = next((name for name in ("ucxx", "ucp") if util.find_spec(name)), None)


class Engine:
    """An asyncio loop in a thread, because UCXX serves only one asyncio loop, which must not be busy."""

    one: Any = None
    lock, numbers = threading.Lock(), itertools.count(1)

    @classmethod
    def get(cls) -> Any:
        with cls.lock:
            cls.one = cls.one or cls()  # until the process ends, because UCXX does not release all that it opens
        return cls.one

    def __init__(self) -> None:
        self.loop, self.tasks = asyncio.SelectorEventLoop(), set[Any]()
        self.loop.run_until_complete(self.start())
        threading.Thread(target=self.loop.run_forever, name="aiocomms ucxx", daemon=True).start()

    async def start(self) -> None:
        self.ucx: Any = import_module(str(LIBRARY))
        util.find_spec("cuda") and import_module("cuda.core")  # UCXX's thread would do this later, and open files
        options = {"enable_python_future": True} if LIBRARY == "ucxx" else {}  # without it, each await would spin
        self.ucx.init({"RNDV_THRESH": str(SIZE + 1)}, **options)  # larger data waits at its sender

    def submit(self, coroutine: Any) -> Any:  # on any thread
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        self.tasks.add(future)  # a task is kept and never cancelled, because UCX may use its buffers
        future.add_done_callback(self.tasks.discard)
        return future


class UcxxTransport(Transport):
    capabilities = Capabilities(ops=frozenset({ops.Send, ops.Recv}))

    def __init__(self, rank: int, engine: Engine) -> None:
        self.rank, self.engine, self.inbox, self.silence = rank, engine, Inbox(), asyncio.Event()
        self.number, self.numbers = next(Engine.numbers) << 40, itertools.count()  # the transport's, and of data
        self.peers: dict[int, Any] = {}  # each rank's endpoint, and its number, which is in the tags of messages to it
        self.farewell: Any = None  # the last frames
        self.gone = set[int]()  # ranks that have closed
        self.letters = list[Any]()  # frames without a receive: (key, frame)
        self.pending = list[Any]()  # ops without a message or a receiver: (peer, key, op, work)

    @classmethod
    def probe(cls, device: device) -> str | None:
        return None if LIBRARY else "UCXX is missing: pip install ucxx-cu13 (or ucxx-cu12); it needs no GPU"

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Any) -> Self:
        self = cls(rendezvous.rank, await rendezvous.run("starting UCX", Engine.get))
        mine = self.number.to_bytes(8) + bytes(self.engine.ucx.get_worker_address())
        addresses = await rendezvous.exchange("ucxx", mine)
        try:
            await rendezvous.run("connecting", self.engine.submit(self.connect(self.engine.ucx, addresses)).result)
        except BaseException:
            self.abort(CommAbortedError(f"rank {self.rank} could not connect", peer=self.rank))
            self.inbox.close()
            raise
        return self

    def post(self, op: Any, work: Completion) -> None:
        sends = isinstance(op, ops.Send)
        key = (op.dst if sends else op.src, op.channel, op.tag)
        if not sends and (letter := take(self.letters, 0, key)):
            self.hand_over(letter[1], op, work)
        elif key[0] in self.gone:
            work.fail(closed_by(key[0]))
        elif sends and op.tensor.nbytes <= ROOM:
            self.engine.submit(self.send(op, bytes(octets(op.tensor))))
            work.complete()  # the frame has a copy
        else:
            self.pending.append((key[0], None if sends else key, op, work))
            if sends:
                self.engine.submit(self.send(op, b"", work))

    def progress(self) -> bool:
        return self.inbox.drain()

    def fileno(self) -> int:
        return self.inbox.fileno()

    def try_cancel(self, work: Completion) -> bool:
        return take(self.pending, 3, work) is not None

    def abort(self, error: CommError) -> None:
        reason = Reason.of(error, self.rank)
        text = reason.message.encode()[:150].decode(errors="ignore")  # the reason must fit into a frame
        data = REASONS.encode(structs.replace(reason, message=text))
        self.engine.submit(self.fall_silent(Frame(ABORT, nbytes=len(data), data=data)))

    async def aclose(self) -> None:
        await run_in_thread(self.engine.submit(self.fall_silent(Frame(CLOSE))).result)
        self.inbox.close()

    def hear(self, rank: int, frame: Frame) -> None:
        if frame.kind == ABORT:
            self.on_failure(REASONS.decode(frame.data[: frame.nbytes]).to_error())
        elif frame.kind == CLOSE:
            self.gone.add(rank)
            while it := take(self.pending, 0, rank):
                self.post(*it[2:])  # the op fails now
        elif frame.kind == MESSAGE and (it := take(self.pending, 1, (rank, frame.channel, frame.tag))):
            self.hand_over(frame, *it[2:])
        elif frame.kind == MESSAGE:
            self.letters.append(((rank, frame.channel, frame.tag), frame))

    def hand_over(self, frame: Frame, op: ops.Recv, work: Any) -> Any:
        if len(frame.data) < frame.nbytes:
            return self.engine.submit(self.fetch(frame, op, work))
        data, into = frame.data[: frame.nbytes], octets(op.tensor)
        error = misfit(op.src, DTYPES[frame.dtype], frame.nbytes, op.tensor)
        if not isinstance(error, MismatchError):
            into[: len(data)] = data[: len(into)]  # the two may be the same memory
        return work.complete() if error is None else work.fail(error)

    async def connect(self, ucx: Any, addresses: list[bytes]) -> None:
        for rank in {*range(len(addresses))} - {self.rank}:
            address = ucx.get_ucx_address_from_buffer(addresses[rank][8:])
            endpoint = await ucx.create_endpoint_from_worker_address(address)
            self.peers[rank] = endpoint, int.from_bytes(addresses[rank][:8])
            self.engine.submit(self.read(rank, endpoint, Frame(HELLO)))
            await self.transmit(rank, Frame(HELLO))  # from now on, the rank's death is noticed

    async def read(self, rank: int, endpoint: Any, frame: Frame) -> None:
        try:
            while frame.kind < CLOSE:
                await endpoint.recv(buffer := bytearray(SIZE), self.number | rank << 24, force_tag=True)
                frame = Frame._make((*HEADER.unpack_from(buffer), bytes(buffer[HEADER.size :])))
                self.inbox.put(self.hear, rank, frame)
        except Exception as error:  # UCX has many error types
            self.inbox.put(lambda why=str(error): self.on_failure(gone(rank, why)))
        await self.silence.wait()
        endpoint.abort()

    async def transmit(self, rank: int, frame: Frame, *data: Any) -> bool:  # in order, for the tasks begin in order
        endpoint, number = self.peers[rank]
        tag, packed = number | self.rank << 24, HEADER.pack(*frame[:-1]) + frame.data.ljust(ROOM, b"\0")
        followed = (endpoint.send(it, tag | frame.number, force_tag=True) for it in data)
        errors = await asyncio.gather(endpoint.send(packed, tag, force_tag=True), *followed, return_exceptions=True)
        return not any(errors) and getattr(endpoint, "alive", True)  # UCXX reports no error for a broken endpoint

    async def send(self, op: ops.Send, inline: bytes, work: Any = None) -> None:
        data, number = ([octets(op.tensor)], next(self.numbers) % 0xFFFFFF + 1) if work else ([], 0)
        frame = Frame(MESSAGE, op.channel, DTYPES.index(op.tensor.dtype), op.tag, op.tensor.nbytes, number, inline)
        if await self.transmit(op.dst, frame, *data) and work:
            self.inbox.put(lambda: self.try_cancel(work) and work.complete())  # a closed peer has failed it

    async def fetch(self, frame: Frame, op: ops.Recv, work: Completion) -> None:
        fits = (frame.nbytes, DTYPES[frame.dtype]) == (op.tensor.nbytes, op.tensor.dtype)
        data = octets(op.tensor) if fits else bytearray(frame.nbytes)
        await self.peers[op.src][0].recv(data, self.number | op.src << 24 | frame.number, force_tag=True)
        self.inbox.put(self.hand_over, frame._replace(data=data), op, work)

    async def fall_silent(self, frame: Frame) -> None:
        self.farewell = self.farewell or asyncio.gather(*(self.transmit(rank, frame) for rank in self.peers))
        await self.farewell
        self.silence.set()


def octets(tensor: Tensor) -> Any:
    return writing.octets(tensor).numpy().data


def take(entries: list[Any], field: int, value: object) -> Any:
    return next((entries.pop(i) for i, entry in enumerate(entries) if entry[field] == value), None)
