"""What stands for something of one process, such as a communicator: it is neither copied nor pickled."""

from __future__ import annotations

from typing import Any, NoReturn, Self


class Handle:
    """The base of such classes. A copy of what holds one, as ``copy.deepcopy`` of a module, holds the same one."""

    __slots__ = ()

    def __copy__(self) -> Self:
        """Return the handle itself."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the handle itself."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled.

        :raises TypeError: always.
        """
        raise TypeError(f"{type(self).__name__} cannot be pickled: it stands for something of this process alone")
