"""Two processes write KV blocks into each other's memory, without a model."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from processes import HANGS, KILLED, Rank, Run

from aiocomms.errors import ArgumentError, AuthError, CommError

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT, LENGTH = 16, 4096


@pytest.fixture
def transport() -> str:
    return "ucx"


def load(name: str) -> ModuleType:
    """Import a module of the example, in any process."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(f"kv_blocks.{name}")


def memory(value: int) -> memoryview:
    """Return blocks. Each byte of block n is this value plus n."""
    data = bytearray(b"".join(bytes([value + n]) * LENGTH for n in range(COUNT)))
    return memoryview(data).cast("B", (COUNT, LENGTH))


def ended(transport: Any, number: int, peer: str) -> Any:
    """Poll as the engine's loop does until a transfer has ended, and return the result of the last poll."""
    ends = time.monotonic() + HANGS
    while time.monotonic() < ends:
        found = transport.poll(peer)
        if number in (*found.done, *found.failed):
            return found
        time.sleep(0.001)
    raise AssertionError(f"transfer {number} hangs")


def faulty(transport: Any, peer: str) -> str | None:
    """Poll until a peer has a fault, and return the fault."""
    fault: str | None = None
    ends = time.monotonic() + HANGS
    while fault is None and time.monotonic() < ends:
        time.sleep(0.001)
        fault = transport.poll(peer).peer_fault
    return fault


# ------------------------------------------------------------------------------------------------------- awaited


async def write(place: Rank) -> list[int]:
    """Write blocks to the other node, check that invalid writes are refused, and return each own block's value."""
    mine, other = memory(100 * place.rank), 1 - place.rank
    blocks = await load("blocks").Blocks.open(mine)
    place.give(f"metadata {place.rank}", blocks.metadata)
    await blocks.add("other", await asyncio.to_thread(place.given, f"metadata {other}"), COUNT, LENGTH)
    await blocks.write_blocks("other", [0, 1, 2, 7], [10, 11, 12, 9])
    with pytest.raises(ArgumentError, match=r"places are \[16\], wanted ints of 0 <= place < 16"):
        await blocks.write_blocks("other", [0, 1], [0, 16])
    with pytest.raises(ArgumentError, match="local has 2 indices and remote has 1"):
        await blocks.write_blocks("other", [0, 1], [0])
    with pytest.raises(ArgumentError, match="'nobody' was not added"):
        await blocks.write_blocks("nobody", [0], [0])
    place.tell(f"written {place.rank}")
    await place.all_told("written", other)
    place.tell(f"seen {place.rank}")
    await place.all_told("seen", other)
    await blocks.remove("other")
    assert all(len(set(row)) == 1 for row in mine.tolist())
    await blocks.aclose()
    return [row[0] for row in mine.tolist()]


def test_both_nodes_write_blocks_into_each_other(ranks: Run) -> None:
    first = [*range(9), 107, 100, 101, 102, 13, 14, 15]
    second = [*range(100, 109), 7, 0, 1, 2, 113, 114, 115]
    assert ranks(2, write) == [first, second]


async def refuse(place: Rank) -> None:
    """Check that other block sizes, invalid metadata and a closed node are refused."""
    module = load("blocks")
    one, two = await module.Blocks.open(memory(0)), await module.Blocks.open(memory(100))
    with pytest.raises(ArgumentError, match=r"node 'two' has \(16, 4096\) blocks and bytes, wanted \(16, 1\)"):
        await one.add("two", two.metadata, COUNT, 1)
    with pytest.raises(ArgumentError, match=r"wanted \(17, 4096\)"):
        await one.add("two", two.metadata, COUNT + 1, LENGTH)
    with pytest.raises(ArgumentError, match="address is not an endpoint's"):
        await one.add("two", b"nonsense", COUNT, LENGTH)
    changed = bytearray(two.metadata)
    changed[-1] ^= 1
    with pytest.raises((ArgumentError, AuthError)):
        await one.add("two", bytes(changed), COUNT, LENGTH)
    await two.aclose()
    with pytest.raises(CommError):
        await one.add("two", two.metadata, COUNT, LENGTH)
    await one.aclose()
    with pytest.raises(ArgumentError, match=r"wanted writable, contiguous \[blocks, bytes of a block\]"):
        await module.Blocks.open(memoryview(bytes(8)))


@pytest.mark.search
def test_blocks_that_do_not_fit_are_refused(ranks: Run) -> None:
    ranks(1, refuse)


# ---------------------------------------------------------------------------------------------- submitted, and polled


async def submit(place: Rank, dies: bool) -> Any:
    await asyncio.to_thread(lambda: None)  # the event loop takes no part in the transfers
    mine = memory(100 * place.rank)
    transport = load("transport").EndpointTransport(mine, {"model": "none"})
    assert (transport.num_blocks, transport.block_len) == (COUNT, LENGTH)
    assert len(transport.config_fingerprint) == 16
    if place.rank == 1:
        place.give("metadata", transport.get_agent_metadata())
        place.told("written")
        if dies:
            await place.die()
        rows = [row[0] for row in mine.tolist()]
        transport.close()
        return rows
    metadata = place.given("metadata")
    assert transport.write_blocks("decode", [0], [0]) is None
    transport.add_remote_peer("decode", metadata, 0, COUNT, LENGTH)
    number = transport.write_blocks("decode", [3, 4, 5], [0, 1, 15])
    found = ended(transport, number, "decode")
    assert (found.done, found.failed, found.peer_fault) == ([number], [], None)
    assert transport.write_blocks("decode", [0], [COUNT]) is None
    assert transport.cancel([number, 77], mode="wait") == []
    place.tell("written")
    fault = faulty(transport, "decode")
    assert transport.write_blocks("decode", [0], [0]) is None
    transport.remove_remote_peer("decode")
    assert transport.poll("decode").peer_fault is None
    transport.close()
    transport.close()
    return fault


@pytest.mark.search
def test_submitted_transfer_is_polled_to_its_end_and_reports_a_closed_peer(ranks: Run) -> None:
    fault, rows = ranks(2, submit, False)
    assert rows == [3, 4, *range(102, 115), 5]
    assert "the owner has taken the lease back" in fault


@pytest.mark.search
@pytest.mark.fault(112, transport="ucx")
def test_transfer_to_a_dead_node_reports_a_fault(ranks: Run) -> None:
    fault, rows = ranks(2, submit, True)
    assert rows == KILLED
    assert "has died or was cut off" in fault
