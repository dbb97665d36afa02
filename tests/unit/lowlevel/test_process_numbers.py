"""Process numbers, which distinguish a process from a later one with the same pid."""

from __future__ import annotations

import asyncio
import os
import select

import pytest

from aiocomms.endpoints.pools import LeaseLedger
from aiocomms.lowlevel.hosts import process_descriptor, process_number, this_process
from aiocomms.progress.driver import LoopDriver

pytestmark = pytest.mark.deterministic


def earlier(number: int) -> int:
    """Return the number of a process that had the same pid, and began at another time."""
    return number - 2**22


def test_number_has_the_pid_and_the_time_at_which_the_process_began() -> None:
    assert process_number(os.getpid()) == this_process()[1]
    assert process_number(os.getpid()) % 2**22 == os.getpid()
    assert process_number(os.getpid()) > 2**22
    assert process_number(0) == 0  # No process has this pid.


def test_descriptor_is_of_the_process_with_the_number_alone() -> None:
    mine = process_number(os.getpid())
    fd = process_descriptor(mine)
    assert fd is not None
    assert select.select([fd], [], [], 0)[0] == []
    os.close(fd)
    with pytest.raises(ProcessLookupError):
        process_descriptor(earlier(mine))
    assert process_descriptor(0) is None


def test_blocks_of_a_borrower_are_free_whose_pid_another_process_has() -> None:
    async def main() -> list[int]:
        ledger, freed = LeaseLedger(LoopDriver.current()), list[int]()
        mine = process_number(os.getpid())
        for number, process in enumerate((mine, earlier(mine), 0)):
            ledger.hold(b"borrower", number, process, lambda number=number: freed.append(number))
        assert ledger.held_by(b"borrower") == [0, 2]
        ledger.close()
        return freed

    assert asyncio.run(main()) == [1]
