"""A fake GPU of queues and a thread: streams, events, captures and graphs, which refuse what CUDA refuses.

Tensors on the CPU stand for device memory. A stream is a queue of tasks. The GPU's thread runs the first task of each
queue until none can continue, so that a task which waits blocks its own stream and no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_functions import PerThread, runtime_functions

Task = Callable[[], bool]
"""A function that is called again until it returns True; then the task is done."""

GLOBAL, THREAD_LOCAL = "global", "thread_local"


class CudaError(RuntimeError):
    """The error of a CUDA call, as torch raises it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"CUDA error: {text} ({code})")
        self.code = code


class Batch:
    """Event records that fire together: whoever can see one of them can see the others."""

    seen = False


class Mark:
    """One record of an event."""

    def __init__(self, capture: Capture | None = None, stream: FakeStream | None = None, position: int = 0) -> None:
        self.batch: Batch | None = None
        self.capture = capture
        self.stream = stream
        self.position = position

    @property
    def fired(self) -> bool:
        """Return whether the event has fired and the host can see it."""
        return self.batch is not None and self.batch.seen


class Capture:
    """A capture in progress."""

    def __init__(self, origin: FakeStream, mode: str) -> None:
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.invalid = False
        self.nodes: list[Callable[[], Task]] = []
        self.positions: dict[FakeStream, int] = {origin: 0}
        self.joined: dict[FakeStream, int] = {}
        self.memory: list[torch.Tensor] = []

    def add(self, stream: FakeStream, node: Callable[[], Task]) -> None:
        self.nodes.append(node)
        self.positions[stream] += 1


class Graph:
    """A graph: the nodes of a capture that has ended."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.nodes: list[Callable[[], Task]] = []
        self.memory: list[torch.Tensor] = []
        """The memory of its own pool: what was allocated on a stream of the capture. No one else gets that."""

    def replay(self, stream: FakeStream) -> None:
        for node in self.nodes:
            stream.push(node())


class FakeStream:
    """See :class:`aiocomms.cuda.Stream`."""

    _numbers = itertools.count(1)

    def __init__(self, gpu: Gpu, priority: int = 0) -> None:
        self.gpu = gpu
        self.priority = priority
        self.cuda_stream = next(self._numbers)
        self.device = torch.device("cuda", 0)
        self.queue: deque[Task] = deque()
        self.capture: Capture | None = None
        gpu.streams[self.cuda_stream] = self

    def push(self, task: Task) -> None:
        with self.gpu.changed:
            self.queue.append(task)
            self.gpu.busy[self.cuda_stream] = self
            self.gpu.kick()

    def add(self, node: Callable[[], Task]) -> None:
        """Add a node: to be run now, or during a capture, in every replay of the graph."""
        if self.capture is None:
            self.push(node())
        else:
            self.capture.add(self, node)

    def wait_event(self, event: FakeEvent) -> None:
        self.gpu.check()
        mark = event.mark
        if mark is None:
            return
        if mark.capture is not None:
            self._join(mark)
        elif self.capture is not None:
            raise CudaError(905, "dependency created on uncaptured work in another stream")
        else:
            self.push(lambda: mark.batch is not None)

    def _join(self, mark: Mark) -> None:
        capture = mark.capture
        assert capture is not None
        assert mark.stream is not None
        if self.capture is None:
            if capture not in self.gpu.captures:
                raise CudaError(907, "operation not permitted on an event last recorded in a capturing stream")
            self.capture = capture
            capture.positions[self] = 0
            return
        capture.joined[mark.stream] = max(mark.position, capture.joined.get(mark.stream, 0))


class FakeEvent:
    """See :class:`aiocomms.cuda.Event`."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.mark: Mark | None = None
        self.queries = 0
        gpu.events += 1

    def record(self, stream: FakeStream) -> None:
        old = self.mark
        if old is not None and old.capture is None and not old.fired:
            raise AssertionError("an event is recorded again although its last record has not fired: that is lost")
        self.gpu.check()
        capture = stream.capture
        if capture is not None:
            self.mark = Mark(capture, stream, capture.positions[stream])
            return
        mark = self.mark = Mark()

        def fire() -> bool:
            mark.batch = self.gpu.batch
            return True

        stream.push(fire)

    def query(self) -> bool:
        self.queries += 1
        self._check()
        return self.mark is None or self.mark.fired

    def synchronize(self) -> None:
        self._check()
        with self.gpu.changed:
            self.gpu.sleeping += 1
            while self.mark is not None and not self.mark.fired:
                self.gpu.changed.wait()
            self.gpu.sleeping -= 1

    def _check(self) -> None:
        self.gpu.check()
        if self.mark is not None and self.mark.capture is not None:
            raise CudaError(907, "operation not permitted on an event last recorded in a capturing stream")
        me = threading.get_ident()
        for capture in self.gpu.captures:
            mine = capture.thread == me
            if mine or (capture.mode == GLOBAL and self.gpu.mode == GLOBAL):
                capture.invalid = True
                raise CudaError(900, "operation not permitted when stream is capturing")


class Gpu:
    """The device."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.streams: dict[int, FakeStream] = {}
        self.busy: dict[int, FakeStream] = {}
        self.captures: list[Capture] = []
        self.events = 0
        self.sleeping = 0
        """The number of threads that sleep on an event."""
        self.broken = False
        """A flag that makes every call fail, as after an assertion in a kernel."""
        self.memory: int | None = None
        """The number of allocations that succeed before memory is exhausted; None if all do."""
        self._modes = PerThread(lambda: GLOBAL)
        self._dirty = False
        self.batch = Batch()
        threading.Thread(target=self._run, name="fake GPU", daemon=True).start()

    @property
    def mode(self) -> str:
        """This thread's capture mode."""
        return self._modes.get()

    @mode.setter
    def mode(self, value: str) -> None:
        self._modes.set(value)

    def check(self) -> None:
        """Raise the error of every call after an assertion in a kernel, if the GPU is broken."""
        if self.broken:
            raise CudaError(719, "unspecified launch failure")

    def kick(self) -> None:
        """Wake the GPU's thread, because a task may be able to continue."""
        with self.changed:
            self._dirty = True
            self.changed.notify_all()

    def _run(self) -> None:
        with self.changed:
            while True:
                while not self._dirty:
                    self.changed.wait()
                self._dirty = False
                while self._step():
                    pass
                self.batch.seen = True
                self.batch = Batch()
                self.changed.notify_all()

    def _step(self) -> bool:
        went_on = False
        for key, stream in list(self.busy.items()):
            while stream.queue and stream.queue[0]():
                stream.queue.popleft()
                went_on = True
            if not stream.queue:
                del self.busy[key]
        return went_on


class Gate:
    """A kernel that runs until :meth:`open` is called."""

    def __init__(self, stream: FakeStream) -> None:
        self.gpu = stream.gpu
        self.is_open = False
        stream.push(lambda: self.is_open)

    def open(self) -> None:
        self.is_open = True
        self.gpu.kick()


class FakeMapped:
    """See :class:`aiocomms.cuda.Mapped`."""

    def __init__(self, cuda: FakeCuda, storage: torch.UntypedStorage, memory: object) -> None:
        self.storage, self._memory = storage, memory
        self._cuda = cuda
        cuda.mapped.append(self)
        cuda.ever_mapped += 1

    def release(self) -> None:
        """The owner's memory is its own again."""
        self._cuda.ipc_threads.add(threading.get_ident())
        self._cuda.mapped.remove(self)
        del self.storage, self._memory


class FakeCuda:
    """See :class:`aiocomms.cuda.Cuda`."""

    index = 0
    _numbers = itertools.count(1)

    def __init__(self, gpu: Gpu | None = None, *, shares: bool = True) -> None:
        """Start a GPU, unless it is given one.

        :param shares: whether a process may map another one's memory.
        """
        self.gpu = gpu or Gpu()
        self.shares = shares
        self.mapped: list[FakeMapped] = []
        """The mappings that were not given back."""
        self.ever_mapped = 0
        """The number of mappings made so far."""
        self.ipc_threads: set[int] = set()
        """The threads that memory was mapped on, and given back on."""
        self.mappable = threading.Event()
        """Set, unless the driver takes long to map memory."""
        self.mappable.set()
        self._shared: dict[int, torch.UntypedStorage] = {}
        self.default = FakeStream(self.gpu)
        self._local = threading.local()
        self.made: list[FakeStream] = []

    @functools.cached_property
    def _functions(self) -> dict[str, int]:
        return runtime_functions(self, (GLOBAL, THREAD_LOCAL))

    def functions(self) -> dict[str, int]:
        return self._functions

    def activate(self) -> None:
        pass

    def stream(self, priority: int) -> FakeStream:
        self.made.append(FakeStream(self.gpu, priority))
        return self.made[-1]

    def current_stream(self) -> FakeStream:
        stream: FakeStream = getattr(self._local, "current", self.default)
        return stream

    def current_handle(self) -> int:
        return self.current_stream().cuda_stream

    def copy(self, stream: FakeStream, to: int, source: int, nbytes: int) -> None:
        self.enqueue(stream, functools.partial(ctypes.memmove, to, source, nbytes))

    def event(self) -> FakeEvent:
        return FakeEvent(self.gpu)

    def capturing(self, stream: Any = None) -> bool:
        self.gpu.check()
        return (stream or self.current_stream()).capture is not None

    def enqueue(self, stream: FakeStream, call: Callable[[], object]) -> None:
        def node() -> Task:
            def task() -> bool:
                call()
                return True

            return task

        stream.add(node)

    def empty_like(self, stream: FakeStream, tensor: torch.Tensor) -> torch.Tensor:
        if self.gpu.memory is not None:
            if not self.gpu.memory:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            self.gpu.memory -= 1
        memory = torch.full_like(tensor, 1)
        if stream.capture is not None:
            stream.capture.memory.append(memory)
        return memory

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...] | None:
        """Share memory with a rank of this process, where it stays; it is kept until that gives it back."""
        if not self.shares:
            return None
        number = next(self._numbers)
        self._shared[number] = storage
        return os.getpid(), number, storage.nbytes()

    def share_moved(self, storage: torch.UntypedStorage) -> tuple[Any, ...] | None:
        """Share it with another process, by the means of torch's CPU tensors."""
        if not self.shares:
            return None
        fd, size = storage._share_fd_cpu_()
        return os.getpid(), fd, size

    def map(self, shared: tuple[Any, ...]) -> FakeMapped | None:
        self.ipc_threads.add(threading.get_ident())
        self.mappable.wait()
        pid, number, size = shared
        if pid == os.getpid():
            owned = self._shared.pop(number)
            if not self.shares:
                return None
            memory = (ctypes.c_char * size).from_address(owned.data_ptr())
            return FakeMapped(self, torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(), owned)
        if not self.shares:
            return None
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            pages = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        return FakeMapped(self, torch.frombuffer(pages, dtype=torch.uint8).untyped_storage(), pages)

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        before, self.gpu.mode = self.gpu.mode, THREAD_LOCAL
        try:
            yield
        finally:
            self.gpu.mode = before

    # ------------------------------------------------------------------------------------------- for tests

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[FakeStream]:
        """Make a stream the current one, as ``with torch.cuda.stream(stream):`` does."""
        before = self.current_stream()
        self._local.current = stream
        try:
            yield stream
        finally:
            self._local.current = before

    @contextlib.contextmanager
    def graph(self, mode: str = GLOBAL) -> Iterator[Graph]:
        """Capture a graph on a stream of its own, as ``with torch.cuda.graph(...):`` does."""
        graph, stream = Graph(self.gpu), FakeStream(self.gpu)
        capture = stream.capture = Capture(stream, mode)
        self.gpu.captures.append(capture)
        try:
            with self.on(stream):
                yield graph
        finally:
            self.gpu.captures.remove(capture)
            for member in capture.positions:
                member.capture = None
        if capture.invalid:
            raise CudaError(901, "operation failed due to a previous error during capture")
        for member, position in capture.positions.items():
            if member is not stream and capture.joined.get(member, 0) < position:
                raise CudaError(904, "capturing stream has unjoined work")
        graph.nodes, graph.memory = capture.nodes, capture.memory


def streams_at(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> list[FakeStream]:
    """Note the stream that is current whenever one of these functions is called; each is an owner and a name."""
    streams: list[FakeStream] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            streams.append(cuda.current_stream())
            return function(*args)

        return call

    for owner, name in functions:
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    return streams
