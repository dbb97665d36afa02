"""The text generator with ``torch.distributed`` and gloo in the place of aiocomms; all else is shared.

    python -m benchmarks.serve.generator_twin --port 8000 --tp 2 --pp 1 --decoders 2

See ``generator_links``, which stands for ``text_generator.links``. A job cannot be mended: when a rank dies, all ranks
are started anew, as torchrun does it. The front lives on.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from benchmarks.serve import generator_links

sys.modules["text_generator.links"] = generator_links  # before anything of the generator is imported

from text_generator import preload, supervisor  # noqa: E402, F401 - the fork server imports these
from text_generator.supervisor import Supervisor  # noqa: E402


class OneJob(Supervisor):
    """Starts the front, and all ranks as one job."""

    async def _listen(self, news: Connection, groups: TaskGroup) -> None:
        await anyio.wait_readable(news)
        groups.start_soon(self._keep_all, news.recv())
        while True:
            await anyio.wait_readable(news)
            news.recv()  # this process knows already which group is lost

    async def _keep_all(self, address: bytes) -> None:
        """Start all ranks, and again when one has died."""
        size = self._options.tp * self._options.pp
        names = ["prefill", *(f"decode-{i}" for i in range(self._decoders))]
        self._environment["WORLD_SIZE"] = str(size * len(names))
        turn = 0
        while not self._stopping:
            turn += 1
            self._environment["TORCHELASTIC_RESTART_COUNT"] = str(turn)
            processes = [
                process
                for index, name in enumerate(names)
                for process in self._start(f"{name}.{turn}", run_rank, range(index * size, (index + 1) * size), address)
            ]
            if await self._outlive(processes):
                self._groups.clear()
                self._note_death("the job", processes)


def run_rank(*arguments: object) -> None:
    """Be a rank; in a process of its own."""
    code = 1
    try:
        supervisor.run_rank(*arguments)  # type: ignore[arg-type]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # a thread may be blocked in gloo for ever


if __name__ == "__main__":
    from benchmarks.serve import generator_twin

    supervisor.Supervisor = generator_twin.OneJob  # type: ignore[misc]
    supervisor.PRELOAD = generator_twin.__name__
    supervisor.main()
