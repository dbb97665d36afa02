"""The contract of a transport whose native code starts plain ops.

The protocols ``Line`` and ``Ring`` describe the parts of the core that the native code uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from aiocomms.transport.contract import Transport


class Line(Protocol):
    """The part of a communicator that :class:`Shortcuts` use on the loop's thread."""

    thread: int
    """The identifier of the loop's thread, as returned by :func:`threading.get_ident`."""

    @property
    def given_up(self) -> dict[int, Any]:
        """The aborted lanes. The keys are the lanes' numbers."""

    @property
    def pre_hooks(self) -> list[Any]:
        """The hooks that are called before an op."""

    @property
    def post_hooks(self) -> list[Any]:
        """The hooks that are called when an op has ended."""

    def ended_at_once(self, work: Any) -> None:
        """Handle the work of an op that has ended before the op's call returned, while post-hooks are registered.

        The work's ``called`` is the time at which the op was called, by :func:`time.monotonic`.
        """


class Ring(Protocol):
    """A container of the last entries that were appended, such as a :class:`collections.deque` with a ``maxlen``."""

    def append(self, entry: Any, /) -> None:
        """Add an entry. A full ring drops its oldest entry."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all entries, oldest first."""


class Ledger(Protocol):
    """The counts and the records of a communicator's ops.

    Python code calls the methods of a ledger on the loop's thread.

    :class:`PlainLedger` implements this protocol in Python.
    """

    refusing: bool
    """True while the communicator refuses ops. Before an op starts, it checks only this flag."""
    posting: bool
    """True while the loop's thread has given an op its number and has not completed the op's record.

    During this time no other thread gives numbers to ops.
    """
    recording: bool
    """True while the rings record. A benchmark changes this flag to measure the cost of recording."""
    calls: int
    """The number of collectives that were called outside lanes. All ranks have the same number."""

    @property
    def issued(self) -> int:
        """The number of ops that were called."""

    @property
    def laned(self) -> int:
        """The number of ops that were called in lanes."""

    @property
    def ring(self) -> Ring:
        """The ring of the op records.

        At an op's call, the ring gets the op's type. At the op's end, the ring gets the time of the end.
        """

    @property
    def lanes(self) -> Ring:
        """The ring that records ops of lanes. For each op, the ring gets the op's number and the lane's key as text."""

    def begin(self, kind: type[Any], counted: bool, lane: str | None, /) -> int:
        """Give an op its number and record the op. No other thread sees the number without the record.

        The call sets :attr:`posting`, and the caller resets this flag.

        :param kind: the type of the op's record.
        :param counted: whether the op is a collective outside lanes.
        :param lane: the key of the op's lane, as text; None: the op is in no lane.
        :returns: the op's number.
        """

    def end(self, entry: Any, /) -> None:
        """Record the end of an op.

        :param entry: the time of the end, or a row of the flight recorder.
        """


class PlainLedger:
    """The ledger of a communicator without native shortcuts."""

    __slots__ = ("calls", "end", "issued", "laned", "lanes", "posting", "refusing", "ring")

    def __init__(self, entries: int) -> None:
        """Create a ledger whose counts are 0.

        :param entries: the number of entries that the ring keeps. Each op needs two entries.
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

    The arguments of a plain op are only plain tensors, operators and numbers. A plain op has no hints and no deadline
    of its own. While pre-hooks are registered or the communicator refuses ops, no op is plain. On the loop's thread,
    the native methods start plain ops. On other threads, :meth:`post` starts plain ops, but only while no post-hooks
    are registered. The native call of a plain op does the work of the core and of
    :meth:`aiocomms.transport.Transport.post`. For any other op, the native call has no effect, and the Python method
    runs. Python code makes all other decisions, and raises all errors.
    """

    @staticmethod
    def fields() -> type[Any]:
        """Return the native base class of all work classes. This class contains the fields of works.

        Only native code creates instances of this class. Each instance creates its op's record when the record is first
        accessed.
        """

    def use(self, work: type[Any], lane_work: type[Any], part: type[Any], op_result: object, /) -> None:
        """Set the classes of the works that native code creates. Call this method before any other method.

        The work classes are derived from the class that :meth:`fields` returns.

        :param lane_work: the class of the works of ops in lanes.
        :param part: the class of the objects that complete the pending messages of a lane. Python code sets the fields
            of these objects.
        :param op_result: the value which means that the work's result is the op's own result.
        """

    def know(self, lane: type[Any]) -> None:
        """Enable native calls for ops of lanes.

        :param lane: the class of lanes, which has the slots ``_shortcuts``, ``_known`` and ``_closed``.
        """

    def follow(self, current: ContextVar[Any]) -> None:
        """Start the op of each later call in the lane that is current at the time of that call.

        :param current: the context variable of the current lane. The variable's value is None, or a tuple of the
            current lane and the previous value of the variable.
        """

    def elsewhere(self, lane: int | None) -> int:
        """Return the number of ops that other threads are posting and that the core has not registered yet.

        :param lane: the number of a lane whose ops are counted; None: all ops are counted.
        """

    def post(self, target: Any, op: Any, keeper: Any, /) -> Any:
        """Start a plain op on a thread that is not the loop's thread. The op starts after the thread's earlier ops.

        If the op is pending, native code sets ``keeper._posted_as`` to ``(on, work, look_after, index)``. Then native
        code calls ``keeper._kept()`` on the posting thread, before it reports the op's end. ``keeper._kept()``
        registers the op, and requests that the loop's thread calls ``look_after(index)``. ``on`` is the target, or the
        lane that is current on the posting thread. If ``keeper._kept()`` raises an exception, this method raises the
        exception, and the op continues.

        :param target: the communicator or lane on which the op was called.
        :param op: the op's record, which has been checked.
        :param keeper: the object that keeps the op's work until the loop's thread has registered the op.
        :returns: the op's work, done or pending; None if the call had no effect.
        """

    @staticmethod
    def method(of: type[Any], function: Callable[..., Any], /) -> Callable[..., Any]:
        """Return a native method that replaces a Python method of a class.

        The class has a slot ``_shortcuts``, which contains shortcuts or None.

        :param function: the Python method. The native method calls the Python method for ops that are not plain. If
            native code has no shortcut with the method's name, ``function`` is returned unchanged.
        """

    def window(self, comm: Any, info: Any, /) -> object:
        """Return the object that a window on this transport stores in its slot ``_shortcuts``.

        :param comm: the communicator's handle.
        :param info: the window's record, which ops on the window use.
        """


class NativeTransport(Transport):
    """A transport that has native code for checks and for plain ops."""

    fast_check: Callable[[object, bool], bool] | None = None
    """A fast check of a tensor, called as ``fast_check(tensor, written)``, or None if the transport has no such check.

    The result True means that the tensor is dense, contiguous, of a known dtype and on the communicator's device. The
    result also means that the tensor has memory, and has no lazy conjugate or negation. If the op writes the tensor,
    True also means that autograd does not track the tensor. After the result False, the core checks the tensor in full.
    The check must not raise an exception, because the caller of the op would get the exception.
    """

    def shortcuts(self, line: Line, entries: int) -> Shortcuts | None:
        """Return native code that starts plain ops of the communicator, or None if the transport has no such code.

        The core calls this method once, before the first op, if the communicator uses this transport for all messages
        and collectives. If this method raises an exception, the communicator is not formed.

        :param line: the part of the communicator that the native code uses.
        :param entries: the number of entries of the ring.
        """
        return None
