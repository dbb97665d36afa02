"""The function ``supervise``, which executes the orders of a :class:`Supervision`."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio.abc import TaskGroup, TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream

from aiocomms.bootstrap.supervised import ENDS, REPLACED
from aiocomms.errors import ArgumentError, CommError, StoreLostError
from aiocomms.launching.health import serve_health
from aiocomms.launching.host import Event, HostProcesses
from aiocomms.launching.hosts import BEAT, HostQueue, OtherHosts
from aiocomms.launching.job import At, Job, listen, place
from aiocomms.launching.output import Printer
from aiocomms.launching.supervision import Deed, Say, Start, Supervision, Tell
from aiocomms.lowlevel import run_in_thread
from aiocomms.lowlevel.sockets import listen_at

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOPBACK: Final = "127.0.0.1"


async def supervise(job: Job) -> int:
    """Run the ranks of a job until all have ended.

    If this function runs on the main thread, SIGINT and SIGTERM end the ranks, and SIGHUP replaces them one by one. The
    cancellation of the call also ends the ranks.

    :returns: the exit code of the job: 0, or the code of a rank's last process. If the supervisor gave up because of a
        rank, the code is from this rank. Otherwise, the code is from the rank that failed first. If a signal ended the
        process, the exit code is 128 plus the signal's number.
    :raises ArgumentError: the job is invalid, or a port is in use. No process was started.
    :raises CommError: the ranks cannot be started, or the supervisors of other hosts have ended.
    """
    job.check(os.environ)
    printer = Printer(job.size, _folder(job), os.environ)
    for text in job.warnings(os.environ, len(os.sched_getaffinity(0))):
        printer.say(text)
    try:
        async with anyio.create_task_group() as printing:
            printing.start_soon(printer.print_sentences)
            try:
                return await _supervise(job, printer)
            finally:
                printer.end()
                printer.limit()
    except BaseExceptionGroup as group:
        failure = first(group)
    raise failure


async def _supervise(job: Job, printer: Printer) -> int:
    listener = None
    if job.listen is not None:
        at = place("listen", job.listen)
        listener = listen("listen", at)
        if at.port == 0:
            printer.say(f"listen is at {At(at.host, listener.getsockname()[1])}")
    with contextlib.nullcontext() if listener is None else listener:
        async with anyio.create_task_group() as tasks:
            supervisor = (Supervisor if job.node_rank == 0 else Follower)(job, listener, printer, tasks)
            try:
                code = await _supervised(supervisor, job, printer)
            finally:
                await supervisor.aclose()
                printer.limit()
    for line in supervisor.summary():
        printer.say(line)
    return code


async def _supervised(supervisor: HostSupervisor, job: Job, printer: Printer) -> int:
    """Run a job. Meanwhile, handle signals and HTTP requests."""
    async with anyio.create_task_group() as beside:
        if threading.current_thread() is threading.main_thread():
            await beside.start(supervisor.hear_signals)
        if job.health is not None:
            at = place("health", job.health)
            got = await beside.start(serve_health, at, supervisor.state)
            if at.port == 0:
                printer.say(f"health is at {got}")
        code = await supervisor.run()
        beside.cancel_scope.cancel()
    return code


class HostSupervisor(ABC):
    """The supervisor of one host.

    :param job: the job to run.
    :param tasks: the task group of tasks that run until the ranks have ended.
    """

    def __init__(self, job: Job, listener: socket.socket | None, printer: Printer, tasks: TaskGroup) -> None:
        self._job, self._printer = job, printer
        self._send, self._events = anyio.create_memory_object_stream[Event](math.inf)
        settings = {"program": list(job.program), "preload": list(job.preload), "grace": job.grace}
        tell = self._send.send_nowait
        self._host = HostProcesses(settings, environment(os.environ, job.nnodes), listener, printer, tell, tasks)

    @abstractmethod
    async def run(self) -> int:
        """Run the ranks of this host until all have ended, and return the exit code."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Return the body of ``/readyz``: whether the ranks have formed a communicator, and the state of each rank."""

    @abstractmethod
    def summary(self) -> Sequence[str]:
        """Return the lines that describe the outcome of the job."""

    async def hear_signals(self, *, task_status: TaskStatus[None]) -> None:
        """Convert the signals that this process gets to events.

        Signals that the process ignores, such as SIGHUP under nohup, are not converted.
        """
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        with anyio.open_signal_receiver(*heard) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                event: Event = ("replace",) if number == signal.SIGHUP else ("stop", f"{name}: all ranks are to end")
                self._send.send_nowait(event)

    async def aclose(self) -> None:
        """End the remaining processes."""
        with anyio.CancelScope(shield=True):
            await self._host.aclose()
        self._send.close()
        self._events.close()


class Supervisor(HostSupervisor):
    """The supervisor of the first host, which gives orders to all hosts."""

    def __init__(self, job: Job, listener: socket.socket | None, printer: Printer, tasks: TaskGroup) -> None:
        super().__init__(job, listener, printer, tasks)
        self._stores: dict[int, tuple[TCPStore, int]] = {}
        """The store and the store's port, by generation number. Only the current generation has an entry."""
        self._others: OtherHosts | None = None
        self.supervision: Supervision = Supervision(
            job.size, restart=job.restart == "on-failure", most=job.max_restarts, grace=job.grace
        )

    async def run(self) -> int:
        """Run all ranks; see :class:`HostSupervisor`."""
        if self._job.rendezvous is None:
            return await self._run()
        at = place("rendezvous", self._job.rendezvous)
        queue = await run_in_thread(lambda: HostQueue(at, 0, self._job.nnodes))
        self._others = OtherHosts(queue, self._job.nnodes, self._send.send_nowait)
        with contextlib.closing(queue):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._others.hear)
                tasks.start_soon(self._others.watch)
                code = await self._run()
                await self._others.end(code)
                tasks.cancel_scope.cancel()
        return code

    async def _run(self) -> int:
        """Start the ranks, and execute the supervision's orders until all ranks have ended."""
        supervision = self.supervision
        await self._do(supervision.begin(anyio.current_time()))
        while not supervision.over:
            event: Event = ("tick",)
            left = math.inf if supervision.deadline is None else supervision.deadline - anyio.current_time()
            with anyio.move_on_after(max(0.0, left)):
                event = await self._events.receive()
            await self._do(self._decide(event, anyio.current_time()))
            if supervision.stopping is not None:
                self._host.refuse_connections()
                for host in [] if self._others is None else await self._others.absent():
                    await self._do(supervision.miss(self._ranks_of(host), anyio.current_time()))
        return supervision.code()

    def _ranks_of(self, host: int) -> range:
        return range(host * self._job.ranks, (host + 1) * self._job.ranks)

    def _decide(self, event: Event, now: float) -> Sequence[Deed]:
        match event:
            case ("ended", rank, incarnation, code):
                return self.supervision.ended(rank, incarnation, code, now)
            case ("formed", rank, incarnation, name, epoch):
                return self.supervision.formed(rank, incarnation, name, epoch, now)
            case ("lost", rank, name, epoch):
                return self.supervision.lost(rank, name, epoch, now)
            case ("leaves", rank, incarnation):
                return self.supervision.leaves(rank, incarnation, now)
            case ("stop", why):
                return self.supervision.stop(why, now)
            case ("replace",):
                return self.supervision.replace_all(now)
            case ("failed", host):
                return self.supervision.miss(self._ranks_of(host), now)
            case ("absent", host):
                return [Say(f"host {host} has not joined: does its supervisor run, with the same token?")]
        return self.supervision.tick(now)

    async def _do(self, deeds: Sequence[Deed]) -> None:
        for deed in deeds:
            if isinstance(deed, Say):
                self._printer.say(deed.text)
                continue
            host = deed.rank // self._job.ranks
            given = await self._variables(deed) if isinstance(deed, Start) else {}
            announcement = ENDS if self.supervision.stopping is not None else ""
            if isinstance(deed, Tell) and deed.replaced:
                announcement = REPLACED
            if host and self._others is not None:
                await self._others.do(host, deed, given, announcement)
            elif isinstance(deed, Start):
                await self._host.start(deed, given)
            else:
                await self._host.signal(deed.rank, deed.signal, announcement)

    async def _variables(self, deed: Start) -> dict[str, str]:
        """Return the environment variables that give a process its rank and the address of the store."""
        given = self._job.rendezvous
        host = _LOOPBACK if given is None else place("rendezvous", given).host
        if deed.generation not in self._stores:
            await run_in_thread(self._stores.clear)  # Keys of an earlier generation must not remain.
            self._stores[deed.generation] = await run_in_thread(lambda: open_store(host))
        return variables(self._job, deed, At(host, self._stores[deed.generation][1]))

    def state(self) -> Mapping[str, Any]:
        """Return the state of all ranks; see :class:`HostSupervisor`."""
        processes = self._host.processes
        ranks = [
            {
                "rank": rank.number, "alive": rank.alive, "formed": bool(rank.formed), "restarts": rank.incarnation,
                "pid": processes[rank.number].pid if rank.number in processes else None,
            }
            for rank in self.supervision.ranks
        ]  # fmt: skip
        return {"ready": self.supervision.ready, "pid": os.getpid(), "ranks": ranks}

    def summary(self) -> Sequence[str]:
        """Return the summary; see :class:`HostSupervisor`."""
        return self.supervision.summary()

    async def aclose(self) -> None:
        """End the remaining processes, and then close the store."""
        await super().aclose()
        with anyio.CancelScope(shield=True):
            await run_in_thread(self._stores.clear, anyhow=True)


class Follower(HostSupervisor):
    """The supervisor of a host other than the first host.

    This supervisor executes the orders of the first host's supervisor.
    """

    _stops = 0

    async def run(self) -> int:
        """Run the ranks of this host; see :class:`HostSupervisor`.

        :raises CommError: the first host did not start in time, or has ended.
        """
        assert self._job.rendezvous is not None
        at, mine = place("rendezvous", self._job.rendezvous), self._job.node_rank
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_early)
            queue = await run_in_thread(lambda: HostQueue(at, mine, self._job.nnodes))
            tasks.cancel_scope.cancel()
        with contextlib.closing(queue):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._report, queue)
                tasks.start_soon(self._beat, queue)
                code = await self._obey(queue)
                tasks.cancel_scope.cancel()
            await run_in_thread(lambda: queue.send(0, ["left", mine]))
        return code

    async def _end_early(self) -> None:
        """Raise an error if this host gets a stop signal while it waits for the first host."""
        while (await self._events.receive())[0] != "stop":
            pass
        raise CommError("a signal has ended this supervisor before the first host had joined")

    async def _obey(self, queue: HostQueue) -> int:
        while True:
            match await run_in_thread(queue.receive):
                case ["start", rank, incarnation, generation, restarts, given]:
                    await self._host.start(Start(rank, incarnation, generation, restarts), given)
                case ["signal", rank, number, announcement]:
                    await self._host.signal(rank, number, announcement)
                case ["over", code]:
                    return int(code)

    async def _beat(self, queue: HostQueue) -> None:
        with contextlib.suppress(StoreLostError):  # _obey() gets this error, too.
            while True:
                await run_in_thread(queue.beat)
                await anyio.sleep(BEAT)

    async def _report(self, queue: HostQueue) -> None:
        """Report this host's events to the first host.

        A second stop event kills the ranks even if the first host does not answer.
        """
        reports, unsent = anyio.create_memory_object_stream[Event](math.inf)
        with reports, unsent:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_all, queue, unsent)
                async for event in self._events:
                    reports.send_nowait(event)
                    self._stops += event[0] == "stop"
                    if self._stops > 1:
                        for rank in list(self._host.processes):
                            await self._host.signal(rank, signal.SIGKILL)

    async def _send_all(self, queue: HostQueue, events: MemoryObjectReceiveStream[Event]) -> None:
        with contextlib.suppress(StoreLostError):  # _obey() gets this error, too.
            async for event in events:
                await run_in_thread(functools.partial(queue.send, 0, list(event)))

    def state(self) -> Mapping[str, Any]:
        """Return the state of this host's ranks; see :class:`HostSupervisor`."""
        ranks = [
            {"rank": rank, "alive": True, "formed": process.formed, "restarts": process.incarnation, "pid": process.pid}
            for rank, process in sorted(self._host.processes.items())
        ]
        ready = len(ranks) == self._job.ranks and all(rank["formed"] for rank in ranks)
        return {"ready": ready, "ranks": ranks}

    def summary(self) -> Sequence[str]:
        """Return an empty list, because the first host prints the outcome of the job."""
        return []


def environment(environ: Mapping[str, str], nnodes: int = 1) -> dict[str, str]:
    """Return the environment of all ranks.

    If ``environ`` does not set ``OMP_NUM_THREADS``, the ranks get the value 1. If ``environ`` sets no token, a job on
    one host gets a new token.
    """
    given = dict(environ)
    given.setdefault("OMP_NUM_THREADS", "1")
    if "AIOCOMMS_TOKEN_FILE" not in given and nnodes == 1:
        given.setdefault("AIOCOMMS_TOKEN", secrets.token_hex(32))
    return given


def variables(job: Job, deed: Start, store: At) -> dict[str, str]:
    """Return the environment variables of one process: torchrun's variables, and ``AIOCOMMS_RESTARTS``."""
    node, local = divmod(deed.rank, job.ranks)
    return {
        "RANK": str(deed.rank),
        "WORLD_SIZE": str(job.size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "NODE_RANK": str(node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(job.nnodes),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(deed.generation),
        "AIOCOMMS_RESTARTS": str(deed.restarts),
    }


def open_store(host: str) -> tuple[TCPStore, int]:
    """Serve a torch store at only one address, because torch itself would listen on every interface. Blocks.

    :returns: the store and the store's port. The store serves clients as long as the store object exists.
    :raises OSError: the address is not on this host.
    """
    from torch.distributed import TCPStore

    listener = listen_at(host)
    port = int(listener.getsockname()[1])
    server = listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server), port


def _folder(job: Job) -> Path | None:
    if job.log_dir is None:
        return None
    try:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"log_dir {job.log_dir!r} cannot be made: {error.strerror}") from None
    return Path(job.log_dir)


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first :class:`CommError` of an exception group, or the first error if the group has no such error."""
    errors: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            errors.append(error)
    return next((error for error in errors if isinstance(error, CommError)), errors[0])
