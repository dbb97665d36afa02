"""The thread that hears what other ranks say while the loop is busy."""

from __future__ import annotations

import gc
import os
import threading

import pytest
from aiocomms_ucx.listener import NAME, Listener
from processes import PATIENCE, all_let_go, held, no_threads

pytestmark = pytest.mark.deterministic


class Hearing:
    """The callback of a listener; one word is one semaphore's release."""

    def __init__(self, fd):
        self.heard = threading.Semaphore(0)
        self.threads = []
        self.listener = Listener(fd, self.hear)

    def hear(self):
        self.threads.append(threading.current_thread().name)
        self.heard.release()
        if len(self.threads) == 1:
            raise RuntimeError("of this test")


@pytest.fixture
def fd():
    found = os.eventfd(0)
    yield found
    os.close(found)


def test_listener_calls_back_repeatedly_also_after_an_error(fd, caplog):
    before = held()
    hearing = Hearing(fd)
    for _ in range(3):
        os.eventfd_write(fd, 1)
        assert hearing.heard.acquire(timeout=PATIENCE)
    assert hearing.threads == [NAME] * 3
    hearing.listener.join()
    hearing.listener.join()
    all_let_go(before)
    assert [str(record.exc_info[1]) for record in caplog.records] == ["of this test"]


def test_listener_thread_ends_with_its_object(fd):
    before = held()
    hearing = Hearing(fd)
    thread = hearing.listener._thread
    del hearing
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    all_let_go(before)


def test_listener_without_a_thread_raises_and_leaks_nothing(fd):
    before = held()
    with no_threads(), pytest.raises(RuntimeError):
        Hearing(fd)
    gc.collect()
    all_let_go(before)


def test_listener_end_writes_to_no_reused_descriptor(fd, monkeypatch):
    """The thread is at the end of its loop while another one ends it, and is preempted before it writes."""
    hearing = Hearing(fd)
    written, write = [], os.eventfd_write

    def preempted(to, value):
        write(fd, 1)  # the thread hears something, and looks whether it is to go on
        assert hearing.heard.acquire(timeout=PATIENCE)
        written.append(os.fstat(to))
        write(to, value)

    monkeypatch.setattr(os, "eventfd_write", preempted)
    hearing.listener.end()
    monkeypatch.undo()
    hearing.listener.join()
    assert len(written) == 1
