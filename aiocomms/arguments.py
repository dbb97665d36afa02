"""Functions that check arguments. This module does not import torch, because this import could block an event loop."""

from __future__ import annotations

import contextlib
import enum
import math
import operator
import os
import sys
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from aiocomms.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    import torch

TIMEOUT_MAX = 366 * 86400.0
"""The longest timeout, in seconds: a year. A larger value is refused, because its unit is probably wrong."""

Timeout = float | timedelta | None
"""The type of a deadline: a number of seconds, a ``timedelta``, or None for no deadline."""


class UseDefault(enum.Enum):
    """The type of :data:`COMM_TIMEOUT`.

    This type is an enumeration, so type checkers understand the test ``is COMM_TIMEOUT``.
    """

    COMM_TIMEOUT = "the communicator's timeout"

    def __repr__(self) -> str:
        return self.name


COMM_TIMEOUT: Final = UseDefault.COMM_TIMEOUT
"""The default value of an op's argument ``timeout``.

This value stands for the communicator's timeout at the time of the call.
"""
OpTimeout = Timeout | UseDefault
"""The type of an op's argument ``timeout``."""

DEFAULT: Final = "world"
"""The name of the default communicator."""
UNNAMED: Final = "endpoint"
"""The default name of an endpoint."""
FORMING: Final = 600.0
"""The time limit, in seconds, for the formation of a communicator if the program sets no limit.

After this time, an error names the missing ranks.
"""
SILENCE: Final = 5.0
"""The default number of seconds without a heartbeat after which a rank counts as dead."""
_HEARTBEAT: Final = "AIOCOMMS_HEARTBEAT"


def short(value: object) -> str:
    """Describe a value in at most 80 characters, for an error message."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        text = describe(value)
        return f"{'an' if text.startswith('int') else 'a'} {text} tensor"
    if hasattr(type(value), "__dlpack__"):  # The elements of an array do not fit into a message.
        text = f"{getattr(value, 'dtype', '')}{list(getattr(value, 'shape', []))}"
        return f"{'an' if text.startswith('int') else 'a'} {text} {type(value).__module__}.{type(value).__qualname__}"
    try:
        text = repr(value)
    except Exception:  # Python refuses an int of thousands of digits, or the object's own repr is broken.
        text = hex(value) if isinstance(value, int) else object.__repr__(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def wrong_type(name: str, value: object, wanted: str) -> ArgumentTypeError:
    """Return the error for an argument of a wrong type.

    The error's message has the argument's name and value, and the wanted type.
    """
    hint = "; did you forget `await`?" if isinstance(value, Awaitable) else ""
    return ArgumentTypeError(f"{name} is {short(value)} ({type(value).__name__}), wanted {wanted}{hint}")


def describe(tensor: torch.Tensor) -> str:
    """Describe a tensor's dtype and shape for an error message: ``float32[3, 4]``."""
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"


def as_int(value: Any) -> Any:
    """Return the int of a value with ``__index__``, such as an integer of NumPy or an ``IntEnum``.

    A bool, a tensor, an array, or a value without ``__index__`` is returned unchanged. Most ops have only plain ints,
    which need no conversion. If the check of an op fails, :func:`aiocomms.ops.arrays.checked` converts the op's numbers
    and checks the op again.
    """
    kind = type(value)
    if kind is int or kind is bool or not hasattr(kind, "__index__") or hasattr(kind, "__dlpack__"):
        return value
    try:
        return operator.index(value)
    except TypeError:  # the value may be a work that was not awaited
        return value


def mapping(name: str, value: object) -> None:
    """Check that a value is a mapping."""
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "a mapping or None")


def label(value: str) -> str:
    """Check that a value can be a communicator's name: a ``str`` of 1 to 200 characters."""
    in_utf8("name", value)
    if not value or len(value) > 200:
        raise ArgumentError(f"name has {len(value)} characters, wanted 1 to 200")
    return value


def in_utf8(name: str, value: str) -> bytes:
    """Check that a value is a ``str``, and return its UTF-8 encoding.

    :raises ArgumentTypeError: the value is no ``str``.
    :raises ArgumentError: UTF-8 cannot encode the value, because the value contains half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise wrong_type(name, value, "a str")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{name} is {short(value)}, wanted a str that UTF-8 can encode: {error.reason}") from None


def deadline(name: str, value: Timeout) -> float:
    """Check a deadline, and return it in seconds; return infinity if the deadline is None.

    :raises ArgumentError: see :func:`seconds`.
    """
    if value is None:
        return math.inf
    try:
        return seconds(name, value)
    except ArgumentError as error:
        raise type(error)(f"{error.message}; or None, for no deadline") from None


def op_deadline(timeout: OpTimeout, default: float) -> float:
    """Check the deadline of one op, and return it in seconds.

    :param default: the seconds to return if the caller passed no deadline for this op.
    """
    return default if timeout is COMM_TIMEOUT else deadline("timeout", timeout)


def seconds(name: str, value: float | timedelta) -> float:
    """Check a time span, and return it in seconds as a float.

    :raises ArgumentTypeError: the value is neither a number nor a ``timedelta``.
    :raises ArgumentError: the value is not above 0, or is above a year.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    value = as_int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(name, value, "seconds as a number, or a timedelta")
    if not 0 < value <= TIMEOUT_MAX:
        raise ArgumentError(f"{name} is {short(value)}, wanted seconds: 0 < {name} <= {TIMEOUT_MAX:.0f}")
    return float(value)


def silence(options: Mapping[str, Any]) -> float:
    """Return the number of seconds without a heartbeat after which a rank counts as dead.

    The result 0 means that no rank counts as dead because of missing heartbeats. The number comes from the hint
    ``"heartbeat"``. Without this hint, the number comes from the environment variable ``AIOCOMMS_HEARTBEAT``. The
    default of this variable is :data:`SILENCE`.

    :raises ArgumentError: the number is neither 0 nor a valid number of seconds.
    """
    what = 'hint "heartbeat"'
    value: Any = options.get("heartbeat")
    if value is None:
        what, value = _HEARTBEAT, os.environ.get(_HEARTBEAT) or SILENCE
        with contextlib.suppress(ValueError):
            value = float(value)
    try:
        return 0.0 if value == 0 and value is not False else seconds(what, value)
    except ArgumentError as error:
        raise type(error)(f"{error.message}; or 0, for never") from None


def advice(hints: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check a program's hints, and return them as a dict.

    :raises ArgumentError: the hints are no mapping, or the hint ``"heartbeat"`` is wrong.
    """
    if hints is not None:
        mapping("hints", hints)
    options = dict(hints or {})
    silence(options)
    return options


def device_of(value: str | torch.device) -> torch.device:
    """Return the device that an argument names.

    :raises ArgumentError: the argument names no device.
    """
    import torch

    try:
        return torch.device(value)
    except TypeError:
        raise wrong_type("device", value, "a torch.device or its name") from None
    except RuntimeError as error:
        raise ArgumentError(f"device is {value!r}, wanted a torch.device or its name: {error}") from None


def place(store: object, rank: object, size: object) -> None:
    """Check the arguments rank, size and store of a communicator. If several are wrong, one error lists all problems.

    :raises ArgumentError: an argument is wrong or is missing.
    """
    if store is None and rank is None and size is None:
        return
    wrong = []
    for what, value in (("rank", rank), ("size", size)):
        if type(value) is not int:
            wrong.append(f"{what} is missing" if value is None else f"{what} is {value!r}, wanted an int")
    if type(size) is int and size < 1:
        wrong.append(f"size is {size}, wanted at least 1")
    elif type(size) is int and type(rank) is int and not 0 <= rank < size:
        wrong.append(f"rank is {rank}, wanted 0 <= rank < size = {size}")
    if store is None and size != 1:
        wrong.append("store is missing")
    elif store is not None and not _is_store(store):
        wrong.append(f"store is a {type(store).__name__}, wanted a torch.distributed.Store")
    if wrong:
        raise ArgumentError(f"rank, size and store belong together: {'; '.join(wrong)}")


def _is_store(value: object) -> bool:
    """Return whether a value is a store of torch. Before ``torch.distributed`` is imported, no value can be a store."""
    store: Any = getattr(sys.modules.get("torch.distributed"), "Store", None)
    return store is not None and isinstance(value, store)
