"""The disturbances of a rank in ``make chaos``: faults of the program, its interpreter and a plug-in.

Each is a context manager that takes the rank's random numbers. Those of :data:`FATAL` may end the communicator with an
error. The others may delay a rank, and change nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from processes import numbers

from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import WorkCancelledError
from aiocomms.testing import local_world
from aiocomms.transport import Transport

PROGRAM, HARNESS = "works", ("lives", "live", "play", "pass_traffic")
"""The coroutines of a rank: the one that a signal handler may interrupt, and those that call it or run beside it."""


SPARED = (str(Path(asyncio.__file__).parent), threading.__file__)
"""The paths of code that an exception at an arbitrary place would break."""


class Interrupted(Exception):  # noqa: N818 - The name follows KeyboardInterrupt.
    """The exception that the signal handler raises."""


# --------------------------------------------------------------------------------------------------- the interpreter


class Litter:
    """A reference cycle whose finalizer releases the GIL: another thread runs in the middle of any statement."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0)


@contextlib.asynccontextmanager
async def collections(rng: random.Random, comm: Communicator) -> AsyncIterator[None]:
    """Collect garbage at nearly every allocation, on any thread; there always is some garbage."""

    def litter(phase: str, _: object) -> None:
        if phase == "stop":
            Litter()

    before = gc.get_threshold()
    gc.callbacks.append(litter)
    gc.set_threshold(1)
    Litter()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(litter)


@contextlib.asynccontextmanager
async def switches(rng: random.Random, comm: Communicator) -> AsyncIterator[None]:
    """Have the GIL go to another thread at nearly every bytecode."""
    before, over = sys.getswitchinterval(), threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    thread = threading.Thread(target=spin)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


@contextlib.asynccontextmanager
async def interrupts(rng: random.Random, comm: Communicator) -> AsyncIterator[None]:
    """Have a signal handler raise at random bytecodes of what the loop runs: the program's, torch's and ours.

    The handler spares the code of asyncio and of :mod:`threading`, which an exception would break. A done future calls
    ``call_soon`` for each waiting task, and forgets the tasks if that raises; ``Thread.start`` raises a KeyError.
    """
    left = rng.randrange(1, 6)

    def arm() -> None:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.02))

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal left
        if not left:
            return
        arm()
        if befalls_the_program(frame):
            left -= 1
            raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    arm()
    try:
        yield
    finally:
        left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def befalls_the_program(frame: FrameType | None) -> bool:
    """Return whether the program can catch an exception raised here, or asyncio can, as the caller of a callback.

    The handler spares the loop, and the harness, which records the outcome of the program.
    """
    inner = frame
    while frame is not None:
        if frame.f_code.co_name == PROGRAM or frame.f_code is asyncio.Handle._run.__code__:
            return frame is not inner
        if frame.f_code.co_name in HARNESS or frame.f_code.co_filename.startswith(SPARED):
            return False
        frame = frame.f_back
    return False


# ------------------------------------------------------------------------------------------------------- the program


@contextlib.asynccontextmanager
async def forks(rng: random.Random, comm: Communicator) -> AsyncIterator[None]:
    """Fork: a child ends at once, collects its parent's garbage, or has a communicator of its own."""
    children: list[int] = []

    async def fork() -> None:
        while len(children) < 3:
            await asyncio.sleep(rng.uniform(0, 0.05))
            does = rng.choice([lambda: None, gc.collect, lambda: asyncio.run(local_all_reduce())])
            if not (child := os.fork()):
                code = 1
                try:
                    does()
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)

    task = asyncio.create_task(fork())
    try:
        yield
    finally:
        await task
        for child in children:
            while (status := ended(child)) is None:  # noqa: ASYNC110 - This rank hangs if a child hangs.
                await asyncio.sleep(0.001)
            assert status == 0, f"a forked child ended with {status}"


def ended(child: int) -> int | None:
    """Return the status of a child that has ended, or None."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid else None


async def local_all_reduce() -> None:
    async with local_world(2) as world:
        await asyncio.gather(*(comm.all_reduce(torch.ones(3)) for comm in world))


@contextlib.asynccontextmanager
async def cancellations(rng: random.Random, comm: Communicator) -> AsyncIterator[None]:
    """Cancel tasks at each of their awaits. The collective completes; the message is received once, in order."""
    own, over = await comm.split(list(range(comm.size))), False
    assert own is not None

    async def cancel() -> None:
        turn, ended = 0, 0
        while ended < own.size:
            ends = own.all_reduce(torch.tensor([int(over)]))
            total = own.all_reduce(numbers(5, own.rank, turn))
            await sent_and_received(own, turn, rng.randrange(12))
            assert torch.equal(await total, sum(numbers(5, rank, turn) for rank in range(own.size))), "wrong data"
            turn, ended = turn + 1, int(await ends)

    task = asyncio.create_task(cancel())
    try:
        yield
    finally:
        over = True
        await task
        await own.aclose()


async def sent_and_received(comm: Communicator, turn: int, turns: int) -> None:
    """Send to the right and receive from the left, in a task that is cancelled after some turns of the loop."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    got = torch.zeros(7, dtype=torch.int64)
    sent, received = comm.send(numbers(7, comm.rank, turn), right, 5), comm.recv(got, left, 5)
    barrier = comm.barrier()

    async def awaits() -> None:
        await received
        await sent
        await barrier

    task = asyncio.create_task(awaits())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    try:
        await received
    except WorkCancelledError:  # No message had matched the receive: the message is still to come.
        await comm.recv(got, left, 5)
    assert torch.equal(got, numbers(7, left, turn)), "wrong data: a message after a cancelled receive"
    await sent
    await barrier


# ------------------------------------------------------------------------------------------------------- the plug-in

METHODS = ("post", "progress", "fileno", "try_cancel", "waiting_for", "abort", "aclose")


@contextlib.contextmanager
def stalls(rng: random.Random, base: type[Transport]) -> Iterator[type[Transport]]:
    """Make any method of a transport take long now and then."""
    yield spoilt(base, lambda name: time.sleep(0.03) if rng.random() < 0.02 else None)


@contextlib.contextmanager
def raises(rng: random.Random, base: type[Transport]) -> Iterator[type[Transport]]:
    """Make one method of a transport raise at one of its calls, on one rank."""
    chosen, left = rng.choice(METHODS), rng.choice([0, 0, 1, 3, 10, 50])

    def disturb(name: str) -> None:
        nonlocal left
        if name == chosen:
            left -= 1
            if left == -1:
                raise RuntimeError(f"{name} of a plug-in is broken")

    yield spoilt(base, disturb)


def spoilt(base: type[Transport], disturb: Callable[[str], None]) -> type[Transport]:
    """Return a transport class whose methods call ``disturb`` first if the core calls them, and not one another."""
    calls = threading.local()

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            if getattr(calls, "inside", False) or self.__dict__.get("closes"):
                return getattr(super(kind, self), name)(*args)
            calls.inside = True
            try:
                disturb(name)
                return getattr(super(kind, self), name)(*args)
            finally:
                calls.inside = False

        return call

    async def aclose(self: Any) -> None:
        self.closes = True
        try:
            disturb("aclose")
        finally:
            await super(kind, self).aclose()  # The transport still closes what it has opened.

    methods: dict[str, Any] = {name: method(name) for name in METHODS if name != "aclose"}
    kind: Any = type("Spoilt", (base,), methods | {"aclose": aclose})
    return kind  # type: ignore[no-any-return]


GENTLE = {it.__name__: it for it in (collections, switches, forks, cancellations)}
HARSH = {it.__name__: it for it in (interrupts,)}
PLUG_INS = {it.__name__: it for it in (stalls, raises)}
NAMES = (*GENTLE, *HARSH, *PLUG_INS)
FATAL = (*HARSH, "raises")
"""The disturbances that happen to one rank alone, and may end the communicator."""
PROCESS_WIDE = ("collections", "switches", "forks", "stalls")
"""The disturbances of a whole process, which only one of its ranks brings."""
