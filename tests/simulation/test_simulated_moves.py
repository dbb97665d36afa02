"""The promises of a source and a target, one at a time, between two jobs of two ranks in a simulated world."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest
import torch
from notices import found, leave
from torch import Tensor

import aiocomms
from aiocomms import Communicator, Endpoint
from aiocomms.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommClosedError,
    CommError,
    MismatchError,
    MoveLostError,
    MoveTimeoutError,
    PeerDiedError,
)
from aiocomms.resharding import Chunk, Source, Target
from aiocomms.serving import Service
from aiocomms.testing.simulation import here, simulate

pytestmark = pytest.mark.deterministic

Server = Callable[[Communicator, Target], Awaitable[Any]]
Trainer = Callable[[Communicator, Source, Tensor], Awaitable[Any]]
USES = "still uses the version before the current one"


class Bare(BaseException):
    """An error that is not an ``Exception``, like SystemExit."""


async def all_over() -> None:
    """Leave when all four have come here."""
    leave(f"over {here().rank}")
    for rank in range(here().ranks):
        await found(f"over {rank}")


def run(server: Server, trainer: Trainer, *, versions: tuple[int, int] = (0, 0), **options: Any) -> list[Any]:
    """Run a server of two ranks, which have a column each, and a trainer of two, which have a row each.

    :param versions: what the server's ranks begin with.
    :param options: those of ``Source.open``; ``dtype``, that of the server; and ``heartbeat``, a hint to all.
    """
    dtype, hints = options.pop("dtype", torch.float32), {"heartbeat": options.pop("heartbeat", None)}

    async def program() -> Any:
        side, rank = divmod(here().rank, 2)
        here().launched_as(("server", "trainer")[side], rank, 2)
        async with (
            aiocomms.new_comm(timeout=60, hints=hints) as comm,
            aiocomms.open_endpoint(timeout=60, hints=hints) as mine,
        ):
            if side == 0:
                chunk = Chunk(torch.zeros(2, 1, dtype=dtype), (2, 2), (0, rank))
                async with await Target.open(comm, {"w": chunk}, mine, version=versions[rank]) as target:
                    leave("address", target.address)
                    result = await server(comm, target)
                    await all_over()
                    return result
            row = torch.zeros(1, 2)
            address = await found("address")
            async with await Source.open(
                comm, {"w": Chunk(row, (2, 2), (rank, 0))}, mine, address, **options
            ) as source:
                result = await trainer(comm, source, row)
                await all_over()
                return result

    return simulate(program, 4, seed=1).results


async def idle(comm: Communicator, target: Target) -> None:
    """Serve nobody."""


async def read(target: Target) -> tuple[int, list[float]]:
    """Take a step, and return what it reads."""
    async with target.step() as weights:
        return weights.version, weights["w"].flatten().tolist()


def fills(value: float) -> Trainer:
    """Return a trainer that moves one version, whose elements are ``value`` and one more in the second row."""

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        row.fill_(value + comm.rank)
        await source.move(1)
        leave("moved")

    return trainer


async def read_when_moved(comm: Communicator, target: Target) -> Any:
    await found("moved")
    return await read(target)


def test_step_reads_what_was_moved() -> None:
    assert run(read_when_moved, fills(5.0))[:2] == [(1, [5.0, 6.0])] * 2


def test_values_are_rounded_to_the_dtype_of_the_target() -> None:
    assert run(read_when_moved, fills(1.001), dtype=torch.bfloat16)[:2] == [(1, [1.0, 2.0])] * 2


def test_convert_makes_the_values_that_are_sent() -> None:
    def convert(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        assert name == "w"
        return (part * 10).to(dtype)

    assert run(read_when_moved, fills(1.5), dtype=torch.int32, convert=convert)[:2] == [(1, [15, 25])] * 2


@pytest.mark.parametrize("kind", [ValueError, Bare])
def test_error_of_convert_is_named_and_the_next_move_works(kind: type[BaseException]) -> None:
    def convert(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        if part.min() == 7:
            raise kind("an unlucky number")
        return part

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> Any:
        row.fill_(6 + comm.rank)
        with pytest.raises(
            MoveLostError, match=f"version 1 is not current: source rank 1: {kind.__name__}: an unlucky"
        ) as one:
            await source.move(1)
        assert isinstance(one.value.__cause__, kind) == (comm.rank == 1)
        row.fill_(9.0)
        await source.move(1)
        leave("moved")
        return source.version, source.nbytes

    assert run(read_when_moved, trainer, convert=convert) == [(1, [9.0, 9.0])] * 2 + [(1, 8)] * 2


@pytest.mark.parametrize("kind", [asyncio.CancelledError, StopIteration])
def test_move_fails_whose_convert_raises_an_error_of_the_event_loop(kind: type[BaseException]) -> None:
    def convert(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        raise kind

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        with pytest.raises(MoveLostError, match=f"source rank [01]: RuntimeError: .*{kind.__name__}"):
            await source.move(1)
        leave("moved")

    assert run(read_when_moved, trainer, convert=convert)[:2] == [(0, [0.0, 0.0])] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_deadline_says_which_target_rank_keeps_a_version(rank: int) -> None:
    async def server(comm: Communicator, target: Target) -> Any:
        if comm.rank == rank:
            with target.at(0) as weights:
                await found("late")
                assert weights["w"].flatten().tolist() == [0.0, 0.0]
            leave("let go")
        return await read_when_moved(comm, target)

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        await source.move(1)
        row.fill_(2.0)
        with pytest.raises(MoveTimeoutError, match=f"source rank [01]; target rank {rank} {USES}"):
            await source.move(2, timeout=3)
        leave("late")
        await found("let go")
        await source.move(2)
        leave("moved")

    assert run(server, trainer)[:2] == [(2, [2.0, 2.0])] * 2


def test_cancelled_rank_ends_the_move_on_the_others_and_the_next_one_works() -> None:
    async def server(comm: Communicator, target: Target) -> Any:
        with target.at(0):
            await found("cancelled")
        return await read_when_moved(comm, target)

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        await source.move(1)
        if comm.rank == 1:
            task = asyncio.ensure_future(source.move(2))
            for seconds in (1, 0):
                await asyncio.sleep(seconds)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not source._moving, "the cancelled move is still under way"
            leave("cancelled")
        else:
            with pytest.raises(
                MoveLostError, match=r"version 2 is not current: it was cancelled on source rank 1; target"
            ):
                await source.move(2)
        row.fill_(3.0)
        await source.move(2)
        leave("moved")

    assert run(server, trainer)[:2] == [(2, [3.0, 3.0])] * 2


def test_move_reads_the_tensors_with_their_present_memory_and_refuses_others() -> None:
    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        row.data = torch.full((1, 2), 6.0)
        await source.move(1)
        if comm.rank == 1:
            row.data = torch.zeros(3)
            with pytest.raises(ArgumentError, match=r"tensors\['w'\] has .* of shape \[3\]"):
                await source.move(2)
        else:
            with pytest.raises(MoveLostError, match=r"source rank 1: ArgumentError: tensors\['w'\] has"):
                await source.move(2)
        assert await comm.all_gather_object(source.version) == [1, 1]
        row.data = torch.full((1, 2), 7.0)
        await source.move(2)
        leave("moved")

    assert run(read_when_moved, trainer)[:2] == [(2, [7.0, 7.0])] * 2


def test_ranks_that_call_for_different_versions_are_told_so() -> None:
    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        with pytest.raises(MismatchError, match=r"source rank 0 for 1, source rank 1 for 2$"):
            await source.move(1 + comm.rank)
        await fills(4.0)(comm, source, row)

    assert run(read_when_moved, trainer)[:2] == [(1, [4.0, 5.0])] * 2


def test_deadline_says_which_source_rank_has_not_called() -> None:
    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        if comm.rank == 0:
            with pytest.raises(MoveTimeoutError, match=r"on source rank 0; source rank 1 has not called move$"):
                await source.move(1, timeout=2)
            leave("late")
        else:
            await found("late")
            with pytest.raises(MoveTimeoutError, match=r"source rank 1 has not called move$"):
                await source.move(1)
        await fills(4.0)(comm, source, row)

    assert run(read_when_moved, trainer)[:2] == [(1, [4.0, 5.0])] * 2


def test_version_must_rise_and_be_a_number() -> None:
    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        for version, message in (
            (0, "version is 0, and the target has had 3, wanted a higher one"),
            (-1, "wanted an int"),
        ):
            with pytest.raises(ArgumentError, match=message):
                await source.move(version)
        with pytest.raises(ArgumentError, match="version is None, wanted an int"):
            await source.move(None)  # type: ignore[arg-type]
        await source.move(4)

    run(idle, trainer, versions=(3, 3))


def test_no_step_begins_until_ranks_that_differ_have_a_version() -> None:
    async def server(comm: Communicator, target: Target) -> Any:
        assert target.version == (None if comm.rank == 0 else 0)
        return await read(target)

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        assert source.version == 7
        row.fill_(8.0)
        await asyncio.sleep(5)
        await source.move(8)

    assert run(server, trainer, versions=(7, 0))[:2] == [(8, [8.0, 8.0])] * 2


def test_plan_reads_the_version_that_its_caller_has_pinned() -> None:
    async def server(comm: Communicator, target: Target) -> Any:
        async def execute(plan: Any) -> float:
            with target.at(plan) as weights:
                leave("running")
                await found("moved")
                return (await service.comm.all_reduce(weights["w"].clone())).sum().item()

        async with Service(comm) as service:
            if comm.rank:
                await service.work(execute)
                return None
            async with service.drive(execute) as driver:
                async with target.pin() as weights:
                    old = await driver.run(weights.version)
                async with target.pin() as weights:
                    return old, await driver.run(weights.version)

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        await found("running")
        await fills(1.0)(comm, source, row)

    assert run(server, trainer)[0] == (0.0, 6.0)


def test_version_that_is_not_held_is_refused() -> None:
    async def server(comm: Communicator, target: Target) -> None:
        with pytest.raises(ArgumentError, match="version is 3, wanted one that rank 0 has pinned; this rank holds 0"):
            target.at(3).__enter__()
        if comm.rank:
            with pytest.raises(ArgumentError, match="pin was called on rank 1, wanted at"):
                await target.pin().__aenter__()

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        pass

    run(server, trainer)


def test_source_that_another_one_has_taken_the_place_of_is_told_so() -> None:
    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        async with (
            aiocomms.open_endpoint(timeout=60) as mine,
            await Source.open(comm, {"w": Chunk(row, (2, 2), (comm.rank, 0))}, mine, await found("address")) as other,
        ):
            with pytest.raises(MoveLostError, match="another source has taken its place"):
                await source.move(1)
            row.fill_(2.0)
            await other.move(1)
            leave("moved")

    assert run(read_when_moved, trainer)[:2] == [(1, [2.0, 2.0])] * 2


def test_move_under_way_ends_when_another_source_takes_the_place() -> None:
    async def server(comm: Communicator, target: Target) -> Any:
        with target.at(0):
            await found("replaced")
        return await read_when_moved(comm, target)

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        await source.move(1)
        waits = asyncio.ensure_future(source.move(2))
        async with (
            aiocomms.open_endpoint(timeout=60) as mine,
            await Source.open(comm, {"w": Chunk(row, (2, 2), (comm.rank, 0))}, mine, await found("address")) as other,
        ):
            with pytest.raises(MoveLostError, match="another source has taken its place"):
                await waits
            leave("replaced")
            row.fill_(2.0)
            await other.move(2)
            leave("moved")

    assert run(server, trainer)[:2] == [(2, [2.0, 2.0])] * 2


def test_error_that_leaves_the_block_of_a_target_is_told_to_the_source() -> None:
    async def server(comm: Communicator, target: Target) -> None:
        async with aiocomms.open_endpoint(timeout=60) as mine:
            with contextlib.suppress(ValueError):
                async with await Target.open(
                    comm, {"w": Chunk(torch.zeros(2, 1), (2, 2), (0, comm.rank))}, mine
                ) as other:
                    leave("other address", other.address)
                    await found("connected 0")
                    await found("connected 1")
                    raise ValueError("out of luck")
            leave(f"raised {comm.rank}")

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        chunks = {"w": Chunk(row, (2, 2), (comm.rank, 0))}
        async with (
            aiocomms.open_endpoint(timeout=60) as mine,
            await Source.open(comm, chunks, mine, await found("other address")) as other,
        ):
            leave(f"connected {comm.rank}")
            await found("raised 0")
            await found("raised 1")
            with pytest.raises(MoveLostError, match=r"target rank 0: .*ValueError: out of luck"):
                await other.move(1)

    run(server, trainer)


def test_closed_target_is_named() -> None:
    async def server(comm: Communicator, target: Target) -> None:
        await found("first")
        await comm.barrier()
        await target.aclose()
        await target.aclose()
        leave("closed")
        with pytest.raises(CommClosedError):
            await read(target)

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        await source.move(1)
        leave("first")
        await found("closed")
        with pytest.raises(MoveLostError, match=r"target rank [01]: the other endpoint has closed the connection"):
            await source.move(2)
        await source.aclose()
        with pytest.raises(CommClosedError, match="the source is closed"):
            await source.move(2)

    run(server, trainer)


@pytest.mark.parametrize("while_it_reads", [False, True])
def test_closed_target_rank_is_named_and_its_server_goes_on(while_it_reads: bool) -> None:
    """The other rank stays open for longer than the communicator's deadline, and then uses the communicator."""

    async def server(comm: Communicator, target: Target) -> None:
        await found("first")
        if comm.rank == 1:
            with target.at(0) if while_it_reads else contextlib.nullcontext():
                if while_it_reads:
                    leave("closes")
                    await asyncio.sleep(1)
                await target.aclose()
                leave("closes")
        await asyncio.sleep(100)
        await comm.barrier()

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        await source.move(1)
        leave("first")
        await found("closes")
        for version in (2, 3):
            with pytest.raises(MoveLostError, match="target rank 1 was closed"):
                await source.move(version)

    run(server, trainer)


@pytest.mark.parametrize("closes", [0, 1])
def test_closed_source_rank_is_named_and_its_trainer_goes_on(closes: int) -> None:
    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        if comm.rank == closes:
            await source.aclose()
        else:
            for version in (1, 2):
                with pytest.raises(MoveLostError, match=f"source rank {closes} was closed"):
                    await source.move(version)
        await asyncio.sleep(100)
        await comm.barrier()

    run(idle, trainer)


def open_side(comm: Communicator, mine: Endpoint, address: bytes) -> Awaitable[Source | Target]:
    """Open the source of a trainer, or the target of a server."""
    if address:
        return Source.open(comm, {"w": Chunk(torch.ones(1, 2), (2, 2), (comm.rank, 0))}, mine, address)
    return Target.open(comm, {"w": Chunk(torch.zeros(2, 1), (2, 2), (0, comm.rank))}, mine)


async def cancelled_open(comm: Communicator, mine: Endpoint, address: bytes, after: float) -> str:
    """Cancel an ``open`` after some seconds, unless it has ended before. Return how it has ended."""
    party = None
    with anyio.move_on_after(after) as scope:
        try:
            party = await open_side(comm, mine, address)
        except MoveLostError as error:
            return str(error)
    leave(f"tried {comm.rank}")
    if party is not None:
        await found(f"tried {1 - comm.rank}")
        await party.aclose()
    return "cancelled" if scope.cancelled_caught else "opened"


def ends_of_cancelled_opens(who: Sequence[int], side: int, after: float) -> list[str]:
    """Open a target and a source, where some ranks of one side cancel their first attempt. Return how these ended."""

    async def program() -> str:
        mine, rank = divmod(here().rank, 2)
        here().launched_as(("server", "trainer")[mine], rank, 2)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as endpoint:
            address = await found("address") if mine else b""
            end = ""
            if mine == side:
                end = await cancelled_open(comm, endpoint, address, after if rank in who else 100)
                leave(f"tried {rank}")
            async with await open_side(comm, endpoint, address) as party:
                if isinstance(party, Source):
                    await party.move(1)
                else:
                    leave("address", party.address)
                await all_over()
        return end

    return simulate(program, 4, seed=1).results[2 * side : 2 * side + 2]


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_ranks_open_again_after_a_cancelled_open_of_a_target(who: tuple[int, ...]) -> None:
    """The cancellations come at each step of ``open``, and the next ``open`` begins at once."""
    seen = [ends_of_cancelled_opens(who, 0, step * 0.0005) for step in range(6)]
    assert {"cancelled"} <= {ends[who[0]] for ends in seen} <= {"cancelled", "opened"}


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_ranks_open_again_after_a_cancelled_open_of_a_source(who: tuple[int, ...]) -> None:
    seen = [ends_of_cancelled_opens(who, 1, step * 0.0015) for step in range(20)]
    assert {ends[who[0]] for ends in seen} == {"cancelled", "opened"}
    if len(who) == 1:
        told = f"on 'world' (rank {1 - who[0]}): source rank {who[0]}: CommError: its task was cancelled"
        assert {ends[1 - who[0]] for ends in seen} == {told, "opened"}


def test_failed_open_of_one_rank_is_told_to_the_others() -> None:
    async def program() -> None:
        here().launched_as("server", here().rank, 2)
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            tensors: Any = {"w": torch.zeros(2)} if comm.rank == 0 else {"w": 1}
            kind, words = ((MoveLostError, "target rank 1: ArgumentTypeError"), (ArgumentTypeError, "tensors"))[
                comm.rank
            ]
            with pytest.raises(kind, match=words):
                await Target.open(comm, tensors, mine)
            await asyncio.sleep(100)
            await comm.barrier()

    simulate(program, 2, seed=1)


def test_target_that_cannot_be_reached_is_an_error_on_all_source_ranks() -> None:
    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        other = await aiocomms.open_endpoint(timeout=60)
        await other.aclose()
        kind = PeerDiedError if comm.rank == 0 else MoveLostError
        async with aiocomms.open_endpoint(timeout=60) as mine:
            with pytest.raises(kind, match="cannot be reached"):
                await Source.open(comm, {"w": Chunk(row, (2, 2), (comm.rank, 0))}, mine, other.address)
            with pytest.raises(ArgumentError, match=r"no source rank has \[2, 1\] elements of 'w' at \[0, 1\]"):
                await Source.open(comm, {"w": Chunk(row[:, :1], (2, 2), (comm.rank, 0))}, mine, await found("address"))

    run(idle, trainer)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(1)], "tensors is .*, wanted a mapping of names to tensors, DTensors or chunks"),
        ({1: torch.zeros(1)}, "a name of tensors is 1 .*, wanted a str"),
        ({"w": 1.0}, r"tensors\['w'\] is 1.0 \(float\), wanted a tensor, a DTensor or a Chunk"),
        (
            {"w": Chunk(torch.zeros(2), (3,), (2,))},
            r"has offsets \[2\] and a tensor of shape \[2\], wanted a part of.*\[3\]",
        ),
        ({"w": Chunk(torch.zeros(2), (3,), (0, 0))}, r"has offsets \[0, 0\]"),
        ({"w": Chunk(torch.zeros(2), 3, (0,))}, r"tensors\['w'\].shape is 3 \(int\), wanted a tuple of ints"),
        ({"w": torch.zeros(2).to_sparse()}, r"tensors\['w'\].tensor is a sparse_coo tensor, wanted a dense one"),
        ({"w": torch.zeros(2, device="meta")}, r"tensors\['w'\].tensor is on meta, wanted it on cpu"),
    ],
)
def test_wrong_tensors_are_refused(tensors: Any, message: str) -> None:
    async def server(comm: Communicator, target: Target) -> None:
        async with aiocomms.open_endpoint(timeout=60) as mine:
            with pytest.raises(ArgumentError, match=message):
                await Target.open(comm, tensors, mine)
            with pytest.raises(ArgumentError, match=message):
                await Source.open(comm, tensors, mine, target.address)
            for opening in (Target.open(None, {}, mine), Source.open(None, {}, mine, b"")):  # type: ignore[arg-type]
                with pytest.raises(ArgumentTypeError, match=r"comm is None \(NoneType\), wanted a Communicator"):
                    await opening

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        pass

    run(server, trainer)


@pytest.mark.parametrize("stuck", [0, 2])
def test_rank_0_that_does_not_answer_is_named_some_seconds_after_the_deadline(stuck: int) -> None:
    """Target rank 0 and source rank 0 stand still for longer than the others wait, and nothing takes them for dead."""

    async def trainer(comm: Communicator, source: Source, row: Tensor) -> None:
        if here().rank == 3:
            here().world.pause(stuck, 15.0)
        who = (
            "target rank 0: aborted by this endpoint: it has not answered for 5 s"
            if stuck == 0
            else "source rank 0 has not answered for 6 s"
        )
        if here().rank != stuck:
            with pytest.raises(MoveTimeoutError, match=f"{who}.*; it may have become current before that"):
                await source.move(1, timeout=1)

    run(idle, trainer, heartbeat=0)


async def serve_with_a_newcomer(rank: int) -> list[int]:
    """Take steps to version 3; rank 1 dies in its first step with version 1, and another process takes its place."""
    comm = await aiocomms.new_comm(timeout=60, join=here().restarts > 0)
    seen, values = [0], torch.zeros(2, 1)
    while seen[-1] < 3:
        try:
            async with (
                aiocomms.open_endpoint(timeout=60) as mine,
                await Target.open(comm, {"w": Chunk(values, (2, 2), (0, rank))}, mine, version=seen[-1]) as target,
            ):
                leave(f"address of {comm.name}", target.address)
                while seen[-1] < 3:
                    async with target.step() as weights:
                        seen.append(weights.version)
                        values = weights["w"].clone()
                        assert values.flatten().tolist() == [weights.version] * 2
                        if rank == 1 and seen[-1] == 1:
                            leave("rank 1 dies")
                            here().world.kill(here().rank, 1.0)
                    await asyncio.sleep(0.02)
        except CommError:
            comm = await comm.reconfigure(size=2, timeout=30)
    await comm.aclose()
    return sorted({*seen})


async def train_with_a_newcomer(rank: int) -> None:
    """Move version 1 to the first form of the server, and the others to the second."""
    row = torch.zeros(1, 2)
    chunks = {"w": Chunk(row, (2, 2), (rank, 0))}
    async with aiocomms.new_comm(timeout=60) as comm:
        for name, versions in (("world", (1, 2)), ("world@2", (2, 3))):
            address = await found(f"address of {name}")
            async with (
                aiocomms.open_endpoint(timeout=60) as mine,
                await Source.open(comm, chunks, mine, address) as source,
            ):
                for version in versions:
                    row.fill_(version)
                    if lost := (name, version) == ("world", 2):
                        await found("rank 1 dies")
                    with pytest.raises(MoveLostError) if lost else contextlib.nullcontext():
                        await source.move(version)


def test_target_rank_that_joins_gets_its_weights_by_the_next_move() -> None:
    async def program() -> Any:
        side, rank = divmod(here().rank, 2)
        here().launched_as(("server", "trainer")[side], rank, 2)
        return await (serve_with_a_newcomer, train_with_a_newcomer)[side](rank)

    results = [simulate(program, 4, seed=seed, longest=300).results for seed in range(4)]
    assert [it[1] for it in results] == [[0, 2, 3]] * 4
    assert any(it[0] == [0, 1, 2, 3] for it in results), "the ranks never differed in their versions"


def test_ranks_that_hold_nothing_take_part() -> None:
    async def program() -> Any:
        side, rank = divmod(here().rank, 2)
        here().launched_as(("server", "trainer")[side], rank, 2)
        tensors = {} if rank else {"w": torch.full((2,), float(side)), "nothing": torch.zeros(0, 3)}
        async with aiocomms.new_comm(timeout=60) as comm, aiocomms.open_endpoint(timeout=60) as mine:
            if side == 0:
                async with await Target.open(comm, tensors, mine) as target:
                    leave("address", target.address)
                    await found("moved")
                    async with target.step() as weights:
                        found_here = weights.version, {name: it.tolist() for name, it in weights.items()}
                    await all_over()
                    return found_here
            async with await Source.open(comm, tensors, mine, await found("address")) as source:
                await source.move(1)
                leave("moved")
                await all_over()
                return source.nbytes

    assert simulate(program, 4, seed=1).results == [(1, {"w": [1.0, 1.0], "nothing": []}), (1, {}), 8, 0]
