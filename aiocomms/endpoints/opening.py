"""The opening of an endpoint. It loads as little as :mod:`aiocomms.communicator.opening`, for the same reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from aiocomms.arguments import FORMING, UNNAMED, Timeout, advice, deadline, label, wrong_type
from aiocomms.communicator.opening import Opening, checked
from aiocomms.loading import loaded

if TYPE_CHECKING:
    import torch

    from aiocomms.endpoints.endpoint import Endpoint

_LOOPBACK: Final = "127.0.0.1"


class open_endpoint(Opening["Endpoint"]):  # noqa: N801 - programs call the class like a function
    """Open an endpoint, by whose address other processes connect with this one: no ranks, no store, no launcher.

    Await it for an :class:`Endpoint`, or use it as ``async with open_endpoint(...) as here:``, which closes it.

    :param transport: a transport's name; ``"auto"`` for the best that is available; or a name for each of some of the
        families ``"collectives"``, ``"p2p"`` and ``"rma"``. The same on all endpoints that connect.
    :param device: the device of all tensors.
    :param host: the address of this host at which others connect. By default only processes of this host do. Where
        other hosts can, the job must have a token.
    :param lifetime: the seconds for which others may connect by its address; None: as long as the endpoint is open.
    :param name: the endpoint's name in errors and reports, up to 200 characters; the first 64 also in those of the
        endpoints that have its address.
    :param timeout: the deadline in seconds for connecting, and afterwards that of ops that are given none. None: such
        ops have no deadline, and connecting has 600 s.
    :param hints: advice to the transports, and ``"heartbeat"``, as for :func:`aiocomms.new_comm`.
    :raises ArgumentError: an argument is wrong.
    :raises UnsupportedOperation: the transport is not available; the message says why, and what else there is.
    """

    _example = "here = await open_endpoint(...)"

    def __init__(
        self,
        transport: str | Mapping[str, str] = "auto",
        device: str | torch.device = "cpu",
        *,
        host: str = _LOOPBACK,
        lifetime: Timeout = None,
        name: str = UNNAMED,
        timeout: Timeout = FORMING,
        hints: Mapping[str, Any] | None = None,
    ) -> None:
        self._transport, self._device = transport, checked(device)
        if not isinstance(host, str):
            raise wrong_type("host", host, "an address of this host as a str")
        self._options = advice(hints)
        self._where = host, deadline("lifetime", lifetime), label(name), deadline("timeout", timeout)

    async def _open(self) -> Endpoint:
        await loaded("aiocomms.endpoints.endpoint")
        from aiocomms.endpoints.endpoint import opened

        return await opened(self._transport, self._device, self._options, *self._where)
