"""The error for a forgotten ``await``: a program uses a work (the handle of an op) in place of the op's result.

A method ``__getattr__`` could recognize any name, but it would make each attribute access of a work five times as slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from torch import Tensor

_BINARY: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OPERATORS: Final = frozenset(
    {f"__{way}{name}__" for name in (*_BINARY, "lshift", "rshift") for way in ("", "r")}
    | {f"__{name}__" for name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge")}
    | {f"__{name}__" for name in ("len", "iter", "contains", "getitem", "setitem", "delitem")}
    | {f"__{name}__" for name in ("int", "float", "complex", "index", "array")}
)
"""The operators of a tensor, except ``==`` and ``bool``.

``==`` and ``bool`` work as usual, because lists and dictionaries compare works by ``==``, and programs test for None by
``if work:``.
"""


RESULTS: Final = frozenset(name for name in (*dir(Tensor), *dir(dict)) if not name.startswith("_"))
"""The public attributes of tensors and dictionaries. Results of ops mostly have one of these types."""


class _Attribute:
    """An attribute that a result has and a work lacks."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, work: object, cls: type) -> NoReturn:
        what = f"type object {cls.__name__!r}" if work is None else repr(work)
        raise AttributeError(f"{what} has no attribute {self._name!r}: did you forget `await`?")


def _operator(name: str) -> Callable[..., NoReturn]:
    def refuse(work: object, *_: object) -> NoReturn:
        raise TypeError(f"{work!r} does not support {name}: did you forget `await`?")

    return refuse


def _torch_function(
    cls: type, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
) -> NoReturn:
    """Raise the error for a torch function that got a work as an argument, or in a list or tuple of arguments."""
    given = [*args, *(kwargs or {}).values()]
    given += [item for value in given if isinstance(value, (list, tuple)) for item in value]
    work = next(value for value in given if isinstance(value, cls))
    raise TypeError(f"torch's {function.__name__} was given {work!r}, wanted a tensor: did you forget `await`?")


def refuse_as_result(cls: type) -> None:
    """Make the works of a class refuse the operations that only results have.

    Type checkers also report these operations as errors, because type checkers do not see the methods that this
    function adds.
    """
    for name in RESULTS:
        if not hasattr(cls, name):
            setattr(cls, name, _Attribute(name))
    for name in _OPERATORS:
        setattr(cls, name, _operator(name))
    for name, value in {"__bool__": lambda _: True, "__torch_function__": classmethod(_torch_function)}.items():
        setattr(cls, name, value)  # Without __bool__, bool() would call __len__.
