"""aiocomms for synchronous programs, in blocking form. An asyncio loop runs in a separate thread.

>>> with aiocomms.blocking.new_comm("auto") as comm:
...     t = comm.all_reduce(t).wait()

If a method of ``aiocomms`` returns a :class:`~aiocomms.Work`, the method here returns a :class:`BlockingWork`. If a
method of ``aiocomms`` is a coroutine function, the method here blocks.
"""

from __future__ import annotations

from aiocomms.blocking.communicator import Communicator, from_process_group, new_comm
from aiocomms.blocking.endpoint import Endpoint, open_endpoint
from aiocomms.blocking.peer import BlockingPeer, BlockingRegion, BlockingRemoteRegion
from aiocomms.communicator.portal.operations import BlockingLane
from aiocomms.communicator.portal.views import BlockingBatch, BlockingStream, BlockingWindow
from aiocomms.communicator.portal.works import BlockingWork

__all__ = [
    "BlockingBatch",
    "BlockingLane",
    "BlockingPeer",
    "BlockingRegion",
    "BlockingRemoteRegion",
    "BlockingStream",
    "BlockingWindow",
    "BlockingWork",
    "Communicator",
    "Endpoint",
    "from_process_group",
    "new_comm",
    "open_endpoint",
]
