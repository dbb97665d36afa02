"""The execution of schedules (:mod:`aiocomms.lowering.schedules`).

A run posts the messages of a step, and continues when all of these messages are complete.

No task runs a schedule. The completion of a step's last message resumes the schedule. So if all messages of an op have
already arrived, the op completes during its start.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from aiocomms import ops
from aiocomms.errors import CommError, MessageTruncatedError, MismatchError, as_reason
from aiocomms.progress.inflight import StartedWork
from aiocomms.transport import OP_RESULT, Completion, conclude
from aiocomms.transport.native import Ledger

Steps = Generator[list[ops.Op], None, Any]


class Poster(Protocol):
    """The attributes and methods of a communicator that schedules use."""

    rank: int
    size: int
    name: str
    device: torch.device
    ledger: Ledger
    """The counts of the communicator's ops. The count of collectives is equal on all ranks, and is used as a tag."""

    def post(self, op: ops.Op, work: Completion) -> None:
        """Pass an op to the transport that executes the op."""

    def withdraw(self, work: Completion) -> bool:
        """Withdraw an unmatched receive; return False if a message has matched it."""

    def withdraw_all(self, of: str, which: Callable[[ops.Op], bool]) -> None:
        """See :meth:`aiocomms.core.posting.Posting.withdraw_all`."""

    def caller_stream(self) -> Callable[[], AbstractContextManager[object]] | None:
        """See :meth:`Transport.caller_stream`."""

    def offload(self, op: Offload, work: Completion) -> None:
        """Make a schedule's blocking call in a thread. Then end ``work`` on the event loop's thread."""

    def lose(self, error: CommError) -> None:
        """End the communicator, because the other ranks cannot know which messages of this rank are still missing."""


class Offload(ops.Op, frozen=True, eq=False):
    """A blocking call that a schedule yields in place of a message. A thread makes this call."""

    name = kind = "offload"
    call: Callable[[], object]


class AloneError(Exception):
    """The error that a schedule raises after its last message if the op fails on this rank only."""

    def __init__(self, error: CommError) -> None:
        super().__init__(str(error))
        self.error = error


class Run:
    """The run of one schedule from step to step."""

    __slots__ = ("__weakref__", "_comm", "_left", "_only", "_parts", "_posted", "_steps", "_stopped", "_stream", "work")

    def __init__(self, comm: Poster, steps: Steps, work: Completion) -> None:
        self._comm = comm
        self._stream = comm.caller_stream()  # This call may raise, so it comes first.
        self._steps = steps
        self._left = 0
        self._posted = False  # This is True once a message was posted.
        self._only: RunPart | None = None  # This is the first step's only message, until it is complete.
        self._parts: Sequence[weakref.ref[RunPart]] = ()  # The transport keeps the step's messages alive.
        self._stopped: CommError | None = None
        self.work: Completion = work

    def advance(self) -> None:
        """Continue on the caller's CUDA stream.

        The GPU work of the steps then runs after work that the caller has enqueued.
        """
        if self._stream is None:
            self._advance()
        else:
            with self._stream():
                self._advance()

    def _advance(self) -> None:
        """Post the next step, and further steps while each step completes at once.

        If an error occurs before the first message is sent, only the op fails. A later error also ends the
        communicator, because the other ranks have begun an op that this rank cannot finish.
        """
        while not self.work.done():
            try:
                step = next(self._steps)
            except StopIteration as end:
                self.work.complete(OP_RESULT if end.value is None else end.value)
                return
            except AloneError as alone:
                self.work.fail(alone.error)
                return
            except CommError as error:
                self._give_up(error)
                return
            except Exception as error:
                self._break_off(error)
                return
            # The count is one too high, so that parts which complete inside post do not call advance.
            self._left = len(step) + 1
            parts = [RunPart(self, op) for op in step]
            self._only = parts[0] if len(parts) == 1 and not self._posted else None
            if not self._post(parts):
                return
            self._left -= 1
            if self._left:
                return
            if self._stopped is not None:
                self._end_stopped()
                return
            self._parts = ()

    def adopt(self, part: RunPart) -> None:
        """Continue after the first step.

        Native code has already posted the only message of the first step to the transport.

        :param part: the object through which the transport completes this message.
        """
        (op,) = next(self._steps)
        part.__init__(self, op)  # type: ignore[misc]
        self._left, self._posted, self._only, self._parts = 1, True, part, [weakref.ref(part)]

    def _post(self, parts: Sequence[RunPart]) -> bool:
        """Post the messages of a step.

        If a post fails after another message was posted, end the op and the communicator, and return False.
        """
        self._parts = [weakref.ref(part) for part in parts]
        for part in parts:
            if self._stopped is not None:  # The post of another part has stopped this run.
                part.ended = True
                self._left -= 1
                continue
            try:
                self._comm.post(part.op, part)
            except Exception as error:
                self._break_off(error)
                return False
            except BaseException as error:  # A signal handler has raised this, perhaps after the transport's post.
                self._posted = True
                self._break_off(error)
                raise
            self._posted = self._posted or type(part.op) is not Offload  # No other rank knows of an offload.
        return True

    def _break_off(self, error: BaseException) -> None:
        """Handle an error after which an op cannot continue.

        If no message was posted, raise ``error``. If a message was posted, end the op and the communicator.
        """
        self._steps.close()
        self._parts = ()
        if not self._posted:
            raise error
        why = error.message if isinstance(error, CommError) else as_reason(error)
        failure = CommError(f"the operation failed on this rank: {why}")
        failure.__cause__ = error
        self._give_up(failure)

    def _give_up(self, error: CommError) -> None:
        """End the op.

        If a message was posted, also end the communicator, because other ranks may wait for missing messages.
        """
        conclude(self.work, error)
        if self._posted:
            self._comm.lose(error.about(op=self.work.op.name, rank=self._comm.rank))

    def part_done(self) -> None:
        """Record that one message of the current step is complete. After the last message, advance to the next step."""
        self._only = None
        self._left -= 1
        if not self._left:
            self._parts = ()
            if self._stopped is None:
                self.advance()
            else:
                self._end_stopped()

    def part_failed(self, error: CommError) -> None:
        """End the op, because a message of the current step has failed."""
        if self._stopped is not None:
            self.part_done()
            return
        self._steps.close()
        self._parts = ()
        if self.work.done():
            return
        if self.work.op.family != "collectives":
            self.work.fail(error)
            return
        if isinstance(error, MessageTruncatedError):
            error = MismatchError(f"ranks disagree on the size of this collective: {error.message}", peer=error.peer)
        self._give_up(error)

    def stop(self, error: CommError) -> None:
        """Take no further step, and end the op with ``error`` once the transport no longer uses the op's tensors."""
        if self.work.done() or self._stopped is not None:
            return
        self._steps.close()
        self._stopped = error
        self._withdraw_parts()
        if not self._left:
            self._end_stopped()

    def _end_stopped(self) -> None:
        self._parts = ()
        assert self._stopped is not None
        cast("StartedWork[Any]", self.work).abandon(self._stopped)

    def _withdraw_parts(self) -> None:
        for part in self.unfinished():
            if part.op.withdrawable and self._comm.withdraw(part):
                part.ended = True
                self._left -= 1

    def unfinished(self) -> list[RunPart]:
        """Return the pending messages or collectives of the current step. Thread-safe."""
        return [part for ref in self._parts if (part := ref()) is not None and not part.ended]

    def waits_for(self) -> list[int]:
        """Return the ranks with which messages are pending. Thread-safe."""
        late = [part.op for part in self.unfinished()]
        senders = {op.src for op in late if isinstance(op, ops.Recv)}
        return sorted(senders or {op.dst for op in late if isinstance(op, ops.Send)})

    def unfinished_sends(self) -> list[ops.Send]:
        """Return the sends of the current step that may still be unmatched."""
        return [part.op for part in self.unfinished() if isinstance(part.op, ops.Send)]

    def withdraw(self) -> bool:
        """Withdraw the op if its only posted message is an unmatched receive. Otherwise, return False."""
        if self._only is None or not self._only.op.withdrawable or not self._comm.withdraw(self._only):
            return False
        self._steps.close()
        return True


class BatchRun(Run):
    """The run of a batch. If a message fails, the batch ends with an error when its other messages have ended.

    After a :class:`MismatchError`, the batch ends at once.
    """

    __slots__ = ("_all_posted", "_fault")

    def advance(self) -> None:
        """Post all parts of the batch."""
        self._fault: CommError | None = None
        self._all_posted = False
        parts = [RunPart(self, op) for op in next(self._steps)]
        self._left = len(parts) + 1
        if not self._post(parts):
            return
        self._all_posted = True
        if self._fault is not None:
            self._withdraw_parts()
        self.part_done()

    def part_done(self) -> None:
        """Record that one message is complete, and end the batch after the last message."""
        self._left -= 1
        if not self._left:
            self._parts = ()
            if self._stopped is not None:
                self._end_stopped()
            else:
                conclude(self.work, OP_RESULT if self._fault is None else self._fault)

    def part_failed(self, error: CommError) -> None:
        """Record that one message has failed.

        Withdraw the batch's unmatched receives, so that these receives do not take later messages.
        """
        if isinstance(error, MismatchError):
            conclude(self.work, error)  # The communicator is lost, and the other messages may never end.
        elif self._fault is None:
            self._fault = error
            if self._all_posted:
                self._withdraw_parts()
        self.part_done()


class RunPart:
    """The object through which the transport completes one message of a schedule."""

    __slots__ = ("__weakref__", "_run", "ended", "op")

    def __init__(self, run: Run, op: ops.Op) -> None:
        self._run = run
        self.ended: bool = False  # This is True once the transport has finished the message.
        self.op: ops.Op = op

    @property
    def hints(self) -> Mapping[str, Any] | None:
        """See :attr:`aiocomms.transport.Completion.hints`."""
        return self._run.work.hints

    def done(self) -> bool:
        """See :meth:`aiocomms.transport.Completion.done`."""
        return self.ended or self._run.work.done()

    def complete(self, value: Any = OP_RESULT) -> None:
        """See :meth:`aiocomms.transport.Completion.complete`."""
        if self.ended:
            raise RuntimeError(f"the transport completed a {self.op.name} of {self._run.work!r} twice")
        self.ended = True
        self._run.part_done()

    def fail(self, error: CommError) -> None:
        """See :meth:`aiocomms.transport.Completion.fail`."""
        self.ended = True
        self._run.part_failed(error)
