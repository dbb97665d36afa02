"""The waits of threads that a simulation takes over: held locks, replies and sleeps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from concurrency import in_threads
from processes import HANGS

from aiocomms.lowlevel import clock
from aiocomms.lowlevel.clock import Reply

pytestmark = pytest.mark.deterministic


class Noted:
    """An event of a simulation, whose wait ends at once and records its timeout."""

    def __init__(self, waits: list[float | None]) -> None:
        self._waits, self._set = waits, False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        self._waits.append(timeout)
        return self._set


class World:
    """A simulation whose time stands still."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: (name, 0.0)

    def event(self) -> Noted:
        return Noted(self.waits)


@pytest.fixture
def waits():
    world = World()
    with clock.simulated_by(world):
        yield world.waits


def test_held_lock_wakes_the_thread_that_waits():
    lock, begun = clock.held_lock(), threading.Event()

    def wait():
        begun.set()
        return lock.acquire(timeout=HANGS)

    def release():
        begun.wait(HANGS)
        lock.release()
        return True

    assert in_threads(wait, release) == [True, True]


def test_held_lock_that_nobody_releases_returns_false():
    assert not clock.held_lock().acquire(timeout=0.0)


def test_reply_is_the_first_value():
    reply = Reply[str]()
    reply.put("first")
    reply.put("second")
    assert [reply.get(0.0), reply.get(-1.0)] == ["first"] * 2


def test_reply_wakes_the_thread_that_waits():
    reply = Reply[str]()
    assert in_threads(lambda: reply.get(HANGS), lambda: reply.put("it")) == ["it", None]


def test_reply_that_does_not_come_raises_timeout_error():
    with pytest.raises(TimeoutError, match="no reply after 0 s"):
        Reply[str]().get(0.0)


def test_waits_of_a_simulation_take_no_time(waits):
    lock, reply = clock.held_lock(), Reply[str]()
    assert not lock.acquire(timeout=3600.0)
    lock.release()
    assert lock.acquire(timeout=1800.0)
    with pytest.raises(TimeoutError):
        reply.get(900.0)
    clock.sleep(450.0)
    assert waits == [3600.0, 1800.0, 900.0, 450.0]


def test_events_are_the_systems_again_after_a_simulation():
    with clock.simulated_by(World()):
        assert isinstance(clock.event(), Noted)
    assert isinstance(clock.event(), threading.Event)
