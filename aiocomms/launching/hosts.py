"""The supervisors of several hosts. The first host's supervisor gives orders, and the others execute these orders.

The supervisors exchange messages through a store. The first host serves this store at the rendezvous address, and only
processes with the job's token can use the store. In the store, each host has a queue of messages. Every host polls its
queue, so each host notices within 30 s that the first host does not answer. Every other host regularly increments a
number in the store. If the number no longer changes, the first host knows that this host has failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import anyio
from torch.distributed import Store

from aiocomms.bootstrap.stores import connect_store
from aiocomms.errors import ArgumentError, StoreLostError
from aiocomms.launching.job import At, listen
from aiocomms.launching.supervision import Start, Tell
from aiocomms.lowlevel import clock, run_in_thread
from aiocomms.lowlevel.jobstore import JobStore
from aiocomms.lowlevel.stores import new_server, store_errors

_COMES: Final = 600.0
"""The time limit, in seconds, for the first host's start. The other hosts wait for this start."""
_LEAVES: Final = 10.0
"""The longest time, in seconds, that the first host waits for the other hosts to confirm the end of the job."""
_ANSWERS: Final = timedelta(seconds=30)
"""The time limit for an answer of the first host, or for a beat of another host.

After the limit, the host counts as failed.
"""
BEAT: Final = 5.0
"""The seconds between two beats of a host. With a beat, a host other than the first shows that it has not failed."""
_PAUSE: Final = 0.05
"""The seconds between two polls for a message."""


class HostQueue:
    """One host's access to the message queues of all hosts. All calls block.

    :param at: the address of the rendezvous.
    :param host: the number of this host.
    :param size: the number of hosts.
    :raises StoreLostError: the first host does not start in time.
    :raises AuthError: the first host has another token.
    :raises ArgumentError: another supervisor has the same host number, or the address cannot be bound.
    """

    def __init__(self, at: At, host: int, size: int) -> None:
        self._host, self._size, self._next, self._closed = host, size, 1, False
        self._beats: dict[int, tuple[bytes, float]] = {}
        """The number of each host's beats, and the time at which this host has first read that number."""
        if host == 0:
            self._store: Store = _serve(at)
        else:
            self._store = connect_store(at.host, at.port, host, size, agent_store=False, timeout=_COMES)
        self._store.set_timeout(_ANSWERS)
        with store_errors():
            if self._store.add(f"host {host}", 1) > 1:
                raise ArgumentError(f"node_rank is {host}, and another supervisor has joined at {at} with that number")

    @store_errors("the first host's supervisor has ended or was cut off")
    def send(self, host: int, message: object) -> None:
        """Send a message to a host.

        :raises StoreLostError: the first host has ended.
        """
        self._store.set(f"{host}/{self._store.add(f'messages to {host}', 1)}", json.dumps(message))

    @store_errors("the first host's supervisor has ended or was cut off")
    def receive(self) -> list[Any]:
        """Wait for the next message to this host.

        :raises StoreLostError: the first host has ended, or does not answer.
        """
        key = f"{self._host}/{self._next}"
        self._next += 1
        while not self._store.check([key]):
            if self._closed:
                raise StoreLostError("this supervisor has ended")
            clock.sleep(_PAUSE)
        message: list[Any] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message

    @store_errors("the first host's supervisor has ended or was cut off")
    def beat(self) -> None:
        """Show the first host that this host has not failed.

        :raises StoreLostError: the first host has ended.
        """
        self._store.add(f"host {self._host}", 1)

    def absent(self) -> list[int]:
        """Return the hosts that have not joined yet."""
        return [host for host in range(1, self._size) if not self._store.check([f"host {host}"])]

    def silent(self) -> list[int]:
        """Return the hosts that have joined, and whose beats have stopped."""
        now, absent = clock.now(), self.absent()
        for host in range(1, self._size):
            beats = b"" if host in absent else self._store.get(f"host {host}")
            if beats != self._beats.get(host, (b"", now))[0]:
                self._beats[host] = beats, now
        return [host for host, (_, since) in self._beats.items() if now - since >= _ANSWERS.total_seconds()]

    def close(self) -> None:
        """End a pending :meth:`receive`. Otherwise the thread that runs ``receive`` would keep the store alive."""
        self._closed = True


def _serve(at: At) -> JobStore:
    try:
        listener = listen("rendezvous", at)
    except ArgumentError as error:
        raise ArgumentError(f"{error.message}; is there another supervisor of node_rank 0?") from None
    return JobStore(at.host, at.port, new_server(listener), _COMES)


class OtherHosts:
    """The connection through which the first host's supervisor gives orders to the other hosts and gets their events.

    :param size: the number of hosts.
    :param tell: the function to call with each event of another host.
    """

    def __init__(self, queue: HostQueue, size: int, tell: Any) -> None:
        self._queue, self._tell = queue, tell
        self._left = set(range(1, size))
        self._all_left = anyio.Event()

    async def do(self, host: int, deed: Start | Tell, variables: Mapping[str, str], announcement: str) -> None:
        """Tell a host to start a process, or to send a signal to a process."""
        if isinstance(deed, Start):
            message = ["start", deed.rank, deed.incarnation, deed.generation, deed.restarts, dict(variables)]
            await self._send(host, message)
        else:
            await self._send(host, ["signal", deed.rank, deed.signal, announcement])

    async def _send(self, host: int, message: object) -> None:
        await run_in_thread(lambda: self._queue.send(host, message))

    async def hear(self) -> None:
        """Receive messages from the other hosts until :meth:`end` is called."""
        while True:
            match await run_in_thread(self._queue.receive):
                case ["end"]:
                    return
                case ["left", host]:
                    self._left.discard(host)
                    if not self._left:
                        self._all_left.set()
                case event:
                    self._tell(tuple(event))

    async def watch(self) -> None:
        """Report each host that has failed, or that has not joined in time. This call does not end."""
        began: float | None = anyio.current_time()
        while True:
            await anyio.sleep(BEAT)
            for host in await run_in_thread(self._queue.silent):
                self._tell(("failed", host))
            if began is not None and anyio.current_time() >= began + _ANSWERS.total_seconds():
                began = None
                for host in await self.absent():
                    self._tell(("absent", host))

    async def absent(self) -> list[int]:
        """Return the hosts that have not joined yet."""
        return await run_in_thread(self._queue.absent)

    async def end(self, code: int) -> None:
        """Tell the other hosts that the job is over, and wait for the confirmations of the hosts that answer."""
        for host in sorted(self._left):
            await self._send(host, ["over", code])
        self._left -= {*await self.absent(), *await run_in_thread(self._queue.silent)}
        with anyio.move_on_after(_LEAVES):
            if self._left:
                await self._all_left.wait()
        await self._send(0, ["end"])
