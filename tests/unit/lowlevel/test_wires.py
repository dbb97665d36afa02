"""The sockets between endpoints that one thread closes while another one waits for them."""

from __future__ import annotations

import socket
import threading

import pytest
from processes import HANGS

from aiocomms.lowlevel.sockets import read_exactly
from aiocomms.lowlevel.wires import ClosableSocket

pytestmark = pytest.mark.deterministic


def test_descriptor_keeps_its_number_until_no_thread_waits_for_it():
    """The kernel gives the number of a closed one to the next socket, for which the thread would wait then."""
    near, far = socket.socketpair()
    connection, errors, began, may_end = ClosableSocket(near), list[OSError](), threading.Event(), threading.Event()

    def wait() -> None:
        with connection.used() as used:
            began.set()
            try:
                read_exactly(used, 1)
            except OSError as error:
                errors.append(error)
            may_end.wait(HANGS)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    began.wait(HANGS)
    connection.close()
    connection.close()
    assert near.fileno() >= 0
    with pytest.raises(OSError, match="has closed it"), connection.used():
        pass
    may_end.set()
    thread.join(HANGS)
    assert near.fileno() < 0
    assert "it has closed the connection" in str(errors)
    far.close()


def test_unused_socket_is_closed_at_once():
    near, far = socket.socketpair()
    ClosableSocket(near).close()
    assert near.fileno() < 0
    far.close()
