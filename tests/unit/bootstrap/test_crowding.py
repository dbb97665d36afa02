"""The warning that the ranks of a host together have more torch threads than the host has processors."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from concurrency import together
from torch.distributed import HashStore

import aiocomms
from aiocomms.bootstrap import crowding
from aiocomms.communicator import formation

pytestmark = pytest.mark.deterministic


class EveryTask(dict):
    """A dictionary of counted processes in which each task counts as a process of its own."""

    def setdefault(self, pid, claim):
        return claim


@pytest.fixture
def processes(monkeypatch):
    """Let each rank of this test stand for a process with two torch threads, on two processors."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(crowding, "_counted", EveryTask())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(formation, "call_in_thread", lambda call, _: call())


@pytest.fixture
def warnings(run, caplog):
    """Return a function that forms a communicator of some size, and returns the warnings about threads."""

    def form(size):
        store = HashStore()

        async def rank(i):
            async with aiocomms.new_comm("local", store=store, rank=i, size=size) as comm:
                await comm.barrier()

        async def main():
            await together(*[lambda i=i: rank(i) for i in range(size)])

        with caplog.at_level(logging.WARNING, "aiocomms"):
            run(main)
        return [record.getMessage() for record in caplog.records if "threads" in record.getMessage()]

    return form


@pytest.mark.usefixtures("processes")
def test_ranks_with_more_threads_than_processors_are_warned_once(warnings):
    assert warnings(3) == [
        "3 ranks on this host have 6 of torch's threads together for 2 processors, which slows all of them down: set "
        "OMP_NUM_THREADS=1 for each, or call torch.set_num_threads(1) first"
    ]


@pytest.mark.usefixtures("processes")
def test_a_setting_says_that_the_threads_are_wanted(warnings, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert warnings(3) == []


@pytest.mark.usefixtures("processes")
def test_ranks_with_a_processor_for_each_thread_are_not_warned(warnings, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert warnings(3) == []


@pytest.mark.usefixtures("processes")
def test_ranks_with_processors_of_their_own_are_not_warned(warnings, monkeypatch):
    own = iter(range(100))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {next(own), 1000})
    assert warnings(3) == []


@pytest.mark.usefixtures("processes")
def test_ranks_of_other_hosts_are_counted_apart(warnings, monkeypatch):
    hosts = iter("abcdefgh")
    monkeypatch.setattr(crowding, "host_id", lambda: next(hosts))
    assert warnings(3) == []


@pytest.mark.usefixtures("processes")
def test_ranks_of_one_process_share_its_threads(warnings, monkeypatch):
    monkeypatch.setattr(crowding, "_counted", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert warnings(3) == []
