"""A failure of one rank alone: the others hear of it at once, and do not wait for their deadlines. Case 102."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from aiocomms_c10d import C10dTransport
from aiocomms_local import LocalTransport
from aiocomms_ucx import UcxTransport
from concurrency import ranks, together
from torch.distributed import HashStore

import aiocomms
from aiocomms import ops
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.communicator import objects
from aiocomms.communicator.streams import TensorStream
from aiocomms.errors import CommAbortedError, CommError, ProtocolError
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

BASES = {"local": LocalTransport, "c10d": C10dTransport, "ucx": UcxTransport}
LONG = 600.0


@pytest.fixture(params=BASES)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


async def outcomes(world: list[Any], each: Callable[[Any], Any]) -> list[Any]:
    """Return what each rank's call returns or raises."""

    async def one(comm: Any) -> Any:
        try:
            return await each(comm)
        except CommError as error:
            return error

    return await ranks(world, one)


def split_by(failed: type[CommError], found: list[Any]) -> tuple[Any, list[Any]]:
    """Return the one error of the rank that failed, and the outcomes of the others."""
    mine = [error for error in found if type(error) is failed]
    assert len(mine) == 1, found
    return mine[0], [error for error in found if error is not mine[0]]


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "broadcast_object": lambda comm: comm.broadcast_object("x" * 1000, 0),
    "all_gather_object": lambda comm: comm.all_gather_object("x" * 1000),
    "gather_object": lambda comm: comm.gather_object("x" * 1000, 2),
    "scatter_object": lambda comm: comm.scatter_object(["x" * 1000] * 3 if comm.rank == 0 else None, 0),
}


@pytest.mark.fault(102)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_unreadable_object_header_on_one_rank_ends_all_ranks(
    run: Callable[..., Any], transport: str, name: str, monkeypatch: Any
) -> None:
    """The first rank that reads a header fails, while others wait for what it would send or receive."""
    whole, refusing = objects.ArrivingObject, [True]

    def arrival(header: bytes, device: torch.device) -> Any:
        if refusing:
            refusing.clear()
            raise ProtocolError("an object's header makes no sense")
        return whole(header, device)

    monkeypatch.setattr(objects, "ArrivingObject", arrival)

    async def main() -> None:
        async with local_world(3, transport, timeout=LONG) as world:
            first = await outcomes(world, COLLECTIVES[name])
            second = await outcomes(world, lambda comm: comm.barrier())
        broken = [error for error in first if isinstance(error, CommError) and "makes no sense" in str(error)]
        assert broken
        assert all(isinstance(error, CommAbortedError) and "makes no sense" in str(error) for error in second), second

    run(main)


class Refused:
    """The completion of an op that its transport carries out, but that this rank cannot use."""

    def __init__(self, work: Any) -> None:
        self.op, self.hints, self.done = work.op, work.hints, work.done
        self._work = work

    def complete(self, value: object = None) -> None:
        self._work.fail(CommError("there is no room for the window"))

    def fail(self, error: CommError) -> None:
        self._work.fail(error)


@pytest.mark.fault(102, transport="local")
@pytest.mark.fault(102, transport="ucx")
@pytest.mark.parametrize("base", [LocalTransport, UcxTransport])
def test_window_that_one_rank_cannot_open_fails_on_all(
    run: Callable[..., Any], install: Callable[..., None], base: type[Any]
) -> None:
    class Roomless(base):  # type: ignore[misc,valid-type]
        breaks = False

        def post(self, op: Any, work: Any) -> Any:
            refused = self.breaks and isinstance(op, ops.WindowOpen)
            return super().post(op, Refused(work) if refused else work)

    install(roomless=Roomless)

    async def main() -> None:
        async with local_world(2, "roomless", timeout=LONG) as world:
            world[0]._core.by_family["rma"].breaks = True

            async def use(comm: Any) -> None:
                async with await comm.new_window(torch.zeros(3)):
                    await comm.barrier()

            mine, others = split_by(CommError, await outcomes(world, use))
        assert "there is no room for the window" in str(mine)
        assert all(isinstance(error, CommAbortedError) and "there is no room" in str(error) for error in others)

    run(main)


@pytest.mark.fault(102)
@pytest.mark.parametrize("step", ["_on_hello", "_on_header"])
def test_malformed_stream_data_at_one_end_ends_the_other(
    run: Callable[..., Any], transport: str, monkeypatch: Any, step: str
) -> None:
    """One end gets malformed data. The other one, which waits without a deadline for credits and messages, ends."""
    whole = getattr(TensorStream, step)

    def broken(self: Any, work: Any) -> None:
        if self._comm.rank == 0 and step == "_on_hello":
            self._hello.zero_()
        elif self._comm.rank == 0:
            self._header.fill_(255)
        whole(self, work)

    monkeypatch.setattr(TensorStream, step, broken)

    async def main() -> None:
        async with local_world(2, transport, timeout=LONG) as world:

            async def use(comm: Any) -> None:
                stream = await comm.open_stream(1 - comm.rank, capacity=1)
                if comm.rank == 1:
                    await stream.send(torch.zeros(100_000))
                await stream.receive()

            mine, others = split_by(ProtocolError, await outcomes(world, use))
        assert all(isinstance(error, CommAbortedError) for error in others), (mine, others)

    run(main)


@pytest.mark.fault(102)
@pytest.mark.parametrize("how", ["raises", "is cancelled"])
def test_split_that_fails_on_one_rank_ends_the_others(
    run: Callable[..., Any], install: Callable[..., None], transport: str, how: str
) -> None:
    """One rank's split raises or is cancelled: the others, which would wait for 600 s, end at once."""
    base: type[Any] = BASES[transport]

    class Whole(base):  # type: ignore[misc,valid-type]
        breaks = False

        async def split(self, *args: Any) -> Any:
            if self.breaks and how == "raises":
                raise CommError("no descriptors are left")
            if self.breaks:
                scopes[0].cancel()
            return await super().split(*args)

    install(whole=Whole)
    scopes = list[anyio.CancelScope]()

    async def main() -> None:
        scopes.append(anyio.CancelScope())
        async with local_world(3, "whole", timeout=LONG) as world:
            world[0]._core.by_family["p2p"].breaks = True

            async def split(comm: Any) -> None:
                with scopes[0] if comm.rank == 0 else anyio.CancelScope():
                    await comm.split([0, 1, 2])
                if comm.rank == 0:
                    raise CommError("no descriptors are left")

            found = await outcomes(world, split)
            again = await outcomes(world, lambda comm: comm.barrier())
        assert all(isinstance(error, CommError) for error in found), found
        assert all(isinstance(error, CommAbortedError) for error in again), again
        if how == "raises":  # The others may notice by themselves that a cancelled split is undone.
            _, others = split_by(CommError, found)
            assert all("no descriptors are left" in str(error) for error in [*others, *again])

    run(main)


@pytest.mark.fault(102)
@pytest.mark.parametrize("how", ["raises", "is cancelled"])
def test_failure_of_one_rank_while_forming_ends_the_others(
    run: Callable[..., Any], transport: str, how: str, monkeypatch: Any
) -> None:
    """A rank fails or is cancelled after the first of several exchanges with the others, and these end."""
    whole, scope = StoreRendezvous.exchange, list[anyio.CancelScope]()

    async def exchange(self: StoreRendezvous, key: str, value: bytes) -> list[bytes]:
        got = await whole(self, key, value)
        if self.rank == 1 and how == "raises":
            raise OSError("no descriptors are left")
        if self.rank == 1:
            scope[0].cancel()
            await anyio.sleep_forever()
        return got

    monkeypatch.setattr(StoreRendezvous, "exchange", exchange)
    store = HashStore()

    async def form(rank: int) -> CommError | None:
        with anyio.CancelScope() as mine:
            if rank == 1:
                scope.append(mine)
            with pytest.raises(CommError) as caught:
                await aiocomms.new_comm(transport, store=store, rank=rank, size=3, timeout=LONG)
            return caught.value
        return None

    async def main() -> None:
        found = await together(*(lambda rank=rank: form(rank) for rank in range(3)))
        mine = found.pop(1)
        assert (mine is None) == (how == "is cancelled")
        why = "its call was cancelled" if mine is None else mine.message
        for error in found:
            assert isinstance(error, CommAbortedError), error
            assert (error.peer, error.message) == (1, f"rank 1 could not form the communicator: {why}")

    run(main)
