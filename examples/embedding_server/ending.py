"""How a process of a server ends because of an error: with one sentence."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def exiting_by(kind: type[Exception], who: str = "") -> Iterator[None]:
    """End the process by an error of a kind that the block raises, by the first if they are several.

    :param who: ends, with a colon and a space behind it
    :raises SystemExit: with a sentence that says why
    """
    failure: BaseException | None = None
    try:
        yield
    except* kind as errors:
        failure = errors
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        raise SystemExit(f"{who}{type(failure).__name__}: {failure}")
