"""What `make serve` runs: the ranks of the server, and a new process whenever one of them has died.

The supervisor holds what must outlive every rank: the store in which the ranks find each other, and the socket on which
rank 0 serves. It has no part in the work.

The ranks are forks of one process that has imported everything and done nothing else (the fork server of
multiprocessing). So a new rank is there in a moment, without the seconds that importing torch and transformers takes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import signal
from collections import deque
from contextlib import suppress
from multiprocessing import forkserver
from typing import TYPE_CHECKING

import anyio

from .__main__ import add_shape, end_at_once_on_signals, listen, make_parser, positive

if TYPE_CHECKING:
    import socket
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

DEATHS, WINDOW = 8, 60.0  # more deaths than that within as many seconds, and it is no use to go on
LEAVE = 10.0  # seconds after Ctrl-C when a rank that is still there is killed
SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNKNOWN = 255  # the exit code of a rank whose fork server is gone, and which may live

context = multiprocessing.get_context("forkserver")


class Supervisor:
    """Starts the ranks, and whoever takes the place of one that died.

    :param size: how many ranks
    :param shape: how the model is laid out over them, see `rank.Shape`
    :param listener: the socket on which rank 0 serves
    :param store: the port of the store
    """

    def __init__(self, size: int, shape: dict[str, int], listener: socket.socket, store: int) -> None:
        self._size = size
        self._shape = shape
        self._listener = listener
        self._environment = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not serve it
        }
        self._processes: dict[int, ForkServerProcess] = {}
        self._new: set[int] = set()  # ranks that have not taken part in the serving yet
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._failure: str | None = None
        self._stopping = False
        self._scope: anyio.CancelScope  # of `_run_ranks`

    async def run(self) -> None:
        """Keep the server running until Ctrl-C or SIGTERM.

        :raises SystemExit: if ranks die all the time, or do not end as they should
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_on_signals)
            while not self._stopping:
                await self._run_ranks()
            tasks.cancel_scope.cancel()
        bad = {rank: process.exitcode for rank, process in self._processes.items() if process.exitcode}
        if bad and self._failure is None:
            self._failure = f"not all ranks ended in good order; exit codes by rank: {bad}"
        if self._failure is not None:
            raise SystemExit(self._failure)

    async def _run_ranks(self) -> None:
        """Run all ranks, until they end, or none is left whom a new one could join: then all must start anew."""
        self._new = set(range(self._size))
        news, tell = context.Pipe(duplex=False)
        with news, tell, anyio.CancelScope() as self._scope:
            try:
                async with anyio.create_task_group() as listening:
                    listening.start_soon(self._listen, news)
                    async with anyio.create_task_group() as ranks:
                        for rank in range(self._size):
                            ranks.start_soon(self._keep, rank, tell)
                    listening.cancel_scope.cancel()
            finally:
                for process in self._processes.values():
                    kill(process)
                    process.join()

    async def _keep(self, rank: int, tell: Connection) -> None:
        """Start a rank, and again when it has died."""
        join = False
        while not (self._stopping or self._scope.cancel_called):
            listener = self._listener if rank == 0 else None
            environment = {**self._environment, "RANK": str(rank)}
            process = context.Process(
                target=run_rank, args=(environment, self._shape, listener, tell, join), daemon=True
            )
            process.start()
            self._processes[rank] = process
            print(f"rank {rank} is process {process.pid}", flush=True)
            await anyio.wait_readable(process.sentinel)
            process.join()
            if not self._stopping:
                self._on_death(rank, process)
            join = True

    def _on_death(self, rank: int, process: ForkServerProcess) -> None:
        """See whether to go on, and with whom."""
        logging.warning("rank %d, process %d, has ended with exit code %s", rank, process.pid, process.exitcode)
        now = anyio.current_time()
        if len(self._deaths) == DEATHS and now - self._deaths[0] < WINDOW:
            self._failure = f"more than {DEATHS} ranks died within {WINDOW:g} s, the last was rank {rank}: giving up"
            self._stop()
            return
        self._deaths.append(now)
        self._new.add(rank)
        if len(self._new) == self._size:
            self._scope.cancel()

    async def _listen(self, news: Connection) -> None:
        """Hear from the ranks that rank 0 serves (None), or which rank is lost to them."""
        while True:
            await anyio.wait_readable(news)
            lost = news.recv()
            if lost is None:
                self._new.clear()
            elif lost not in self._new and not self._stopping:
                kill(self._processes[lost])  # it was stopped, say: the others will not have it back

    async def _stop_on_signals(self) -> None:
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            async for _ in signals:
                self._stop()

    def _stop(self) -> None:
        """Have all ranks end in good order, as far as there is time."""
        if not self._stopping:
            self._stopping = True
            self._listener.close()
            self._scope.deadline = anyio.current_time() + LEAVE
            for process in self._processes.values():
                process.terminate()


def run_rank(
    environment: dict[str, str], shape: dict[str, int], listener: socket.socket | None, tell: Connection, join: bool
) -> None:
    """Be a rank; in a process of its own."""
    os.environ.update(environment)
    end_at_once_on_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    from .rank import Shape, run

    anyio.run(run, lambda: listener, Shape(**shape), tell.send, join)


def kill(process: ForkServerProcess) -> None:
    """Kill a process, even if only the fork server is gone."""
    if process.exitcode in (None, UNKNOWN):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def main() -> None:
    """Run the server until Ctrl-C."""
    parser = make_parser("embedding_server.supervisor", __doc__)
    add_shape(parser)
    parser.add_argument(
        "--pp", default=2, type=positive, help="over how many stages the layers are split (default: %(default)s)"
    )
    options = parser.parse_args()
    shape = {"tp": options.tp, "threads": options.threads, "torch_threads": options.torch_threads}
    end_at_once_on_signals()
    listener = listen(options.host, options.port)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "AIOCOMMS_TOKEN_FILE" not in os.environ:
        os.environ.setdefault("AIOCOMMS_TOKEN", secrets.token_hex(32))  # of this job alone
    multiprocessing.set_forkserver_preload([f"{__package__}.preload"])
    forkserver.ensure_running()  # it imports while this process does

    import socket

    from torch.distributed import TCPStore

    # As a launcher's agent has it; on a socket of ours, for without one torch listens on every interface.
    at = socket.create_server(("127.0.0.1", 0))
    port = at.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=at.detach())
    anyio.run(Supervisor(options.tp * options.pp, shape, listener, port).run)
    del store  # which served until here


if __name__ == "__main__":
    main()
