"""The places where tests reach into a communicator, because users have no business there and so no way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from aiocomms import Work
from aiocomms.communicator.communicator import Communicator
from aiocomms.ops import Op


def transport_of(comm: Communicator, family: str = "p2p") -> Any:
    """The transport that carries a family of a communicator: a fake whose device is driven, or whose wire is spoilt."""
    return cast("Mapping[str, Any]", comm._core.by_family)[family]


def issue(comm: Communicator, op: Op) -> Work[Any]:
    """Post an op that no method of a communicator makes: a message on a channel which is the library's own."""
    return comm._issue(op)


class Entry:
    """An entry point of a transport that no distribution brings."""

    def __init__(self, name: str, cls: object) -> None:
        self.name = name
        self.value = f"{getattr(cls, '__module__', '')}:{getattr(cls, '__name__', cls)}"
        self._cls = cls

    def load(self) -> object:
        if isinstance(self._cls, Exception):
            raise self._cls
        return self._cls
