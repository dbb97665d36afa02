"""The gate of a rank whose task gives up the connecting: its thread ends, and no connection stays open."""

from __future__ import annotations

import socket
import threading

import pytest
from processes import HANGS

from aiocomms.errors import CommAbortedError
from aiocomms.lowlevel import Gate

pytestmark = pytest.mark.deterministic

LONG = 86400.0


def kept() -> tuple[Gate, socket.socket, socket.socket]:
    """Return the gate of rank 0 of 3, its connection with rank 1, and the other end."""
    gate = Gate(0, b"key", {}, 3)
    near, far = socket.socketpair()
    gate._keep(1, near)
    return gate, near, far


def test_gate_that_waits_for_a_rank_ends_when_it_is_given_up():
    gate, near, far = kept()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            gate.run([], LONG)
        except CommAbortedError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    gate.give_up()
    thread.join(HANGS)
    assert len(errors) == 1
    assert near.fileno() < 0
    assert far.recv(1) == b""
    far.close()


def test_gate_that_was_given_up_connects_to_no_rank():
    gate, near, far = kept()
    gate.give_up()
    with pytest.raises(CommAbortedError):
        gate.run([], LONG)
    assert near.fileno() < 0
    far.close()


def test_connections_that_nobody_takes_are_closed():
    gate, near, far = kept()
    gate._missing.clear()
    assert gate.run([], LONG) == {1: near}
    assert near.fileno() >= 0
    gate.give_up()
    assert near.fileno() < 0
    far.close()
