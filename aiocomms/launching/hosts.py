"""The supervisors of several hosts: the first decides for all, and the others do for it what it says.

They meet in a store of torch's, which the first one serves at the rendezvous. In it each host has a queue of messages,
which are signed with the job's token. A host that waits for the next message asks the store once, and is answered when
there is one.
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
"""Seconds for which a host waits for the first one."""
_LEAVES: Final = 10.0
"""Seconds for which the first host waits until the others have heard that the job is over."""
_LONG: Final = timedelta(days=365)
_MAC: Final = 32


class HostQueue:
    """The queues of all hosts, as one of them sees them. All of it blocks.

    :param at: the rendezvous.
    :param host: the number of this host.
    :param size: the number of hosts.
    :raises StoreLostError: the first host does not come.
    :raises ArgumentError: another supervisor is this host.
    """

    def __init__(self, at: At, host: int, size: int) -> None:
        self._host, self._next = host, 1
        self._key = mac(job_token() or b"", "aiocomms", "run")
        # A connection that waits for a message can do nothing else.
        self._out, self._in = (self._connected(at, size) for _ in range(2))
        with store_errors():
            if self._out.add(f"aiocomms run/host {host}", 1) > 1:
                raise ArgumentError(f"node_rank is {host}, and another supervisor has come to {at} as that")

    def _connected(self, at: At, size: int) -> Store:
        return connect_store(at.host, at.port, self._host, size, agent_store=True, timeout=_COMES)

    @store_errors("the first host's supervisor is gone")
    def send(self, host: int, message: object) -> None:
        """Send a message to a host.

        :raises StoreLostError: the first host is gone.
        """
        key = f"{host}/{self._out.add(f'aiocomms run/{host}', 1)}"
        data = json.dumps(message).encode()
        self._out.set(f"aiocomms run/{key}", (mac(self._key, key, data) + data).hex())

    @store_errors("the first host's supervisor is gone")
    def receive(self) -> list[Any]:
        """Wait for the next message to this host.

        :raises StoreLostError: the first host is gone.
        :raises AuthError: the message's sender has another token.
        """
        key = f"{self._host}/{self._next}"
        self._next += 1
        self._in.wait([f"aiocomms run/{key}"], _LONG)
        record = bytes.fromhex(self._in.get(f"aiocomms run/{key}").decode())
        self._in.delete_key(f"aiocomms run/{key}")
        if not same(record[:_MAC], mac(self._key, key, record[_MAC:])):
            raise AuthError("a supervisor of another host has not the same token")
        message: list[Any] = json.loads(record[_MAC:])
        return message


class OtherHosts:
    """The other hosts, for the first one.

    :param size: the number of hosts.
    :param tell: is called with each event of theirs.
    """

    def __init__(self, queue: HostQueue, size: int, tell: Any) -> None:
        self._queue, self._tell = queue, tell
        self._left = set(range(1, size))
        self._all_left = anyio.Event()

    async def do(self, host: int, deed: Start | Tell, variables: Mapping[str, str]) -> None:
        """Have a host start a process, or send a signal to one."""
        if isinstance(deed, Start):
            message = ["start", deed.rank, deed.incarnation, deed.generation, deed.restarts, dict(variables)]
            await self._send(host, message)
        else:
            await self._send(host, ["signal", deed.rank, deed.signal, deed.replaced])

    async def _send(self, host: int, message: object) -> None:
        await run_in_thread(lambda: self._queue.send(host, message))

    async def hear(self) -> None:
        """Hear from the others until :meth:`end` has been called."""
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
        """Tell the others that the job is over, and wait until they have heard of it."""
        for host in sorted(self._left):
            await self._send(host, ["over", code])
        with anyio.move_on_after(_LEAVES):
            await self._all_left.wait()
        await self._send(0, ["end"])
