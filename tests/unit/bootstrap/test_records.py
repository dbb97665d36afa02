"""The store calls of a rendezvous with any number of ranks, and the records that other processes may write."""

from __future__ import annotations

import heapq
import itertools
import random
import threading

import pytest
import torch
from concurrency import in_threads
from processes import PATIENCE
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from aiocomms.bootstrap.generations import Arrival
from aiocomms.bootstrap.records import framed, listed, pauses, write
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.errors import AuthError, ProtocolError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import Seal
from aiocomms.lowlevel.stores import reach_store, serve_store
from benchmarks import scale

pytestmark = pytest.mark.deterministic

TOKEN = b"a token of these tests"


def place(store, rank, size, token=TOKEN):
    where = {"name": "world", "device": torch.device("cpu"), "timeout": 30.0, "seal": Seal(token, "world")}
    return StoreRendezvous(store, rank, size, **where)


def exchanging(store, rank, size, token=TOKEN):
    """Return the steps of a rank whose value is its number, after the first step, and the values that it gets."""
    got = {rank: b"%d" % rank}
    steps = place(store, rank, size, token).steps(store, "k", got)
    next(steps, None)
    return steps, got


# ------------------------------------------------------------------------------------------------------------ calls


@pytest.mark.parametrize("size", [2, 10, 300])
def test_store_calls_per_rank_are_constant_in_the_number_of_ranks(size):
    assert max(rank.calls for rank in scale.exchanging(size, size)) == 4
    assert max(rank.calls for rank in scale.arriving(size)) == 9


@pytest.mark.parametrize("size", [2, 300])
def test_poll_of_the_store_is_one_call(size):
    """Ranks that wait for an absent rank make one store call per poll, in a rendezvous and in an exchange."""
    store = scale.CountingStore()
    arrivals = [scale.Steps(store, Arrival(store, r, size, Seal(None, "w")).steps(3600)) for r in range(size - 1)]
    left = (place(store, rank, size) for rank in range(size - 1))
    exchanges = [scale.Steps(store, it.steps(store, "key", {it.rank: b""})) for it in left]
    for waits in (arrivals, exchanges):
        for _ in range(3):  # In the second step the ranks that came before rank 0 answer it.
            assert not any(rank.step() for rank in waits)
        before = [rank.calls for rank in waits]
        assert not any(rank.step() for rank in waits)
        assert [rank.calls for rank in waits] == [calls + 1 for calls in before]


def test_polls_of_all_ranks_together_are_bounded():
    def looks(size):
        waits = pauses(size)
        return size / [next(waits) for _ in range(30)][-1]

    assert looks(2) == 40
    assert looks(400) == looks(100_000) == 8000


def test_pauses_of_few_ranks_add_at_most_a_quarter():
    waits, waited = pauses(4), 0.0
    for pause in itertools.islice(waits, 20):
        assert pause <= 0.0005 + waited / 4
        waited += pause


@pytest.fixture
def stores(tmp_path):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own, port = serve_store("127.0.0.1", 20.0)
    return {
        "hash": HashStore(), "file": FileStore(str(tmp_path / "store"), -1), "tcp": server,
        "prefix": PrefixStore("mine", server), "job's, served here": own,
        "job's, served elsewhere": reach_store("127.0.0.1", port, 1, 20.0),
    }  # fmt: skip


KINDS = ["hash", "file", "tcp", "prefix", "job's, served here", "job's, served elsewhere"]


@pytest.mark.real
@pytest.mark.parametrize("kind", KINDS)
def test_exchange_works_over_any_store(stores, kind):
    store = stores[kind]
    values = [bytes(range(256)) * 256, b"", b"\0"]  # The first value has the largest size.

    def exchange(rank):
        got = {rank: values[rank]}
        for pause in place(store, rank, 3).steps(store, "k", got):
            threading.Event().wait(pause)
        return [got[peer] for peer in range(3)]

    assert in_threads(*(lambda r=r: exchange(r) for r in range(3))) == [values] * 3


@pytest.mark.real
@pytest.mark.parametrize("kind", KINDS[4:])
def test_multi_get_waits_for_all_keys(stores, kind):
    store, there = PrefixStore("mine", stores[kind]), threading.Event()

    def write():
        store.set("a", "1")
        there.set()
        store.append("b", b"\xff")
        store.append("b", b"\0")

    def read():
        there.wait(PATIENCE)
        return store.multi_get(["a", "b"])

    a, b = in_threads(write, read)[1]
    assert (a, b[:1]) == (b"1", b"\xff")
    assert store.get("b") == b"\xff\0"


# ------------------------------------------------------------------------------------------------ records of others


def test_counter_raised_without_a_record_adds_no_rank():
    store = HashStore()
    store.add("k/count", 7)
    steps, got = exchanging(store, 0, 2)
    assert got == {0: b"0"}
    _, theirs = exchanging(store, 1, 2)
    assert list(steps) == []
    assert got == theirs == {0: b"0", 1: b"1"}


@pytest.mark.parametrize("order", ["before", "behind"])
def test_forged_record_does_not_hide_the_signed_one(order):
    store, forged = HashStore(), framed(1, Seal(b"another token").sign("k", 1, b"forged"))
    if order == "before":
        store.append("k", forged)
    first, second = exchanging(store, 0, 3), exchanging(store, 1, 3)
    if order == "behind":
        store.append("k", forged)
    third = exchanging(store, 2, 3)
    for steps, got in (first, second, third):
        assert list(steps) == []
        assert got == {0: b"0", 1: b"1", 2: b"2"}


@pytest.mark.parametrize("data", [b"\0", framed(1, b"abc")[:-1], framed(0, b"") + b"x" * 8], ids=len)
def test_malformed_list_in_the_store_raises_protocol_error(data):
    with pytest.raises(ProtocolError, match="the list 'k' in the store makes no sense"):
        listed(data, 2, "k")


def test_records_of_ranks_beyond_the_size_are_ignored():
    assert listed(framed(2, b"a") + framed(1, b"b") + framed(1, b"c"), 2, "k") == {1: [b"b", b"c"]}


@pytest.mark.parametrize("data", ["", "-1", "x", "1" * 5000], ids=len)
def test_malformed_counter_in_the_store_raises_protocol_error(data):
    store = HashStore()
    steps, _ = exchanging(store, 0, 2)
    store.set("k/count", data)
    with pytest.raises(ProtocolError, match="the counter 'k/count' in the store makes no sense"):
        next(steps)


# -------------------------------------------------------------------------------------------------------- arrivals


def arriving(store, rank, size, token=TOKEN, seconds=3600.0):
    arrival = Arrival(store, rank, size, Seal(token, "world"))
    return arrival, arrival.steps(seconds)


def ended(steps):
    """Run the rank's steps to their end, which is near because all other ranks have come."""
    for _ in range(9):
        try:
            next(steps)
        except StopIteration as end:
            return end.value
    raise AssertionError("it goes on looking")


def test_every_rank_is_told_which_rank_has_another_token():
    """Only rank 0 reads the signed records of the others; each rank's error names a rank with another token."""
    store = HashStore()
    ranks = [arriving(store, r, 3, b"another token" if r == 1 else TOKEN)[1] for r in range(3)]
    for steps in ranks:
        next(steps)
    peers = []
    for steps in ranks:
        with pytest.raises(AuthError, match="is not signed") as caught:
            ended(steps)
        peers.append(caught.value.peer)
    assert peers == [1, 0, 1]


def test_ranks_that_answer_are_present_without_rank_0(monkeypatch):
    """The store has keys of dead processes; only the ranks that answer count as present."""
    now = [0.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    store = HashStore()
    gone = [arriving(store, r, 5)[1] for r in range(4)]
    for steps in gone + gone:
        next(steps)
    ranks = [arriving(store, r, 5, seconds=60.0) for r in (1, 3)]
    for now[0] in (0.0, 3.0, 3.1, 59.0, 59.1, 59.9):
        for _, steps in ranks:
            next(steps)
    assert [arrival.present for arrival, _ in ranks] == [{1, 3}, {1, 3}]


def test_unsigned_decision_of_rank_0_raises_protocol_error():
    store = HashStore()
    (leader, leads), (_, follows) = arriving(store, 0, 2), arriving(store, 1, 2)
    next(leads)
    next(follows)
    ended(leads)
    names = store.get(f"met/{leader._mine}")
    store.set(f"met/{leader._mine}", (b"0" * 16 + names[16:]).decode())
    with pytest.raises(ProtocolError, match="rank 0's list of the present ranks") as caught:
        ended(follows)
    assert caught.value.peer == 0


def test_restarted_rank_0_is_answered_again():
    store = HashStore()
    first, follows = arriving(store, 0, 2)[1], arriving(store, 1, 2)[1]
    next(first)
    next(follows)
    second = arriving(store, 0, 2)[1]
    next(second)
    next(follows)
    assert ended(second) == ended(follows) != ""


def test_ranks_of_a_meeting_notice_that_one_of_them_has_arrived_again():
    store = HashStore()
    met = [arriving(store, r, 3) for r in range(3)]
    for _, steps in met:
        next(steps)
    assert len({ended(steps) for _, steps in met}) == 1
    store.set("came/1", "the record of a stranger")
    assert not any(arrival.repeated() for arrival, _ in met)
    next(arriving(store, 2, 3)[1])
    assert [arrival.repeated() for arrival, _ in met] == [[2], [], []]
    next(arriving(store, 0, 3)[1])
    assert [arrival.repeated() for arrival, _ in met] == [[0, 2], [0], [0]]


def test_arrival_that_was_given_up_writes_nothing_after_the_next_one():
    store, turn, given_up = HashStore(), threading.Lock(), threading.Event()
    arrival = Arrival(store, 0, 2, Seal(TOKEN, "world"), turn)
    given_up.set()
    with turn:  # An earlier arrival has not ended.
        assert arrival.meet(given_up) == ""
    assert arrival.meet(given_up) == ""
    assert not store.check(["came/0"])


@pytest.mark.parametrize("said", ["x", "{digest} 1", "{digest} 1 x message", "{digest} 2 1 message"])
def test_malformed_decision_of_rank_0_raises_protocol_error(said):
    store = HashStore()
    (leader, leads), (_, follows) = arriving(store, 0, 2), arriving(store, 1, 2)
    next(leads)
    next(follows)
    digest = ended(leads)
    write(store, Seal(TOKEN, "world"), "came", 0, "came/0", f"{leader._mine} {said.format(digest=digest)}".encode())
    with pytest.raises(ProtocolError, match="rank 0's list of the present ranks") as caught:
        ended(follows)
    assert caught.value.peer == 0


@pytest.mark.parametrize(("size", "spread", "timeout"), [(16, 3, 10), (32, 5, 30), (64, 0.2, 10), (64, 10, 60)])
def test_ranks_that_came_are_never_named_missing_without_rank_0(monkeypatch, size, spread, timeout):
    """Ranks come over some seconds of the test's own time; each gives up at its deadline, and misses only rank 0."""
    now, order = [0.0], random.Random(size)
    monkeypatch.setattr(clock, "now", lambda: now[0])
    store, gave_up = HashStore(), []
    comes = {rank: order.uniform(0, spread) for rank in range(1, size)}
    ranks, turns = {}, [(at, rank) for rank, at in comes.items()]
    heapq.heapify(turns)
    while turns:
        now[0], rank = heapq.heappop(turns)
        if rank not in ranks:
            ranks[rank] = arriving(store, rank, size, seconds=timeout)
        arrival, steps = ranks[rank]
        ends = comes[rank] + timeout
        if now[0] >= ends:
            gave_up.append(arrival.present)
        else:
            heapq.heappush(turns, (min(now[0] + next(steps) + order.uniform(0, 0.001), ends), rank))
    assert gave_up == [set(range(1, size))] * (size - 1)


@pytest.mark.real
@pytest.mark.parametrize("request_of", [["multi_get"], ["multi_get", 7], ["multi_get", ["x"] * 1000], ["get"]])
def test_malformed_store_request_leaves_other_clients_connected(request_of):
    _, port = serve_store("127.0.0.1", 20.0)
    hostile, innocent = (reach_store("127.0.0.1", port, rank, 20.0) for rank in (1, 2))
    innocent.set("x", "1")
    with pytest.raises(RuntimeError):
        hostile._ask(*request_of)
    assert innocent.get("x") == b"1"
