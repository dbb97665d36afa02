"""The driver's side: starts the ranks of a contender, and commands them one contender at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from benchmarks.peers.worker import die_with_parent, keep_busy

PATIENCE = 60.0
"""Seconds that a contender may take to answer."""


class ContenderFailedError(Exception):
    """A contender did not come up, went wrong or did not answer."""


class Neighbours:
    """Processes that want a core all the time, beside any contender's ranks; they stand still but while awake."""

    def __init__(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes = [spawn.Process(target=keep_busy, daemon=True) for _ in range(count)]
        for process in self._processes:
            process.start()
        self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have them want their cores."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        """At once."""
        for process in self._processes:
            process.kill()
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)


class World:
    """The processes of one contender."""

    def __init__(self, kind: str, size: int, transport: str = "", *, bound: bool = True) -> None:
        """Start them; ``bound``: each to a core of its own, where there are as many."""
        self.kind, self.size = kind, size
        self.pids: dict[int, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="aiocomms-bench-")
        self._log = Path(self._folder.name) / "log"
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._ranks: dict[int, Connection] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(transport, "bound" if bound else "free")
        except BaseException:
            self.kill()
            raise

    def _start(self, transport: str, bound: str) -> None:
        path = f"{self._folder.name}/driver"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen(self.size)
            door.settimeout(PATIENCE)
            command = [sys.executable, "-m", "benchmarks.peers.worker", self.kind, path, str(self._store.port)]
            command += [str(self.size), transport, bound]
            mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-bind-to", "none", "-n", str(self.size)]
            ranks = [[*mpiexec, *command]] if self.kind == "mpich" else [[*command, str(r)] for r in range(self.size)]
            # One thread each, and loopback: every contender is given the same.
            env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
            with self._log.open("wb") as log:
                for argv in ranks:
                    options = {
                        "stdin": subprocess.DEVNULL,
                        "stdout": log,
                        "stderr": log,
                        "env": env,
                        "start_new_session": True,
                    }
                    self._processes.append(subprocess.Popen(argv, preexec_fn=die_with_parent, **options))
            for _ in range(self.size):
                try:
                    rank = Connection(door.accept()[0].detach())
                except TimeoutError:
                    raise self._failed("not all ranks came up") from None
                self._ranks[rank.recv()] = rank
        self.pids = dict(enumerate(self.collect()))

    def ask(self, verb: str, *args: Any) -> list[Any]:
        """Have all ranks do something, and wait for their answers."""
        self.tell(verb, *args)
        return self.collect()

    def tell(self, verb: str, *args: Any) -> None:
        """Have all ranks do something."""
        for rank in self._ranks.values():
            rank.send((verb, *args))

    def collect(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """The next answer of each rank, or of some."""
        answers = []
        for rank in range(self.size) if ranks is None else ranks:
            try:
                if not self._ranks[rank].poll(PATIENCE):
                    raise self._failed(f"rank {rank} did not answer for {PATIENCE:.0f} s")
                status, answer = self._ranks[rank].recv()
            except (EOFError, ConnectionError):
                raise self._failed(f"rank {rank} is gone") from None
            if status != "ok":
                raise self._failed(f"rank {rank}: {answer.splitlines()[0]}")
            answers.append(answer)
        return answers

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Run its processes, which otherwise stand still: some have threads that wake up all the time."""
        self._signal(signal.SIGCONT)
        yield
        self.freeze()

    def seconds_on_cores(self) -> float:
        """The time that all threads of its processes have had a core, so far."""
        tasks = (task for pid in self.pids.values() for task in Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9

    def freeze(self) -> None:
        """Stop its processes until they are wanted."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids.values():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # the next question to it finds out

    def close(self) -> None:
        """Orderly, and by force what does not end."""
        self._signal(signal.SIGCONT)
        try:
            self.ask("close")
            for process in self._processes:
                process.wait(10)
        except subprocess.TimeoutExpired:
            raise self._failed("a rank did not end") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """At once."""
        if any(process.poll() is None for process in self._processes):
            self._signal(signal.SIGCONT)  # what is stopped does not end by the launcher's signal
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if self.kind == "mpich" else signal.SIGKILL)  # the launcher tidies
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for rank in self._ranks.values():
            rank.close()
        self._folder.cleanup()

    def _failed(self, what: str) -> ContenderFailedError:
        tail = self._log.read_text(errors="replace").strip().splitlines()[-25:]
        return ContenderFailedError("\n  | ".join([f"{self.kind}, {self.size} ranks: {what}", *tail]))
