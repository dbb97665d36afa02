"""The contract of a transport with native code that starts plain ops, and the parts of the core that this code uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from aiocomms.transport.contract import Transport


class Line(Protocol):
    """The part of a communicator that :class:`Shortcuts` use, on the loop's thread."""

    thread: int
    """The loop's thread, by :func:`threading.get_ident`."""

    @property
    def given_up(self) -> dict[int, Any]:
        """The aborted lanes, by number."""

    @property
    def pre_hooks(self) -> list[Any]:
        """The hooks that are called before an op."""

    @property
    def post_hooks(self) -> list[Any]:
        """The hooks that are called when an op has ended."""

    def ended_at_once(self, work: Any) -> None:
        """Handle a work that has ended before its call returned, while post-hooks are registered.

        The work's ``called`` is the time at which the op was called, by :func:`time.monotonic`.
        """


class Ring(Protocol):
    """A container of the last entries that were appended, such as a :class:`collections.deque` with a ``maxlen``."""

    def append(self, entry: Any, /) -> None:
        """Add an entry. A full ring drops its oldest entry."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all entries, oldest first."""


class Ledger(Protocol):
    """The counts and the records of a communicator's ops, on the loop's thread.

    :class:`PlainLedger` implements this protocol in Python.
    """

    refusing: bool
    """True while the communicator refuses ops. Each op checks this flag, and no other, before it starts."""
    posting: bool
    """True between the number and the record of an op of the loop's thread. No other thread numbers ops then."""
    recording: bool
    """True while the rings record. A benchmark changes this to measure the cost of recording."""
    calls: int
    """The number of collectives called outside lanes, the same on all ranks."""

    @property
    def issued(self) -> int:
        """The number of ops called."""

    @property
    def laned(self) -> int:
        """The number of ops that were called in lanes."""

    @property
    def ring(self) -> Ring:
        """The ring that records ops: an op's type when the op is called, and the time when the op has ended."""

    @property
    def lanes(self) -> Ring:
        """The ring that records ops of lanes: the number of each op, and its lane's key as text."""

    def begin(self, kind: type[Any], counted: bool, lane: str | None, /) -> int:
        """Give an op its number and record the op, in one step: no other thread sees the number without the record.

        The call sets :attr:`posting`, and the caller resets this flag.

        :param kind: the type of the op's record.
        :param counted: whether the op is a collective outside lanes.
        :param lane: the key of the op's lane, as text; None: the op is in no lane.
        :returns: the op's number.
        """

    def end(self, entry: Any, /) -> None:
        """Record the end of an op. The entry is the time of the end, or a row of the flight recorder."""


class PlainLedger:
    """The ledger of a communicator without native shortcuts."""

    __slots__ = ("calls", "end", "issued", "laned", "lanes", "posting", "refusing", "ring")

    def __init__(self, entries: int) -> None:
        """Begin to count from 0.

        :param entries: the number of entries that the ring keeps, two for each op.
        """
        self.issued: int = 0
        self.laned: int = 0
        self.calls: int = 0
        self.refusing: bool = False
        self.posting: bool = False
        self.ring: Ring = deque(maxlen=entries)
        self.lanes: Ring = deque(maxlen=entries // 2)
        self.end: Callable[[Any], None] = self.ring.append

    @property
    def recording(self) -> bool:
        """See :attr:`Ledger.recording`."""
        return self.end is not _forget

    @recording.setter
    def recording(self, whether: bool) -> None:
        self.end = self.ring.append if whether else _forget

    def begin(self, kind: type[Any], counted: bool, lane: str | None, /) -> int:
        """See :meth:`Ledger.begin`."""
        self.posting, seq = True, self.issued
        if lane is not None:
            self.lanes.append((seq, lane))
            self.laned += 1
        self.issued = seq + 1
        self.calls += counted
        self.end(kind)
        return seq


def _forget(_entry: Any) -> None:
    """Record nothing."""


class Shortcuts(Ledger, Protocol):
    """Native code that starts each plain op of one communicator in one call, and counts and records all ops.

    A plain op has only plain tensors, operators and numbers, and neither hints nor a deadline of its own. A plain op is
    called on the loop's thread, while no pre-hooks are registered and the communicator does not refuse ops.
    :meth:`post` starts plain ops on other threads, if no post-hooks are registered either. The native call of a plain
    op does the work of the core and of :meth:`aiocomms.transport.Transport.post`. For any other op, the native call has
    no effect, and the Python method runs. Python code makes all other decisions, and raises all errors.
    """

    @staticmethod
    def fields() -> type[Any]:
        """Return the native base class of all classes of works, with the fields of works.

        Only native code creates instances of this class. Each instance creates its op's record at the first access.
        """

    def use(self, work: type[Any], lane_work: type[Any], part: type[Any], op_result: object, /) -> None:
        """Set the classes of works, which inherit the class from :meth:`fields`. Call this before any other method.

        :param lane_work: the class for ops of lanes.
        :param part: the class of completions for pending messages of a lane. Python code sets the fields of these
            completions.
        :param op_result: the value that stands for the op's own result.
        """

    def know(self, lane: type[Any]) -> None:
        """Start ops of lanes, too, from now on.

        :param lane: the class of lanes, which keeps ``_shortcuts``, ``_known`` and ``_closed`` in slots.
        """

    def follow(self, current: ContextVar[Any]) -> None:
        """Start all later ops of the communicator on its current lane.

        :param current: the context variable, which holds None, or a tuple of the current lane and the previous value.
        """

    def elsewhere(self, lane: int | None) -> int:
        """Return the number of ops that other threads are posting, and that the core has not registered yet.

        :param lane: the number of a lane, to count only its ops; None: count all ops.
        """

    def post(self, target: Any, op: Any, keeper: Any, /) -> Any:
        """Start a plain op on a thread that is not the loop's thread, after the earlier ops of that thread.

        For a pending op, native code sets ``keeper._posted_as`` to ``(on, work, look_after, index)`` and calls
        ``keeper._kept()`` on that thread before it reports the op's end. That call registers the op, and lets the
        loop's thread call ``look_after(index)``. ``on`` is the target, or the lane that is current on the posting
        thread. An exception of ``keeper._kept()`` is raised here, and the op continues.

        :param target: the communicator or lane on which the op was called.
        :param op: the op's record, which has been checked.
        :returns: the op's work, done or pending; None if the call had no effect.
        """

    @staticmethod
    def method(of: type[Any], function: Callable[..., Any], /) -> Callable[..., Any]:
        """Return the replacement of a method in a class whose objects keep shortcuts or None in a slot ``_shortcuts``.

        :param function: the method, which runs for calls that are not plain. If there is no shortcut for the method's
            name, the method is returned unchanged.
        """

    def window(self, comm: Any, info: Any, /) -> object:
        """Return the value of the slot ``_shortcuts`` of a window that the transport of the shortcuts carries.

        :param comm: the communicator's handle.
        :param info: the window's record, which ops on the window use.
        """


class NativeTransport(Transport):
    """A transport that has native code for checks and for plain ops."""

    fast_check: Callable[[object, bool], bool] | None = None
    """A fast check of a tensor, called as ``fast_check(tensor, written)``; None: there is none.

    True: the tensor is dense, contiguous, of a known dtype and on the communicator's device. It has memory, and no lazy
    conjugate or negation. If the op writes the tensor, autograd does not track the tensor. False: the core checks the
    tensor in full. The check must not raise, because the caller of the op would get the exception.
    """

    def shortcuts(self, line: Line, entries: int) -> Shortcuts | None:
        """Return native code that starts plain ops of the communicator, or None if there is no such code.

        The core calls this once, before the first op, if the transport carries all messages and collectives. ``line``
        is the part of the communicator that the native code uses. ``entries`` is the size of the ring. If this raises,
        the communicator is not formed.
        """
        return None
