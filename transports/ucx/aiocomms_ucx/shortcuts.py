"""The transport's part of the shortcuts. A shortcut is native code of the engine that starts an op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiocomms import ops
from aiocomms.ops import tensor_words
from aiocomms.ops.reductions import SUPPORTED, ReduceOp
from aiocomms.transport import Completion, NativeTransport
from aiocomms.transport.native import Line
from aiocomms_ucx._engine import Operator, Shortcuts, dtype_names, read_words_at
from aiocomms_ucx.collectives import FORMS

if TYPE_CHECKING:
    from aiocomms_ucx._engine import Engine
    from aiocomms_ucx.shared_engine import SharedEngine

_TYPES: Final[list[type[ops.Op]]] = [
    ops.AllGatherSingle,
    ops.AllReduce,
    ops.AllToAllSingle,
    ops.Barrier,
    ops.Broadcast,
    ops.Get,
    ops.Put,
    ops.PutSignal,
    ops.Recv,
    ops.ReduceScatterSingle,
    ops.Send,
    ops.Signal,
    ops.WaitSignal,
]
_TAKEN: Final[frozenset[type[ops.Op]]] = frozenset(_TYPES)
KINDS: Final[dict[str, tuple[type[ops.Op], int]]] = {cls.name: (cls, FORMS.get(cls, -1)) for cls in _TYPES}
"""The op types with a shortcut, by name, each with its number in ``FORMS``, or -1 if ``FORMS`` lacks the type."""


def _operators() -> list[tuple[object, int, int]]:
    """Return the reduction operators that have no factor. The default operator is first.

    :returns: for each operator, the operator itself, its number in the engine, and a bit mask of its dtypes.
    """
    names = [f"torch.{name}" for name in dtype_names()]
    plain = [ReduceOp.SUM, *(op for kind in SUPPORTED if (op := getattr(ReduceOp, kind.upper(), None)))]
    found: list[tuple[object, int, int]] = []
    for op in dict.fromkeys(plain):
        if isinstance(op, ReduceOp):
            mask = sum(1 << names.index(str(dtype)) for dtype in SUPPORTED[op.kind])
            found.append((op, int(Operator[op.kind.upper()]), mask))
    return found


OPERATORS: Final = _operators()

if (_words := tensor_words.find()) is not None:
    read_words_at(*_words)


class Hastened(NativeTransport):
    """The base class of a transport with shortcuts."""

    engine: Engine
    shared: SharedEngine
    group: int
    rank: int
    size: int
    _native: Shortcuts | None = None
    _left: dict[int, int]
    _disputes: dict[int, list[tuple[int, str]]]

    def shortcuts(self, line: Line, entries: int) -> Any:
        """See :meth:`NativeTransport.shortcuts`. Return None if a subclass carries fewer ops or has its own post."""
        carries, cls = self.capabilities, type(self)
        all_of_it = carries.ops >= _TAKEN and carries.lanes >= _TAKEN & ops.COLLECTIVES
        if cls.post is not cls.hand_over or carries.reductions is not None or not all_of_it:
            return None
        place = self.group, self.rank, self.size
        self._native = Shortcuts(self.engine, *place, KINDS, OPERATORS, self, line, entries)
        return self._native

    def hold(self, whether: bool) -> None:
        """Choose whether shortcuts pass new collectives to Python code or to the engine.

        :param whether: True for Python code, False for the engine.
        """
        if self._native is not None:
            self._native.held = whether

    def look_after(self, index: int) -> None:
        """Handle the outcomes that have occurred since the engine got an op.

        The transport already has a reference to the op.

        :param index: the op's number among the collectives; -1 if the op is no collective.
        """
        if self.engine.ready:
            self.shared.progress()
        if index >= 0 and (self._left or self._disputes):
            self._reconsider(index)

    def hand_over(self, op: ops.Op, work: Completion) -> float | None:
        """Post an op to the engine at once, as the shortcuts do."""
        raise NotImplementedError

    def _reconsider(self, index: int) -> None:
        raise NotImplementedError
