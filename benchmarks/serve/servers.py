"""A server with all its processes: started, looked at from outside, and ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "",  # print() would write a line's end by itself, amid what other processes write
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",  # the fork server has no other way to what it is to import
}
STARTS, ENDS = 300.0, 30.0
"""Seconds in which a server starts, and ends, on however slow a machine."""


class Look(NamedTuple):
    """The counters of a server, which only grow."""

    cpu: float
    """Seconds on a core that its processes have had."""
    metrics: dict[str, float]
    """The metrics by name; where there are labels, with them, as ``name{key="value"}``."""


class Server:
    """A server under whatever restarts its ranks.

    :param name: what it is called in reports.
    :param command: what starts it, with ``{port}`` where its port is to be.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.pids: dict[int | str, int] = {}
        """The processes of its ranks, by their numbers; of groups of ranks, the last rank's by the group's name."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
        self._serving = threading.Event()
        # Bound and never listening: the kernel gives it to nobody else until the server, or one anew, listens there.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = self._port.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [part.format(port=port) for part in command],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        if not self._serving.wait(STARTS) or self._process.poll() is not None:
            self.__exit__()
            raise RuntimeError(f"the server {self.name!r} does not serve; it printed:\n{self.complaints}")
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and all its processes, in good order if they do so in time."""
        tree = self.tree()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS)
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._reader.join()
        self._log.seek(0)
        self.complaints = self._log.read()
        self._log.close()
        self._port.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if started := re.search(r"rank (\d+) is process (\d+)", line):
                self.pids[int(started[1])] = int(started[2])
            elif started := re.search(r"(\S+)\.\d+ is processes .*?(\d+)$", line):
                self.pids[started[1]] = int(started[2])
            elif "serving on" in line:
                self._serving.set()
        self._serving.set()

    def tree(self) -> list[psutil.Process]:
        """Its processes."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def memory(self) -> int:
        """Bytes of its processes, what they share counted once."""
        total = 0
        for process in self.tree():
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += 1024 * int(rollup.split("Pss:")[1].split()[0])
        return total

    def cpu(self) -> float:
        """Seconds on a core that its processes have had so far."""
        total = 0.0
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    async def look(self) -> Look:
        """Look at it from outside, and at what it shows.

        :raises httpx.HTTPError: it does not answer.
        """
        async with httpx.AsyncClient(base_url=self.url, timeout=ENDS) as http:
            text = (await http.get("/metrics")).raise_for_status().text
        return Look(self.cpu(), parse(text))

    def kill(self, rank: int | str) -> None:
        """Kill a rank, or the last one of a group, as nobody can prevent it."""
        os.kill(self.pids.pop(rank), signal.SIGKILL)


def parse(text: str) -> dict[str, float]:
    """The samples of what a server shows to Prometheus."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def late(before: Look, after: Look, metric: str, share: float = 0.99) -> float | None:
    """Return the ms by which the loop was late at most, in this share of the looks that the server took in between.

    It is interpolated within a bucket of the histogram ``metric``, as Prometheus does. Of several histograms, as of
    several processes, the worst; None: the server shows none.
    """
    histograms: dict[str, list[tuple[float, float]]] = {}
    for name, value in after.metrics.items():
        if found := re.fullmatch(rf'{metric}_bucket{{le="([^"]+)"(.*)}}', name):
            grown = value - before.metrics.get(name, 0.0)
            histograms.setdefault(found[2], []).append((float(found[1]), grown))
    lateness = [1e3 * within(sorted(each), share) for each in histograms.values() if max(each)[1]]
    return max(lateness, default=None)


def within(buckets: list[tuple[float, float]], share: float) -> float:
    """The quantile of a histogram, by its buckets' upper bounds and how many values are at most these."""
    wanted, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            inside = (wanted - below) / (count - below) if count > below else 1.0
            return low if bound == float("inf") else low + inside * (bound - low)
        low, below = bound, count
    raise AssertionError("the last bucket has all")


def ours(tp: int, pp: int, *more: str) -> Server:
    """The embedding server of the examples, under its launcher."""
    return Server("aiocomms", launched(tp * pp, ["embedding_server.rank"], "embedding_server", f"--tp={tp}", *more))


def launched(ranks: int, preload: list[str], module: str, *options: str) -> list[str]:
    """Return the command that starts the ranks of a program.

    Where these have a core each, each has a session, as torchrun's have: Linux shares out the processors among sessions
    before it does so among their threads (``sched_autogroup``).
    """
    launcher = ["-m", "aiocomms", "run", f"-n{ranks}", "--restart=on-failure", "--max-restarts=1000"]
    imports = [f"--preload={name}" for name in preload]
    return [sys.executable, *launcher, "--listen=127.0.0.1:{port}", *imports, "-m", module, *options]


def twin(tp: int, pp: int) -> Server:
    """Its twin, under torchrun, which starts all ranks anew when one has died."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={tp * pp}", "--max-restarts=1000"]
    module = ["--monitor-interval=0.1", "-m", "benchmarks.serve.twin", f"--tp={tp}", "--port={port}"]
    return Server("gloo twin", [sys.executable, "-m", *torchrun, *module])


def generator(tp: int, pp: int, model: Path) -> Server:
    """The text generator of the examples, under its launcher."""
    return Server("aiocomms", _generator("text_generator", tp, pp, model))


def generator_twin(tp: int, pp: int, model: Path) -> Server:
    """Its twin, whose ranks are all started anew when one has died."""
    return Server("gloo twin", _generator("benchmarks.serve.generator_twin", tp, pp, model))


def _generator(module: str, tp: int, pp: int, model: Path) -> list[str]:
    preload = [f"text_generator.{name}" for name in ("server", "decode", "prefill")]
    if module != "text_generator":
        preload = [module]  # the links are to be the twin's
    return launched(1 + 2 * tp * pp, preload, module, f"--tp={tp}", f"--pp={pp}", f"--model={model}")
