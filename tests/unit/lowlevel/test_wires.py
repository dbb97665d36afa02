"""Endpoints over the wires of a simulation: queues in memory, and no socket."""

from queue import Queue
from types import SimpleNamespace

import anyio
import pytest
from concurrency import together
from processes import HANGS

import aiocomms
from aiocomms.errors import PeerDiedError
from aiocomms.lowlevel import clock

pytestmark = pytest.mark.deterministic


class MemoryLine:
    """One end of two queues. None in a queue: the line is closed."""

    def __init__(self, heard, told):
        self.host, self.heard, self.told = "memory", heard, told
        self.tell, self.extend = told.put, lambda seconds: None

    def hear(self):
        if (what := self.heard.get(timeout=HANGS)) is None:
            self.close()
            raise PeerDiedError("the line is closed")
        return what

    def close(self):
        self.heard.put(None)
        self.told.put(None)


class MemoryWorld(dict):
    """A simulation whose time is the real one, and its wires: what listens, by port."""

    now, wall, event = clock.now, clock.wall, clock.event

    async def run(self, call):
        return await anyio.to_thread.run_sync(call)

    def wires(self):
        return self

    def find(self, host):
        return lambda driver: self.listen(driver.call_threadsafe, SimpleNamespace(host=host, port=len(self)))

    def listen(self, soon, place):
        place.open = lambda key, let_in: self.update({place.port: {key: lambda line: soon(let_in, line)}})
        place.close = lambda: self.pop(place.port)
        return place

    def call(self, host, port, key, seconds, name):
        line = MemoryLine(Queue(), Queue())

        def run():
            if port not in self:
                raise PeerDiedError(f"the endpoint {name} does not listen")
            self[port][key](MemoryLine(line.told, line.heard))
            return line

        return SimpleNamespace(run=run, hang_up=line.close)


def test_endpoints_connect_over_the_wires_of_a_simulation(run):
    """Two calls cross, and form one connection; once the other one is closed, a third one finds nobody."""

    async def main():
        async with aiocomms.open_endpoint("local", host="memory") as one:
            async with aiocomms.open_endpoint("local", host="memory") as two:
                peers = await together(lambda: one.connect(two.address), lambda: two.connect(one.address))
                assert [one.peers, two.peers] == [[peer] for peer in peers]
                assert await together(lambda: peers[0].send_object("it"), peers[1].recv_object) == [None, "it"]
            with pytest.raises(PeerDiedError, match="does not listen"):
                await one.connect(two.address)

    with clock.simulated_by(MemoryWorld()):
        run(main)
