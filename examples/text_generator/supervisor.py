"""What `make serve-generate` runs: the processes of the server, and new ones for those that have died.

The supervisor holds what must outlive all others: the store in which the ranks of a group find each other, and the
socket on which the front serves. It has no part in the work. A group of which a rank has died is worth nothing, for a
part of each of its sequences' pages is gone; so it is started anew as a whole. If the front dies all are.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import signal
import sys
from collections import deque
from itertools import chain
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from .parts import SIGNALS, end_at_once_on_signals, exiting_by, kill, listen, make_parser

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

    from anyio.abc import TaskGroup

    from .worker import Options

DEATHS, WINDOW = 8, 60.0  # more groups lost than that within as many seconds, and it is no use to go on
LEAVE = 10.0  # seconds after the front has ended when a rank that is still there is killed
PAGES = 512  # of each decode group
PRELOAD = f"{__package__}.preload"  # what the fork server imports, of which all processes are forks

context = multiprocessing.get_context("forkserver")


class Supervisor:
    """Starts the front, and the groups.

    :param store: the port of the store
    """

    def __init__(self, options: Options, decoders: int, listener: socket.socket, store: int) -> None:
        self._options, self._decoders, self._listener = options, decoders, listener
        self._environment = {
            "WORLD_SIZE": str(options.tp * options.pp),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank need serve it
        }
        self._groups: dict[str, list[ForkServerProcess]] = {}
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._failure: str | None = None
        self._stopping = False
        self._front: ForkServerProcess | None = None

    async def run(self) -> None:
        """Keep the server running until Ctrl-C or SIGTERM.

        :raises SystemExit: if groups die all the time, or processes do not end as they should
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_on_signals)
            while not self._stopping:
                await self._run_all()
            tasks.cancel_scope.cancel()
        if self._failure is not None:
            raise SystemExit(self._failure)

    async def _run_all(self) -> None:
        """Run everything, until the front ends: on its own accord, or because it has died."""
        news, tell = context.Pipe(duplex=False)
        with news, tell:
            arguments = self._listener, self._options.model, self._decoders, tell
            self._front = front = start(run_front, *arguments)
            print(f"the front is process {front.pid}", flush=True)
            try:
                async with anyio.create_task_group() as listening:
                    async with anyio.create_task_group() as groups:
                        listening.start_soon(self._listen, news, groups)
                        await anyio.wait_readable(front.sentinel)
                        front.join()
                        if self._stopping:
                            groups.cancel_scope.deadline = anyio.current_time() + LEAVE
                        else:
                            groups.cancel_scope.cancel()
                            self._note_death("the front", [front])
                    listening.cancel_scope.cancel()
                if self._stopping:
                    self._look_how_all_ended(front)
            finally:
                for process in [front, *chain(*self._groups.values())]:
                    kill(process)
                    process.join()
                self._groups.clear()

    def _look_how_all_ended(self, front: ForkServerProcess) -> None:
        codes = {"the front": front.exitcode}
        for name, processes in self._groups.items():
            for rank, process in enumerate(processes):
                codes[f"{name} rank {rank}"] = process.exitcode
        if bad := {name: code for name, code in codes.items() if code != 0}:
            self._failure = self._failure or f"not all processes ended in good order; exit codes: {bad}"

    async def _listen(self, news: Connection, groups: TaskGroup) -> None:
        """Hear from the front where groups find it, and then which of them it has lost."""
        address = b""
        while True:
            await anyio.wait_readable(news)
            heard = news.recv()
            if not address:
                address = heard
                for name in ["prefill", *(f"decode-{i}" for i in range(self._decoders))]:
                    groups.start_soon(self._keep, name, address)
            elif not self._stopping:
                for process in self._groups.get(heard, []):
                    kill(process)  # it was stopped, say

    async def _keep(self, name: str, address: bytes) -> None:
        """Start a group, and again when one of its ranks has died."""
        turn = 0
        while not self._stopping:
            turn += 1
            own = f"{name}.{turn}"
            processes = self._start(own, run_rank, range(self._options.tp * self._options.pp), address)
            if await self._outlive(processes):
                del self._groups[own]
                self._note_death(own, processes)

    def _start(self, own: str, run_rank: Callable[..., None], ranks: range, address: bytes) -> list[ForkServerProcess]:
        """Start the ranks of a group."""
        processes = self._groups[own] = [
            start(run_rank, {**self._environment, "RANK": str(rank)}, own, self._options, address) for rank in ranks
        ]
        print(f"{own} is processes {' '.join(str(process.pid) for process in processes)}", flush=True)
        return processes

    async def _outlive(self, processes: list[ForkServerProcess]) -> bool:
        """Wait until one of them has died, and end the others; False: all are to end, and have."""
        async with anyio.create_task_group() as tasks:
            for process in processes:
                tasks.start_soon(self._wait_for, process, tasks.cancel_scope)
        if self._stopping:
            return False
        for process in processes:
            kill(process)
            process.join()
        return True

    async def _wait_for(self, process: ForkServerProcess, others: anyio.CancelScope) -> None:
        """Wait for a process to end. Unless all are to, the others of its group need not be waited for."""
        await anyio.wait_readable(process.sentinel)
        process.join()
        if not self._stopping:
            others.cancel()

    def _note_death(self, name: str, processes: list[ForkServerProcess]) -> None:
        """See whether to go on."""
        logging.warning("%s has ended with exit codes %s", name, [process.exitcode for process in processes])
        now = anyio.current_time()
        if len(self._deaths) == DEATHS and now - self._deaths[0] < WINDOW:
            self._failure = f"more than {DEATHS} deaths within {WINDOW:g} s, the last was of {name}: giving up"
            self._stop()
        self._deaths.append(now)

    async def _stop_on_signals(self) -> None:
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            async for _ in signals:
                self._stop()

    def _stop(self) -> None:
        """Have the front answer what is under way, and then end all."""
        self._stopping = True
        if self._front is not None:
            self._front.terminate()


def start(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A process that has imported everything."""
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def run_front(listener: socket.socket, model: Path, decoders: int, news: Connection) -> None:
    """Be the front; in a process of its own."""
    end_at_once_on_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    from .serve import run

    anyio.run(run, listener, model, decoders, news)


def run_rank(environment: dict[str, str], name: str, options: Options, front: bytes) -> None:
    """Be a rank of a group; in a process of its own. Signals, which a terminal sends to all, are for the front."""
    os.environ.update(environment)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    from .links import LOST
    from .worker import run

    with exiting_by(LOST, f"{name}: "):
        anyio.run(run, name.partition("-")[0].partition(".")[0], name, options, front)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser("text_generator.supervisor", __doc__)
    parser.add_argument("--tp", default=2, type=int, help="shards of a stage (default: %(default)s)")
    parser.add_argument("--pp", default=1, type=int, help="stages (default: %(default)s)")
    parser.add_argument("--decoders", default=2, type=int, help="groups that decode (default: %(default)s)")
    parser.add_argument("--pages", default=PAGES, type=int, help="of 16 tokens, of each decoder (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a file; without it, what was trained on the documentation, once")
    options = parser.parse_args()
    for name, least in (("tp", 1), ("pp", 1), ("decoders", 1), ("pages", 2)):
        if (given := getattr(options, name)) < least:
            parser.error(f"--{name} is {given}, wanted at least {least}")
    return options


def main() -> None:
    """Run the server until Ctrl-C."""
    options = parse()
    end_at_once_on_signals()
    listener = listen(options.host, options.port)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "AIOCOMMS_TOKEN_FILE" not in os.environ:
        os.environ.setdefault("AIOCOMMS_TOKEN", secrets.token_hex(32))  # of this job alone
    multiprocessing.set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()  # it imports while this process does

    import socket

    from torch.distributed import TCPStore

    from .model import Part, read_shape
    from .train import kept
    from .worker import Options

    model = options.model or kept()
    try:
        Part(0, options.pp, 0, options.tp).check(read_shape(model))
    except (OSError, ValueError) as error:
        sys.exit(f"text_generator.supervisor: {error}")
    at = socket.create_server(("127.0.0.1", 0))  # on a socket of ours, for without one torch listens on every interface
    port = at.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=at.detach())
    rank_options = Options(model, options.tp, options.pp, options.pages)
    anyio.run(Supervisor(rank_options, options.decoders, listener, port).run)
    del store  # which served until here


if __name__ == "__main__":
    main()
