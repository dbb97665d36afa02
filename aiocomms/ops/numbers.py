"""Numbers of other libraries, and of programs' own, where ints are wanted."""

from __future__ import annotations

import operator
from typing import Any


def as_int(value: Any) -> Any:
    """Return the int that a value is by ``__index__``, as NumPy's are and an ``IntEnum``'s.

    A bool, a tensor or array, and what is no such number, stays as it is. It is for what is called seldom: records of
    ops are made anew, with ints, by :func:`aiocomms.ops.arrays.checked`, where a check has failed.
    """
    kind = type(value)
    if kind is int or kind is bool or not hasattr(kind, "__index__") or hasattr(kind, "__dlpack__"):
        return value
    try:
        return operator.index(value)
    except TypeError:  # as of a work that was not awaited
        return value
