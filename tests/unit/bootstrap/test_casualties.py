"""Failure notices of ranks that fail before the rendezvous: the waiting ranks give up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator

import pytest
from torch.distributed import HashStore, PrefixStore, Store

import aiocomms
from aiocomms.bootstrap import casualties, early
from aiocomms.bootstrap.casualties import KEY, Casualties, at_the_bottom
from aiocomms.bootstrap.generations import Arrival
from aiocomms.bootstrap.launchers import Launch
from aiocomms.bootstrap.records import framed
from aiocomms.errors import CommAbortedError, PeerDiedError
from aiocomms.lowlevel.auth import Seal

pytestmark = [pytest.mark.deterministic, pytest.mark.fault(122)]

STARTED = 100.0
SECOND = 30
"""The number of looks after which a rank has waited for more than a second."""


class Host:
    """The host of all ranks of these tests, with a clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.name = STARTED, "here"
        patch.setattr(early._Start, "has_met", False)
        patch.setattr(casualties.time, "clock_gettime", lambda _: self.now)
        patch.setattr(casualties, "_started", lambda: STARTED)
        patch.setattr(casualties, "host_id", lambda: self.name)
        patch.setattr(casualties, "_helps", lambda _: False)

    def fails(self, store: Store, rank: int, what: str = "ValueError: no", at: float = STARTED + 1) -> None:
        """Let a rank fail and leave its notice in the store."""
        self.now = at
        casualties._leave(at_the_bottom(store), casualties._seal(), rank, what)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.delenv("AIOCOMMS_TOKEN", raising=False)
    return Host(monkeypatch)


@pytest.fixture
def store() -> Store:
    return HashStore()


def arriving(store: Store, rank: int, size: int = 3) -> Generator[float, None, str]:
    """Return the steps of a rank that arrives at a store below two prefixes, torch's and ours."""
    here = PrefixStore("aiocomms/world", PrefixStore("default_pg", store))
    return Arrival(here, rank, size, Seal(None, "world")).steps(600)


def wait(steps: Generator[float, None, str], looks: int = SECOND) -> None:
    for _ in range(looks):
        next(steps)


def heard(steps: Generator[float, None, str]) -> CommAbortedError:
    with pytest.raises(CommAbortedError) as caught:
        wait(steps, 4 * SECOND)
    return caught.value


@pytest.mark.parametrize("rank", [0, 2])
def test_waiting_rank_hears_of_a_rank_that_failed(host: Host, store: Store, rank: int) -> None:
    steps = arriving(store, rank)
    wait(steps)
    host.name = "elsewhere"  # A notice that appears while a rank waits is new, whatever its time.
    host.fails(store, 1, at=3.0)
    host.name = "here"
    error = heard(steps)
    assert error.peer == 1
    assert error.message == "rank 1 failed before it joined: ValueError: no"


def test_rank_that_arrives_later_hears_of_the_failure_at_once(host: Host, store: Store) -> None:
    host.fails(store, 1)
    with pytest.raises(CommAbortedError, match="rank 1 failed before it joined"):
        next(arriving(store, 2))


def test_rank_0_leaves_after_the_others_have_heard_of_the_failure(host: Host, store: Store) -> None:
    host.fails(store, 1)
    first = arriving(store, 0)
    wait(first)
    assert heard(arriving(store, 2)).peer == 1
    assert heard(first).peer == 1


def test_failure_of_an_earlier_run_is_ignored(host: Host, store: Store) -> None:
    host.fails(store, 1, at=STARTED - 1)
    host.name = "elsewhere"  # The times of two hosts cannot be compared.
    host.fails(store, 2)
    host.name = "here"
    wait(arriving(store, 0), 2 * SECOND)


def test_rank_that_has_met_the_others_ignores_failures_from_before_its_arrival(host: Host, store: Store) -> None:
    early.meets()
    host.fails(store, 1)
    steps = arriving(store, 0)
    wait(steps)
    host.fails(store, 1, "KeyError: 'again'")
    assert "KeyError" in heard(steps).message


def test_replacement_of_a_failed_rank_clears_its_failure(host: Host, store: Store) -> None:
    waiting = arriving(store, 0)
    wait(waiting, 1)
    host.fails(store, 1)
    replaced = arriving(store, 1)
    wait(replaced, 1)
    wait(waiting, 2 * SECOND)
    wait(arriving(store, 2), 2 * SECOND)


def test_ranks_meet_after_a_failed_rank_was_replaced(host: Host, store: Store) -> None:
    host.fails(store, 1, at=STARTED - 1)
    ranks, keys = {rank: arriving(store, rank) for rank in range(3)}, set[str]()
    while ranks:
        for rank, steps in list(ranks.items()):
            try:
                next(steps)
            except StopIteration as end:
                keys.add(end.value)
                del ranks[rank]
    assert len(keys) == 1


@pytest.mark.parametrize("forged", [b"no list", framed(1, b"no record"), framed(7, b"no rank")])
def test_malformed_failure_record_is_ignored(host: Host, store: Store, forged: bytes) -> None:
    store.set(KEY, forged)
    steps = arriving(store, 0)
    wait(steps)
    store.append(KEY, forged)
    wait(steps, 2 * SECOND)


def test_unsigned_failure_record_is_ignored(host: Host, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    host.fails(store, 1)
    monkeypatch.setenv("AIOCOMMS_TOKEN", "a token of these tests")
    steps = arriving(store, 0)
    wait(steps, 2 * SECOND)
    host.fails(store, 2)
    assert heard(steps).peer == 2


def test_long_failure_message_is_truncated(host: Host, store: Store) -> None:
    host.fails(store, 1, "x" * 10_000)
    with pytest.raises(CommAbortedError) as caught:
        Casualties(store, 2, 3).arrive()
    assert len(caught.value.message) < 2100


# --------------------------------------------------------------------------------------------------------- telling


@pytest.fixture
def told(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Return the list of errors that the excepthook of a rank tells the other ranks."""
    errors: list[Exception] = []
    monkeypatch.setattr(casualties, "tell", errors.append)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    early.watch()
    return errors


def end(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_exception_that_ends_a_rank_is_reported(told: list[Exception]) -> None:
    error = ValueError("no")
    end(error)
    assert told == [error]


def test_rank_that_has_met_the_others_reports_no_failure(told: list[Exception]) -> None:
    early.meets()
    end(ValueError("no"))
    assert not told


def test_forked_child_and_keyboard_interrupt_report_no_failure(
    told: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    end(KeyboardInterrupt())
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    end(ValueError("no"))
    assert not told


def test_package_looks_for_the_marks_of_every_launcher() -> None:
    assert set(aiocomms._MARKS) == set(early.MARKS.values())


@pytest.fixture
def reached(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Launch, str]]:
    """Return the list of failure notices that ranks leave, each with the rank's launch."""
    found: list[tuple[Launch, str]] = []
    monkeypatch.setattr(casualties.threading, "Thread", Called)
    monkeypatch.setattr(casualties, "_reach", lambda launch, what: found.append((launch, what)))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    return found


class Called:
    """A thread whose target runs within ``start``."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...], daemon: bool) -> None:
        self.start = lambda: target(*args)

    def join(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "text"),
    [(KeyError("batch"), "KeyError: 'batch'"), (ValueError("\udcff"), "ValueError: \\udcff")],
    ids=["plain", "no UTF-8"],
)
def test_tell_sends_the_rank_and_its_exception(reached: list[tuple[Launch, str]], error: Exception, text: str) -> None:
    casualties.tell(error)
    ((launch, what),) = reached
    assert (launch.rank, what) == (1, text)


def test_failure_of_another_rank_is_not_reported_again(reached: list[tuple[Launch, str]]) -> None:
    casualties.tell(PeerDiedError("rank 0 is gone", rank=1, peer=0))
    assert not reached


def test_child_process_of_a_rank_reports_no_failure(
    reached: list[tuple[Launch, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casualties, "_helps", lambda launch: launch.launcher == "torchrun")
    casualties.tell(KeyError("batch"))
    assert not reached


@pytest.mark.parametrize(
    ("rank", "agent_store", "torchs", "protocol"),
    [
        (1, False, False, "ours"),
        (1, True, False, "torch's"),
        (1, False, True, "torch's"),
        (0, True, False, "torch's"),
        (0, False, False, None),  # Rank 0 would have served the store.
    ],
)
def test_failure_is_written_to_the_store_that_the_other_ranks_read(
    host: Host, store: Store, monkeypatch: pytest.MonkeyPatch,
    rank: int, agent_store: bool, torchs: bool, protocol: str | None,
) -> None:  # fmt: skip
    asked: list[bool] = []

    def connect(*_: object, agent_store: bool, timeout: float) -> Store:
        asked.append(agent_store)
        return store

    monkeypatch.setattr(casualties, "connect_store", connect)
    monkeypatch.setitem(sys.modules, "aiocomms.integrations.torch_backend", sys) if torchs else monkeypatch.delitem(
        sys.modules, "aiocomms.integrations.torch_backend", raising=False
    )
    host.now = STARTED + 1
    casualties._reach(Launch("torchrun", rank, 2, "localhost", 1, agent_store), "ValueError: no")
    assert asked == ([] if protocol is None else [protocol == "torch's"])
    if protocol is not None:
        error = heard(arriving(store, 1 - rank, 2))
        assert error.message == f"rank {rank} failed before it joined: ValueError: no"
