"""The base class of classes such as ``PointToPoint``, which have a communicator's methods for one kind of ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from aiocomms.arguments import COMM_TIMEOUT, OpTimeout
from aiocomms.diagnosis.recorder import Recorder
from aiocomms.errors import CommError
from aiocomms.lowlevel.handles import Handle
from aiocomms.ops import Family, Op, checks
from aiocomms.progress.work import Work
from aiocomms.transport import Transport
from aiocomms.transport.native import Shortcuts


class Inside(checks.CheckedComm, Protocol):
    """The part of a communicator's core that classes such as ``PointToPoint`` use."""

    worded: Callable[[CommError], CommError]
    """See :class:`aiocomms.progress.work.Owner`."""
    recorder: Recorder
    by_family: dict[Family, Transport]
    """The transport of each family of ops."""

    @property
    def refusing(self) -> bool:
        """See :attr:`aiocomms.core.core.Core.refusing`."""

    def caller_stream(self) -> object:
        """See :meth:`Transport.caller_stream`."""

    def lose(self, error: CommError) -> None:
        """Mark the communicator as lost on all ranks.

        The caller is a rank that cannot do its part of a collective that has already begun.
        """

    def demand_thread(self, what: str) -> None:
        """See :meth:`aiocomms.core.core.Core.demand_thread`."""


class Issuer(Handle, ABC):
    """The base class of classes such as ``PointToPoint``. This class has the methods that start an op."""

    name: str
    rank: int
    size: int
    device: torch.device
    _core: Inside
    _shortcuts: Shortcuts | None
    """The native code that starts plain ops.

    The value is None if the program has derived its own class from :class:`Communicator`, because that class may
    start ops differently.
    """

    @abstractmethod
    def _issue(self, op: Op, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT) -> Work[Any]:
        """Check and post an op, and return the op's work."""

    def _issue_in_order(
        self, op: Op, hints: Mapping[str, Any] | None = None, timeout: OpTimeout = COMM_TIMEOUT
    ) -> Work[Any]:
        """Issue an op outside all lanes. The ranks match such ops in the order of the calls."""
        return self._issue(op, hints, timeout)
