"""The supervisors of several hosts: the first one decides for all, and the others carry out its orders.

They meet in a torch store, which the first one serves at the rendezvous. In the store each host has a queue of messages
signed with the job's token. A host waits for its next message with one request, which the store answers when the
message is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import anyio

from aiocomms.bootstrap.stores import connect_store
from aiocomms.errors import ArgumentError, AuthError
from aiocomms.launching.job import At
from aiocomms.launching.supervision import Start, Tell
from aiocomms.lowlevel import run_in_thread
from aiocomms.lowlevel.auth import job_token, mac, same
from aiocomms.lowlevel.stores import store_errors

if TYPE_CHECKING:
    from torch.distributed import Store

_COMES: Final = 600.0
"""Seconds for which a host waits for the first host."""
_LEAVES: Final = 10.0
"""Seconds for which the first host waits until the others know that the job is over."""
_LONG: Final = timedelta(days=365)
_MAC: Final = 32


class HostQueue:
    """The message queues of all hosts, from the view of one host. All calls block.

    :param at: the rendezvous.
    :param host: the number of this host.
    :param size: the number of hosts.
    :raises StoreLostError: the first host does not start in time.
    :raises ArgumentError: another supervisor has the same host number.
    """

    def __init__(self, at: At, host: int, size: int) -> None:
        self._host, self._next = host, 1
        self._key = mac(job_token() or b"", "aiocomms", "run")
        # A connection that waits for a message is blocked, so there are two.
        self._out, self._in = (self._connected(at, size) for _ in range(2))
        with store_errors():
            if self._out.add(f"aiocomms run/host {host}", 1) > 1:
                raise ArgumentError(f"node_rank is {host}, and another supervisor has joined at {at} with that number")

    def _connected(self, at: At, size: int) -> Store:
        return connect_store(at.host, at.port, self._host, size, agent_store=True, timeout=_COMES)

    @store_errors("the first host's supervisor has ended or was cut off")
    def send(self, host: int, message: object) -> None:
        """Send a message to a host.

        :raises StoreLostError: the first host has ended.
        """
        key = f"{host}/{self._out.add(f'aiocomms run/{host}', 1)}"
        data = json.dumps(message).encode()
        self._out.set(f"aiocomms run/{key}", (mac(self._key, key, data) + data).hex())

    @store_errors("the first host's supervisor has ended or was cut off")
    def receive(self) -> list[Any]:
        """Wait for the next message to this host.

        :raises StoreLostError: the first host has ended.
        :raises AuthError: the message's sender has another token.
        """
        key = f"{self._host}/{self._next}"
        self._next += 1
        self._in.wait([f"aiocomms run/{key}"], _LONG)
        record = bytes.fromhex(self._in.get(f"aiocomms run/{key}").decode())
        self._in.delete_key(f"aiocomms run/{key}")
        if not same(record[:_MAC], mac(self._key, key, record[_MAC:])):
            raise AuthError("a supervisor of another host has another token than this one: give both the same")
        message: list[Any] = json.loads(record[_MAC:])
        return message


class OtherHosts:
    """The other hosts, from the view of the first host.

    :param size: the number of hosts.
    :param tell: the function to call with each event of another host.
    """

    def __init__(self, queue: HostQueue, size: int, tell: Any) -> None:
        self._queue, self._tell = queue, tell
        self._left = set(range(1, size))
        self._all_left = anyio.Event()

    async def do(self, host: int, deed: Start | Tell, variables: Mapping[str, str]) -> None:
        """Tell a host to start a process or to send a signal to one."""
        if isinstance(deed, Start):
            message = ["start", deed.rank, deed.incarnation, deed.generation, deed.restarts, dict(variables)]
            await self._send(host, message)
        else:
            await self._send(host, ["signal", deed.rank, deed.signal, deed.replaced])

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

    async def end(self, code: int) -> None:
        """Tell the other hosts that the job is over, and wait until they have confirmed."""
        for host in sorted(self._left):
            await self._send(host, ["over", code])
        with anyio.move_on_after(_LEAVES):
            await self._all_left.wait()
        await self._send(0, ["end"])
