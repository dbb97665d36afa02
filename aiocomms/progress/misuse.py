"""The error of a forgotten ``await``: a work that is used as if it were its result says so.

A class with ``__getattr__`` would say it of any name; every attribute of a work would then take five times as long.
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
"""All that a tensor does but ``==``, by which lists and dictionaries find a work, and ``bool``: ``if work:`` asks for
None."""


RESULTS: Final = frozenset(name for name in (*dir(Tensor), *dir(dict)) if not name.startswith("_"))
"""The public attributes of tensors, and of dictionaries, which objects often are."""


class _Attribute:
    """An attribute that a result has, and the work has not."""

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
    """Return what torch calls in place of a function that is given a work; the work may stand within a list."""
    given = [*args, *(kwargs or {}).values()]
    given += [item for value in given if isinstance(value, (list, tuple)) for item in value]
    work = next(value for value in given if isinstance(value, cls))
    raise TypeError(f"torch's {function.__name__} was given {work!r}, wanted a tensor: did you forget `await`?")


def refuse_as_result(cls: type) -> None:
    """Have a class of works refuse what its users do to results. Type checkers do not see it, and so refuse it, too."""
    for name in RESULTS:
        if not hasattr(cls, name):
            setattr(cls, name, _Attribute(name))
    for name in _OPERATORS:
        setattr(cls, name, _operator(name))
    for name, value in {"__bool__": lambda _: True, "__torch_function__": classmethod(_torch_function)}.items():
        setattr(cls, name, value)  # bool would ask __len__
