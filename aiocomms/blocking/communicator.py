"""Communicators for synchronous programs. Their methods block, and their event loop runs in a separate thread."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

from aiocomms.blocking.loop_thread import LoopThread, Use, blocking
from aiocomms.communicator import communicator, opening
from aiocomms.communicator.portal.portal import Portal


class Communicator(Portal):
    """A communicator whose methods block: one rank's handle on a fixed, ordered group of ranks.

    The function :func:`new_comm` makes the communicator. Any thread may use the communicator. The thread of the event
    loop calls the hooks that the program registers.
    """

    def __init__(self, comm: communicator.Communicator, thread: LoopThread) -> None:
        super().__init__(comm)
        comm._guard.opened("use `with`, or call its close()")
        self._use = Use(thread)

    def __repr__(self) -> str:
        return repr(self._comm)

    def close(self) -> None:
        """Close the communicator: let pending ops end, cancel unmatched receives, and release all resources.

        Idempotent: a second caller waits until the first call has ended. Pending ops have up to 5 seconds to end.

        :raises RuntimeError: the caller runs on the event loop's thread, for example in a hook.
        :raises CommError: a transport failed to close. The call has released all other resources.
        """
        with self._use.ending(self._door):
            super().close()

    def reconfigure(
        self, ranks: Sequence[int] | None = None, *, size: int | None = None, timeout: float | timedelta = 10.0
    ) -> Self:
        """Form a new communicator that replaces this communicator, and then close this communicator.

        See :meth:`aiocomms.Communicator.reconfigure`.
        """
        new = super().reconfigure(ranks, size=size, timeout=timeout)
        self._use.leave()
        return new

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)  # The peers may wait for ops that this rank will never call.
        self.close()

    def _of(self, comm: Any) -> Self:
        thread = self._use.thread
        if thread is None:  # Another thread has closed this communicator since the call, and the loop has ended.
            raise self._door.refusal()
        return type(self)(comm, thread)


new_comm: Final = blocking(
    opening.new_comm,
    Communicator,
    "Form a communicator with the other ranks, in a thread of its own; collective. ``with`` closes it.",
)
from_process_group: Final = blocking(
    opening.from_process_group,
    Communicator,
    "Form a communicator over a ``torch.distributed`` process group; collective.",
)
