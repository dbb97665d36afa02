"""The contract of a transport with native code that starts plain ops, and what that code needs of the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from aiocomms.transport.contract import Transport


class Line(Protocol):
    """The part of a communicator that :class:`Shortcuts` need; on the loop's thread."""

    thread: int
    """The loop's, as :func:`threading.get_ident` has it."""

    @property
    def given_up(self) -> dict[int, Any]:
        """The lanes that are refused, by their numbers."""

    @property
    def pre_hooks(self) -> list[Any]:
        """The hooks that are called before an op."""

    @property
    def post_hooks(self) -> list[Any]:
        """The hooks that are called when an op has ended."""

    def ended_at_once(self, work: Any) -> None:
        """Go on with a work that has ended within its call, where post-hooks are registered.

        Of such a work ``called`` is when it was called, by :func:`time.monotonic`.
        """


class Ring(Protocol):
    """The last of what was appended, as :class:`collections.deque` with a ``maxlen`` keeps it."""

    def append(self, entry: Any, /) -> None:
        """Add an entry, in place of the oldest where there is no room."""

    def __iter__(self) -> Iterator[Any]:
        """All entries, from the oldest on."""


class Ledger(Protocol):
    """The counts and the records of a communicator's ops, on the loop's thread; Python's is :class:`PlainLedger`."""

    refusing: bool
    """True while ops are refused: the one thing that an op which starts needs to know."""
    posting: bool
    """True while the loop's thread is between an op's number and its record: no other thread counts then."""
    recording: bool
    """True while the rings are appended to. A benchmark changes it, to measure what that costs."""
    calls: int
    """The number of collectives called, but those of lanes; all ranks call as many."""

    @property
    def issued(self) -> int:
        """The number of ops called."""

    @property
    def laned(self) -> int:
        """The number of these that are of lanes."""

    @property
    def ring(self) -> Ring:
        """The ring that records ops: their types when they are called, and the time when they have ended."""

    @property
    def lanes(self) -> Ring:
        """The ring that records ops of lanes: the number of each, and its lane's key in words."""

    def begin(self, kind: type[Any], counted: bool, lane: str | None, /) -> int:
        """Give an op its number and record it, in one step, so that no other thread sees one without the other.

        It sets :attr:`posting`, which its caller sets back.

        :param kind: the type of its record.
        :param counted: whether it is a collective that is of no lane.
        :param lane: the key of its lane, in words; None: it is of none.
        :returns: its number.
        """

    def end(self, entry: Any, /) -> None:
        """Record the end of an op: the time, or a row of the recorder's."""


class PlainLedger:
    """The ledger of a communicator whose ops Python starts."""

    __slots__ = ("calls", "end", "issued", "laned", "lanes", "posting", "refusing", "ring")

    def __init__(self, entries: int) -> None:
        """Count from 0.

        :param entries: how many the ring keeps, two for each op.
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
    """Native code that starts plain ops of one communicator in one call, and counts and records all of them.

    What is plain: plain tensors, operators and numbers, the loop's thread (but in :meth:`post`), no hints and no
    deadline of its own, no pre-hooks (and in :meth:`post` no post-hooks), and nothing that refuses ops. Such a call
    does at once what the core does of it, and :meth:`aiocomms.transport.Transport.post`. Of any other nothing has
    happened, and the Python method runs: Python decides everything else, and makes every error.
    """

    @staticmethod
    def fields() -> type[Any]:
        """Return the class that has the fields of works, which classes of works inherit.

        Native code alone makes its instances; each makes its op's record when somebody asks for it.
        """

    def use(self, work: type[Any], lane_work: type[Any], part: type[Any], op_result: object, *, windows: bool) -> None:
        """Set the classes of works, which inherit :meth:`fields`; called before any other method.

        :param lane_work: of ops of lanes.
        :param part: what the transport is told of a pending message of a lane, which Python fills.
        :param op_result: the value of a work whose result is its op's.
        :param windows: whether this transport carries the communicator's windows, too.
        """

    def know(self, lane: type[Any]) -> None:
        """Start ops of lanes, too: of this class, which keeps ``_shortcuts``, ``_known`` and ``_closed`` in slots."""

    def follow(self, current: ContextVar[Any]) -> None:
        """Start the communicator's ops on its current lane from now on.

        :param current: None, or a tuple of a lane and what was current before.
        """

    @property
    def elsewhere(self) -> int:
        """The number of other threads' ops that are being posted, and are not in flight yet."""

    def elsewhere_in(self, lane: int) -> bool:
        """Return whether one of them is of a lane, by its number."""

    def post(self, target: Any, op: Any, keeper: Any, /) -> Any:
        """Start a plain op on another thread than the loop's, after that thread's earlier ones.

        Of one that is pending ``keeper._posted_as`` is set to ``(on, work, look_after, index)`` and ``keeper._kept()``
        called on that thread, before its end is told: to keep it, and to have ``look_after(index)`` called on the
        loop's thread. ``on`` is the target, or the lane that is current there. What that call raises is raised, and the
        op goes on.

        :param target: the communicator or lane that it was called on.
        :param op: its record, which has been checked.
        :returns: its work, done or pending; None: nothing has happened.
        """

    @staticmethod
    def method(of: type[Any], function: Callable[..., Any], /) -> Callable[..., Any]:
        """Return the replacement of a method, in a class whose objects keep shortcuts in ``_shortcuts``, or None.

        :param function: the method, which is called for whatever is not plain. It is returned itself where there is no
            shortcut for a method of its name.
        """

    def window(self, comm: Any, info: Any, /) -> object | None:
        """Return what a window of the communicator keeps in its slot ``_shortcuts``; None: windows have none.

        :param comm: the communicator's handle.
        :param info: the window, as the records of ops on it see it.
        """

    @staticmethod
    def window_method(of: type[Any], function: Callable[..., Any], /) -> Callable[..., Any]:
        """Return the same as :meth:`method`, for methods of windows."""


class NativeTransport(Transport):
    """A transport that has native code for checks and for plain ops."""

    fast_check: Callable[[object, bool], bool] | None = None
    """A quicker way to say that a tensor is fine, where there is one; called as ``fast_check(tensor, written)``.

    True: it is a dense, contiguous tensor of a known dtype on the communicator's device, with memory and without a lazy
    conjugate or negation, and, if it is to be written to, not tracked by autograd. False: perhaps not; the core looks.
    Must not raise: nothing of the op was sent, and what is raised is its caller's.
    """

    def shortcuts(self, line: Line, entries: int) -> Shortcuts | None:
        """Native code that starts plain ops of the communicator, where there is some; asked once, before the first op.

        Asked where it carries all messages and collectives. ``line`` is the communicator, as the code sees it; the ring
        keeps ``entries``. Raising: the communicator is not formed.
        """
        return None
