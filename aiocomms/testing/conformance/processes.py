"""Worlds whose ranks are processes. The processes run one check after another as long as the checks pass."""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import signal
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from aiocomms.testing import conformance
from aiocomms.testing.conformance import worker
from aiocomms.testing.conformance.case import DIES, Outcome, Place
from aiocomms.testing.conformance.rank import Request
from aiocomms.testing.conformance.world import GRACE, STOP, World

_DUMP = 0.3
"""The time limit, in seconds, for a process to write the stacks of its threads to the process's file."""

_CLOSE = 60.0
"""The time limit, in seconds, in which ranks without pending operations must close and end."""


def _context() -> Any:
    """Make a multiprocessing context with a fork server.

    The fork server has imported all modules, so it forks each rank in milliseconds.
    """
    context = multiprocessing.get_context("forkserver")
    modules = [f"{conformance.__name__}.{module.name}" for module in pkgutil.iter_modules(conformance.__path__)]
    context.set_forkserver_preload(["trio", "uvloop", *(m for m in modules if ".test_" in m), worker.__name__])
    return context


class Processes(World):
    """A world that runs each rank in a process of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._members: list[_Member] = []
        self._folder = tempfile.TemporaryDirectory(prefix="aiocomms")
        self._runs = 0
        self._fresh = False

    def run(self, request: Request) -> list[Outcome]:
        """See :meth:`World.run`."""
        if not self._members:
            self._members = [_Member(self.place, rank, Path(self._folder.name)) for rank in range(self.place.size)]
        self._runs += 1
        store = str(Path(self._folder.name) / f"store{self._runs}")
        for member in self._members:
            member.send("run", request, store, self._fresh)
        conversation = _Conversation(self._members, self.place.deadline)
        outcomes = conversation.outcomes()
        if any(outcome.status not in ("passed", "skipped") for outcome in outcomes):
            self._kill()
        elif conversation.dying:
            self._end()
        self._fresh = not all(outcome.usable for outcome in outcomes)
        return outcomes

    def close(self) -> None:
        """See :meth:`World.close`. A rank that does not end by itself is an error."""
        codes = self._end()
        self._folder.cleanup()
        assert not any(codes), f"the ranks' processes should have ended with 0, and ended with {codes}; -9: too late"

    def _end(self) -> list[int]:
        """End the processes, and return their exit codes."""
        for member in self._members:
            member.send("close")
        ends = time.monotonic() + _CLOSE
        codes = [member.end(ends) for member in self._members]
        self._kill()
        return codes

    def _kill(self) -> None:
        for member in self._members:
            member.kill()
        self._members = []


class _Member:
    """The process of one rank."""

    def __init__(self, place: Place, rank: int, folder: Path) -> None:
        context = _context()
        self.pipe: Connection
        self.pipe, far_end = context.Pipe()
        self._dump = folder / f"dump{rank}"
        self._process = context.Process(
            target=worker.work, args=(place, rank, far_end, str(self._dump)), name=f"rank {rank}", daemon=True
        )
        self._process.start()
        far_end.close()

    def send(self, *message: object) -> None:
        """Send a message to the process. If the process is gone, the wait for the process's answer reports the loss."""
        try:
            self.pipe.send(message)
        except OSError:
            pass

    def died(self) -> str:
        """Describe how the process ended.

        The description includes the text that the process has written to its file.
        """
        self._process.join(STOP)
        return f"its process ended with {self._process.exitcode}\n{self._dump.read_text()}"

    def stuck(self) -> str:
        """Describe what the threads of the process are doing."""
        os.kill(self._process.pid, signal.SIGUSR1)
        ends = time.monotonic() + STOP
        while not self._dump.stat().st_size and time.monotonic() < ends:
            time.sleep(0.01)
        time.sleep(_DUMP)
        return f"it does not answer:\n{self._dump.read_text()}"

    def end(self, deadline: float) -> int:
        """Wait for the end of the process, and return its exit code.

        If the process has not ended at the deadline, kill the process, and return -9.
        """
        self._process.join(max(deadline - time.monotonic(), 0))
        self._process.kill()
        self._process.join()
        return self._process.exitcode or 0

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


class _Conversation:
    """The reader of the ranks' pipes during one check. The reader also forwards the ranks' notes to each other."""

    def __init__(self, members: list[_Member], deadline: float) -> None:
        self._members = members
        self._ends = time.monotonic() + deadline
        self._outcomes: dict[int, Outcome] = {}
        self._stopped = False
        self.dying: set[int] = set()
        """The ranks whose processes kill themselves as a part of this check."""

    def outcomes(self) -> list[Outcome]:
        """Wait for the ranks' outcomes of the check, and return the outcomes in rank order."""
        ranks = {member.pipe: rank for rank, member in enumerate(self._members)}
        while len(self._outcomes) < len(ranks):
            left = self._ends - time.monotonic()
            if left > 0:
                for pipe in wait([p for p, rank in ranks.items() if rank not in self._outcomes], left):
                    self._listen(ranks[pipe], pipe)  # type: ignore[index,arg-type]
            elif self._stopped:
                for rank in set(ranks.values()) - set(self._outcomes):
                    self._outcomes[rank] = Outcome("stopped", self._members[rank].stuck(), usable=False)
            else:
                self._stop()
        return [self._outcomes[rank] for rank in range(len(ranks))]

    def _listen(self, rank: int, pipe: Connection) -> None:
        try:
            kind, what = pipe.recv()
        except (EOFError, OSError):
            status = "passed" if rank in self.dying else "failed"
            kind, what = "done", Outcome(status, self._members[rank].died(), usable=False)
        if kind == "note":
            if what == DIES:
                self.dying.add(rank)
            for other, member in enumerate(self._members):
                if other != rank:
                    member.send("note", rank, what)
            return
        self._outcomes[rank] = what
        if what.status == "failed" and not self._stopped:
            self._ends = min(self._ends, time.monotonic() + GRACE)

    def _stop(self) -> None:
        self._stopped = True
        self._ends = time.monotonic() + STOP
        for rank, member in enumerate(self._members):
            if rank not in self._outcomes:
                member.send("stop")
