"""The messages between the supervisors of several hosts, over a store that the first one serves."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from aiocomms.errors import ArgumentError, StoreLostError
from aiocomms.launching import hosts
from aiocomms.launching.hosts import HostQueue
from aiocomms.launching.job import At

pytestmark = pytest.mark.deterministic

AT = At("127.0.0.1", 1)


@pytest.fixture(autouse=True)
def store(monkeypatch) -> HashStore:
    store = HashStore()
    monkeypatch.setattr(hosts, "connect_store", lambda *_, **__: store)
    monkeypatch.setattr(hosts, "_serve", lambda _: store)
    return store


def test_each_host_gets_its_messages_in_order_and_none_stays(store):
    first, second = HostQueue(AT, 0, 2), HostQueue(AT, 1, 2)
    before = store.num_keys()
    first.send(1, ["signal", 3, 15, ""])
    second.send(0, ["ended", 3, 0, -15])
    first.send(1, ["over", 143])
    assert second.receive() == ["signal", 3, 15, ""]
    assert second.receive() == ["over", 143]
    assert first.receive() == ["ended", 3, 0, -15]
    assert store.num_keys() == before + 2  # The numbers of the last messages stay.


def test_second_supervisor_of_a_host_is_refused():
    HostQueue(AT, 1, 2)
    with pytest.raises(ArgumentError, match=r"node_rank is 1, and another supervisor has joined at 127.0.0.1:1"):
        HostQueue(AT, 1, 2)


def test_closed_queue_waits_for_no_message():
    queue = HostQueue(AT, 1, 2)
    queue.close()
    with pytest.raises(StoreLostError, match="this supervisor has ended"):
        queue.receive()


def test_first_host_tells_absent_hosts_from_hosts_that_fail(monkeypatch):
    now = 0.0
    monkeypatch.setattr(hosts.clock, "now", lambda: now)
    first, second, third = HostQueue(AT, 0, 4), HostQueue(AT, 1, 4), HostQueue(AT, 2, 4)
    assert first.absent() == [3]
    assert first.silent() == []
    third.beat()
    now = 15.0
    second.beat()
    assert first.silent() == []
    now = 30.0
    second.beat()
    assert first.silent() == []
    now = 45.0
    assert first.silent() == [2]
    third.beat()
    assert first.silent() == []
