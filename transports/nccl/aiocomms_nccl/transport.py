"""The class :class:`NcclTransport`, which passes ops to NCCL and handles GPU events and frames from other ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import msgspec
import torch

from aiocomms import ops
from aiocomms.cuda import SPIN, Cuda, Event, TorchCuda, check_stream, no_gpu
from aiocomms.errors import (
    CapturedWorkError,
    CommAbortedError,
    CommClosedError,
    CommError,
    ProtocolError,
    StoreLostError,
    UnsupportedOperation,
)
from aiocomms.lowlevel import run_in_thread
from aiocomms.transport import Capabilities, Completion, LaneTransport, Rendezvous
from aiocomms_nccl import bringup
from aiocomms_nccl.agreement import NcclAgreement
from aiocomms_nccl.bringup import NcclHello
from aiocomms_nccl.calls import CallPlan
from aiocomms_nccl.collectives import CAPTURED, START, CommStream, no_memory, open_comm_stream
from aiocomms_nccl.control import Control
from aiocomms_nccl.dtypes import HALVES, REDUCTIONS
from aiocomms_nccl.lane_log import LaneLog
from aiocomms_nccl.launcher import end_comm
from aiocomms_nccl.matching import Matcher
from aiocomms_nccl.native import load_launcher, make_launcher
from aiocomms_nccl.nccl import CudaBrokenError, CupyNccl, Nccl, NcclComm, end_all, explain, guarded, no_cupy, status_of
from aiocomms_nccl.threads import Threads
from aiocomms_nccl.wire import Frame, NcclNote

HIGH_PRIORITY: Final = "high_priority_stream"
"""The hint that gives a communicator's streams high priority."""
_IN_PROGRESS: Final = 7
_PATIENCE: Final = 1.0
"""The maximum time of each wait during a close, in seconds.

A close waits for NCCL calls, and for the last sends to each rank.
"""
_NONE: Final = -1


class NcclTransport(LaneTransport):
    """The NCCL transport. NCCL runs collectives on a separate CUDA stream of the transport.

    The host matches sends with receives, and NCCL transfers the data.
    """

    capabilities = Capabilities(
        ops=(ops.P2P - {ops.Batch}) | ops.ARRIVALS | ops.COLLECTIVES | ops.BATCHES,
        devices=frozenset({"cuda"}),
        reductions=REDUCTIONS,
        rounds_each_step=HALVES,
        lanes=ops.COLLECTIVES | ops.BATCHES,
        detects_mismatch=os.environ.get("AIOCOMMS_DEBUG", "0") not in ("", "0"),
        spin=SPIN,
    )

    def __init__(
        self, cuda: Cuda, library: Nccl, control: Control, hellos: Sequence[NcclHello], cs: CommStream
    ) -> None:
        self.cuda: Cuda = cuda
        self.library = library
        self.control = control
        self._comm_stream = cs
        self._hellos = list(hellos)
        self.rank, self.size = cs.rank, cs.size
        self._agreement = NcclAgreement(control, cs.rank, self.capabilities.detects_mismatch, self.lose)
        self._matcher = self._agreement.matcher = Matcher(self)
        self.closed_by = self._agreement.closed_by
        self._ends: dict[int, Any] = {}  # the ends of running collectives, by number
        self._captured_ends: WeakKeyDictionary[Completion, Event] = WeakKeyDictionary()
        self._captured: list[object] = []  # objects that a capture uses, until the capture has ended
        self._held: deque[tuple[CallPlan, ops.Op, Completion, Any]] | None = None  # held by a split
        self._threads = Threads(control.wake)
        self._failure: CommError | None = None
        self._ending = threading.RLock()
        self.aborted = False
        self.launcher = make_launcher(self, control, self.capabilities.spin)
        self.capabilities = msgspec.structs.replace(self.capabilities, spin=self.launcher.spin)
        self.launcher.adopt(cs)
        self._lanes = self._agreement.lanes = LaneLog(self)

    # --------------------------------------------------------------------------------------------------- opening

    @classmethod
    def layers(cls, device: torch.device) -> tuple[Cuda, Nccl]:
        """Return the objects through which the transport calls CUDA and NCCL."""
        # By default the first call of each algorithm connects, which would block the loop until all ranks call it.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        return TorchCuda(device), CupyNccl()

    @classmethod
    def gpu(cls, device: torch.device) -> str:
        """Return the identifier of a GPU, unique among all GPUs."""
        return str(torch.cuda.get_device_properties(device).uuid)

    @classmethod
    def probe(cls, device: torch.device) -> str | None:
        """See :meth:`Transport.probe`."""
        return no_cupy() or no_gpu(device)

    @classmethod
    def preference(cls, device: torch.device, size: int, family: ops.Family) -> int:
        """See :meth:`Transport.preference`.

        NCCL has a high priority for collectives, and a low priority for messages.
        """
        if device.type not in cls.capabilities.devices:
            return 0
        return 100 if family == "collectives" else 10

    @classmethod
    async def open(cls, rendezvous: Rendezvous, options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.open`. Hint ``"high_priority_stream"``: run on streams of high priority."""
        cuda, library, mine = await rendezvous.run("opening CUDA and NCCL", lambda: cls._look(rendezvous.device))
        hellos = await bringup.exchange_hellos(rendezvous, mine)
        sockets, unique_id = await bringup.connect(rendezvous, hellos, library)
        form = functools.partial(library.communicator, rendezvous.size, unique_id, rendezvous.rank)
        return await cls._finish(cuda, library, rendezvous, hellos, sockets, form, bool(options.get(HIGH_PRIORITY)))

    @classmethod
    def _look(cls, device: torch.device) -> tuple[Cuda, Nccl, NcclHello]:
        """Load the objects that call CUDA and NCCL.

        Return these objects, and the hello of this rank. This method blocks.

        A hello is the first record that a rank sends to the other ranks.
        """
        cuda, library = cls.layers(device)
        load_launcher(cuda, library)
        return cuda, library, bringup.hello(cls.gpu(device), library)

    async def split(self, rendezvous: Rendezvous, ranks: Sequence[int], options: Mapping[str, Any]) -> Self:
        """See :meth:`Transport.split`. This method calls ``ncclCommSplit``."""
        hellos = [self._hellos[rank] for rank in ranks]
        with self._splitting(ranks[0], rendezvous.rank) as split:
            sockets, _ = await bringup.connect(rendezvous, hellos, None)
            high = bool(options.get(HIGH_PRIORITY))
            return await self._finish(self.cuda, self.library, rendezvous, hellos, sockets, split, high)

    async def split_nobody(self, rendezvous: Rendezvous) -> None:
        """See :meth:`Transport.split_nobody`. Every rank must call ``ncclCommSplit``."""
        with self._splitting(_NONE, 0) as split:
            call = functools.partial(guarded, self.cuda, self.library, "split", split)
            await rendezvous.run("splitting NCCL's communicator", call)

    @classmethod
    async def _finish(
        cls,
        cuda: Cuda,
        library: Nccl,
        rendezvous: Rendezvous,
        hellos: Sequence[NcclHello],
        sockets: Mapping[int, Any],
        form: Callable[[], NcclComm],
        high: bool,
    ) -> Self:
        """Form NCCL's communicator in a thread. If the call of NCCL never returns, the thread never ends."""
        control = Control(sockets)
        what = "forming NCCL's communicator"
        call = functools.partial(open_comm_stream, cuda, library, form, rendezvous, high)
        try:
            comm_stream = await rendezvous.run(what, functools.partial(guarded, cuda, library, what, call))
            return cls(cuda, library, control, hellos, comm_stream)
        except BaseException:
            control.close(_PATIENCE)
            raise

    @contextlib.contextmanager
    def _splitting(self, color: int, key: int) -> Iterator[Callable[[], Any]]:
        """Delay the communicator's collectives during its split. Yield a function that does the split.

        The caller runs this function in another thread. If the split fails, the communicator is lost, and the delayed
        collectives are never launched, because the other thread may still be in its NCCL call.
        """
        self._held, quiet = deque(), self.launcher.quiet(self._comm_stream)

        def split() -> Any:
            quiet()  # ncclCommSplit requires that no operation is outstanding
            return self._comm_stream.comm.commSplit(color, key)

        try:
            yield split
        except StoreLostError:  # the thread has not begun, and the communicator stays usable
            self._post_held()
            raise
        self._post_held()

    def _post_held(self) -> None:
        held, self._held = self._held or deque(), None
        for plan, op, work, after in held:
            self._launch(plan, op, work, after)

    # ----------------------------------------------------------------------------------------------------- posting

    def post(self, op: ops.Op, work: Completion) -> None:
        """See :meth:`Transport.post`."""
        captured = self._capturing()
        if isinstance(op, (ops.Send, ops.Recv, ops.Probe)):
            self._start(functools.partial(self._matcher.post, op, work), captured)
        elif type(op) in START:
            self._start(functools.partial(self._collective, op, work, captured), captured)

    def _start(self, start: Callable[[], object], captured: bool) -> None:
        if self._failure is not None or self.aborted:
            self.on_failure(self._failure or CommAbortedError("the communicator is lost"))
            return  # NCCL must not be called again, and the communicator ends the work
        try:
            start()
        except RuntimeError as error:
            if captured or "CUDA" not in str(error):
                raise  # a broken capture does not lose the communicator
            self.lose_cuda(error)

    def post_in_lane(self, op: ops.Op, lane: int, work: Completion) -> None:
        """See :meth:`LaneTransport.post_in_lane`."""
        self._start(functools.partial(self._lanes.post, op, lane, work), self._capturing())

    def give_up_lane(self, lane: int, error: CommError) -> None:
        """See :meth:`LaneTransport.give_up_lane`."""
        if not self.aborted:
            self._lanes.give_up(lane, error)

    def forget_lane(self, lane: int, rank: int) -> None:
        """See :meth:`LaneTransport.forget_lane`.

        This does nothing, because the sequencer waits for that rank's frame.
        """

    def plan(self, op: ops.Op) -> CallPlan:
        """Plan a collective.

        :raises CommError: the collective needs GPU memory, but no GPU memory is free.
        """
        try:
            return START[type(op)](self._comm_stream, op)
        except torch.OutOfMemoryError as error:
            raise no_memory(op.name, error) from error

    def _collective(self, op: ops.Op, work: Completion, captured: bool) -> None:
        if captured:
            self._check_capture()
            self._capture(op, work)
            return
        if self._captured:
            if self.cuda.capturing(self._comm_stream.stream):
                raise UnsupportedOperation(
                    "the communicator's stream is being captured, from another stream than the current one: "
                    "end the capture first, or call the op on a stream of the capture"
                )
            self._captured.clear()  # the graph keeps its own memory, and the program keeps the rest
        plan = self.plan(op)
        if self._held is not None:
            self._held.append((plan, op, work, self.launcher.mark()))
        else:
            self._launch(plan, op, work, self.launcher.mark())

    def _check_capture(self) -> None:
        if self._held is not None:
            raise UnsupportedOperation("the communicator is being split; capture afterwards")
        if not self.cuda.capturing(self.cuda.current_stream()):
            raise UnsupportedOperation(
                "the stream that is being captured is of another device than the communicator's, "
                f"cuda:{self.cuda.index}: capture on a stream of that device"
            )

    def _capture(self, op: ops.Op, work: Completion) -> None:
        """Enqueue a collective from this thread, so that the current capture includes the collective."""
        comm_stream = self._comm_stream
        self.launcher.settle()  # the capture must not include earlier collectives
        after, end = self.cuda.event(), self.cuda.event()  # the graph owns these events
        after.record(self.cuda.current_stream())
        comm_stream.stream.wait_event(after)
        plan = self.plan(op)  # the capture includes the stream now, so temporary memory is of the graph's pool
        if not self.call_nccl(op.name, functools.partial(comm_stream.carry_out, plan)):
            return
        end.record(comm_stream.stream)
        self._captured.append((op, after, end, plan))
        self._captured_ends[work] = end
        self._agreement.call(op, None)
        work.fail(CapturedWorkError(CAPTURED))

    def _launch(self, plan: CallPlan, op: ops.Op, work: Completion, after: Any) -> None:
        index = self._agreement.call(op, work)
        finish = functools.partial(self._finish_collective, op, index)
        end = self.launcher.launch(self._comm_stream, op.name, plan, after, finish)
        if end is not None:
            self._ends[index] = end

    def _finish_collective(self, op: ops.Op, index: int) -> None:
        """Record that the GPU has finished a collective. Until this call, ``op`` keeps the tensors alive."""
        self._ends.pop(index, None)
        if not self.aborted:  # after an abort, the event may have fired because NCCL has stopped
            self._agreement.data_moved(index)

    def wait_stream(self, work: Completion, stream: Any) -> None:
        """See :meth:`Transport.wait_stream`."""
        index = self._agreement.number_of(work)
        end = self._captured_ends.get(work) if index is None else self._ends.get(index)
        if stream is not None:
            check_stream(self.cuda, stream)
        if index is None and end is None:
            end = self._lanes.end_of(work)
        if end is not None:
            self.launcher.wait_stream(end, stream)
        elif not work.done() and index is None:
            raise UnsupportedOperation(
                "wait_stream() orders a CUDA stream; this op begins once others have called it: await the work instead"
            )

    # --------------------------------------------------------------------------------------------------- progress

    def caller_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """See :meth:`Transport.caller_stream`."""
        self._matcher.check_not_captured()
        return functools.partial(self.cuda.on, self.cuda.current_stream())

    def progress(self) -> bool:
        """See :meth:`Transport.progress`. This method does nothing while the current stream is being captured."""
        if self._capturing():
            return len(self.launcher) > 0  # True makes the loop ask again, because no event ends a capture
        frames = self.control.poll()
        did = self._poll_events() or bool(frames)  # events come first: an op that ended before an abort completes
        try:
            return self._go_on(frames) or did
        except RuntimeError as error:  # a launch has failed
            if "CUDA" not in str(error):
                raise
            self.lose_cuda(error)
            return True

    def _go_on(self, frames: Sequence[tuple[int, Frame | ProtocolError | None]]) -> bool:
        """Handle frames and the outcomes of threads. Return whether this call has handled the outcome of a thread."""
        did = False
        self._agreement.handle(frames, self.on_note)
        if not self.aborted:
            self._lanes.turn(bool(frames))
        with self._ending:  # an abort must include communicators that are formed here
            while self._threads.returned and not self.aborted:  # _end() handles outcomes after an abort
                did = True
                self._conclude_call(*self._threads.returned.popleft())
        return did

    def _capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        try:
            return self.cuda.capturing()
        except RuntimeError as error:
            self.lose_cuda(error)
            return False

    def _poll_events(self) -> bool:
        """Poll the launcher for ops that are done. If ops still run, also check NCCL for asynchronous errors.

        :returns: whether the loop should call :meth:`progress` again soon.
        """
        if not len(self.launcher):
            return False
        try:
            did = self.launcher.poll()
        except RuntimeError as error:
            if isinstance(self._failure, CudaBrokenError):
                return False  # no event fires any more, so polls are of no use
            self.lose_cuda(error)
            return True
        if len(self.launcher) and not self.aborted:
            for comm_stream in self._comm_streams(busy=True):
                self.call_nccl("what is under way", comm_stream.comm.check_async_error)
            if self.launcher.parked and self._agreement.pending:
                self._agreement.tell_soon()
        # Until threads sleep on the events, only this result makes the loop ask again: a launch may have no frame.
        return did or (self.launcher.spin > 0 and len(self.launcher) > 0 and not self.launcher.parked)

    def fileno(self) -> int | None:
        """See :meth:`Transport.fileno`."""
        return self.control.fileno()

    def try_cancel(self, work: Completion) -> bool:
        """See :meth:`Transport.try_cancel`."""
        return self._matcher.withdraw(work)

    def waiting_for(self, work: Completion) -> Sequence[int]:
        """See :meth:`Transport.waiting_for`."""
        if isinstance(op := work.op, ops.Recv):
            return [op.src]
        if isinstance(op, ops.Send):
            return [op.dst]
        found = self._lanes.waiting_for(work)
        return self._agreement.waiting_for(work) if found is None else found

    def say(self, rank: int, note: bytes) -> bool:
        """See :meth:`Transport.say`. The other rank receives the note in its loop's next turn."""
        self.control.send(rank, NcclNote(note))
        return not self.aborted

    def lose_cuda(self, error: RuntimeError) -> None:
        """Mark the communicator as lost. After a kernel has failed, every CUDA call raises an error of torch."""
        self.lose(CudaBrokenError(f"CUDA has failed, and this process must end: {str(error).partition(chr(10))[0]}"))

    def lose(self, error: CommError) -> None:
        """Mark the communicator as lost."""
        self._failure = self._failure or error
        self.on_failure(self._failure)

    def call_nccl(self, what: str, call: Callable[[], object]) -> bool:
        """Call NCCL. Return True on success.

        Return False if the call failed, or if NCCL was aborted before the call. In both cases, the communicator is
        lost.
        """
        with self._ending:  # NCCL must not be aborted while it is called
            if self.aborted:
                return False
            try:
                call()
            except self.library.errors as error:
                if status_of(error) == _IN_PROGRESS:
                    return True  # a non-blocking communicator has enqueued the call
                failure = explain(what, error)
            else:
                return True
        self.lose(failure)
        return False

    # ------------------------------------------------------------------------------------------- threads, and the end

    def comm_stream(self, comm: NcclComm, rank: int, size: int) -> CommStream:
        """Return a communicator with a stream that has the same options as this transport's stream."""
        return self._comm_stream.like(comm, rank, size)

    def spawn(self, call: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Run ``call`` in a thread, and then call ``then`` with the result on the loop's thread.

        If ``call`` raises an error, the transport's communicator is lost.
        """
        what = "forming a communicator for messages or lanes"
        self._threads.spawn(functools.partial(guarded, self.cuda, self.library, what, call), then)

    def _conclude_call(self, then: Callable[[Any], object], outcome: Any, failure: BaseException | None) -> None:
        if failure is None:
            then(outcome)
        else:
            error = failure if isinstance(failure, CommError) else CommError(f"NCCL could not be used: {failure!r}")
            self.lose(error)

    def end(self, comm_stream: CommStream) -> None:
        """Start a thread that aborts the communicator of a direction."""
        with self._ending:
            if not self.aborted:
                self.launcher.cut(comm_stream)
                self._end_all([comm_stream], abort=True)

    def _end_all(self, comm_streams: Sequence[CommStream], abort: bool) -> None:
        calls = [functools.partial(end_comm, self.launcher, it, abort, _PATIENCE) for it in comm_streams]
        self._threads.adopt(end_all(self.cuda, calls))

    def abort(self, error: CommError) -> None:
        """See :meth:`Transport.abort`. Threads abort NCCL, because NCCL's abort waits until its kernels end."""
        with self._ending:
            if not self.aborted:
                self.aborted = True
                self.launcher.cut()
                self._agreement.send_abort(error)
                self._end_all(self._comm_streams(), abort=True)

    def _comm_streams(self, *, busy: bool = False) -> list[CommStream]:
        """Return all communicators. If ``busy`` is true, leave out lane communicators without a running collective."""
        return [self._comm_stream, *self._lanes.comm_streams(busy=busy), *self._matcher.comm_streams()]

    async def aclose(self) -> None:
        """See :meth:`Transport.aclose`."""
        await run_in_thread(self._end)
        self._threads.returned.clear()
        self._captured.clear()
        self._lanes.clear()

    def _end(self) -> None:
        """Close the transport. This method blocks, so it runs in a thread.

        If a thread of the transport does not end in time, the thread continues and keeps its tensors alive.
        """
        with self._ending:
            if not self.aborted:
                self._agreement.send_bye()
                self._end_all(self._comm_streams(), abort=False)
        self.control.close(_PATIENCE)
        self._threads.join(_PATIENCE)
        if self._matcher.release(CommClosedError("the communicator was closed on this rank")):
            self._threads.join(_PATIENCE)
        if not isinstance(self._failure, CudaBrokenError):
            self.cuda.activate()
            with self.cuda.harmless():
                self._drop_late()
        self.launcher.close()

    def _drop_late(self) -> None:
        """Abort the communicators that threads formed after the close or the abort of the transport had begun.

        If the transport was aborted, also wait until all running ops have ended.
        """
        for late in self._threads.returned:
            for comm_stream in late.value or ():  # a late communicator carries no messages
                comm_stream.comm.abort()
        if self.aborted:
            self.launcher.drain()
