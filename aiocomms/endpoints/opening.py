"""The class ``open_endpoint``, which opens an endpoint.

This module imports only a few modules; see :mod:`aiocomms.communicator.opening`.
"""

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
    """Open an endpoint; other processes connect to its address, without ranks, store or launcher.

    Await the result to get an :class:`Endpoint`. Or write ``async with open_endpoint(...) as here:``, which closes the
    endpoint at the end of the body.

    :param transport: a transport's name; ``"auto"`` for the best available one; or a mapping from some families of
        operations (``"collectives"``, ``"p2p"``, ``"rma"``) to transports' names. Endpoints that connect to each
        other must have the same transport.
    :param device: the device of all tensors.
    :param host: the address of this host at which other endpoints connect. The default admits only processes of this
        host. If other hosts can reach the address, the job must have a token.
    :param lifetime: the seconds for which other endpoints may connect; None: as long as the endpoint is open.
    :param name: the endpoint's name in errors and reports, up to 200 characters. Other endpoints show its first 64
        characters.
    :param timeout: the deadline in seconds for connecting, and the default deadline of ops. If None, ops have no
        deadline, and connecting has a deadline of 600 s.
    :param hints: advice to the transports, and the hint ``"heartbeat"``; see :func:`aiocomms.new_comm`.
    :raises ArgumentError: an argument is wrong.
    :raises UnsupportedOperation: the transport is not available; the message says why, and lists the available
        transports.
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
