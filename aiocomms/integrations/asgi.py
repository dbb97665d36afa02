"""A service behind an ASGI application, as of Starlette, FastAPI or Litestar, none of which it needs.

See ``docs/serving.md``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from aiocomms.bootstrap.launchers import read_environment
from aiocomms.errors import ArgumentError, ClientLeftError, CommClosedError
from aiocomms.lowlevel.handles import Handle
from aiocomms.serving import Driver, Service
from aiocomms.serving.plans import Execute

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Start = Callable[[], Awaitable[tuple[Service, Execute]]]
"""A function that opens the service on a rank, and returns it with what carries out plans there."""

_TEXT = "text/plain; charset=utf-8"


class WebService(Handle):
    """A service whose rank 0 is a web server, and the probes of that; one program for all ranks.

    :param start: an async function that is called once on each rank: it opens a communicator, loads the model, and
        returns the :class:`~aiocomms.serving.Service` and the function that carries out plans.
    :param max_running: see :meth:`Service.drive`, as for ``max_waiting``.
    """

    def __init__(self, start: Start, max_running: int | None = None, max_waiting: int | None = None) -> None:
        self._start = start
        self._most = max_running, max_waiting
        self._driver: Driver | None = None

    @property
    def driver(self) -> Driver:
        """The driver, within the lifespan.

        :raises CommClosedError: the service is not open.
        """
        if self._driver is None:
            raise CommClosedError("the service is not open: is lifespan= of the application this one's?")
        return self._driver

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Drive the service on rank 0 while the application runs, for the ``lifespan=`` of Starlette and others.

        If the service cannot go on, as when nobody takes the place of a lost rank in time, the web server's handler of
        SIGTERM is called, so that it ends: a launcher that restarts ranks starts this one anew.

        :raises CommError: the service could not go on.
        """
        service, execute = await self._start()
        _measure(service)
        async with service, service.drive(execute, *self._most) as self._driver, anyio.create_task_group() as tasks:
            tasks.start_soon(_end_with, self._driver)
            yield
            tasks.cancel_scope.cancel()

    async def work(self) -> None:
        """Carry out plans on every other rank, until rank 0 ends."""
        service, execute = await self._start()
        _measure(service)
        async with service:
            await service.work(execute)

    def main(self, serve: Callable[[], object]) -> None:
        """Run this rank, by the environment of its launcher: serve on rank 0, and work on the others.

        :param serve: a function that runs the web server, as ``lambda: uvicorn.run(app)`` does.
        """
        launch = read_environment(os.environ)
        if launch is None or launch.rank == 0:
            serve()
        else:
            anyio.run(self.work)

    async def probes(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer ``/healthz``, ``/readyz`` and ``/metrics``: an ASGI application, to be mounted anywhere.

        ``/healthz`` is 200 while the service runs or recovers, ``/readyz`` while it takes plans; else 503 and why.
        ``/metrics`` is what Prometheus scrapes, of this service and all else that its default registry shows.
        """
        if scope["type"] != "http":
            return
        probe = {"healthz": self._health, "readyz": self._readiness, "metrics": _metrics}
        answer = probe.get(scope["path"].rpartition("/")[2], lambda: (404, "there is no such page", _TEXT))
        status, text, kind = answer()
        body = text.encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _health(self) -> tuple[int, str, str]:
        if self._driver is None:
            return 503, "the service does not run: it is not open", _TEXT
        doing, reason = self._driver.state
        return (503, f"the service does not run: {reason}", _TEXT) if doing == "ended" else (200, "ok", _TEXT)

    def _readiness(self) -> tuple[int, str, str]:
        status, text, kind = self._health()
        if status != 200 or self._driver is None:
            return status, text, kind
        doing, reason = self._driver.state
        if doing == "ends":
            return 503, "the service is ending", kind
        return (503, f"the ranks recover: {reason}", kind) if doing == "recovers" else (200, "ok", kind)


def _metrics() -> tuple[int, str, str]:
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    except ImportError:
        return 501, 'metrics need: pip install "aiocomms[prometheus]"', _TEXT
    return 200, generate_latest().decode(), CONTENT_TYPE_LATEST


def _measure(service: Service) -> None:
    """Have Prometheus see a service, if it is installed."""
    try:
        from aiocomms.integrations.prometheus import instrument
    except ImportError:
        return
    instrument(service)


async def _end_with(driver: Driver) -> None:
    """End the web server when the service cannot go on."""
    await driver.wait_ended()
    if callable(signal.getsignal(signal.SIGTERM)):  # By default the process would end amid its answers.
        signal.raise_signal(signal.SIGTERM)


async def until_disconnect(client: Any, awaitable: Awaitable[T]) -> T:
    """Await something for a client, and cancel it when the client goes away, which no web framework does by itself.

    Read the body of the request before: what comes next from the client is its end. A framework that reads it for the
    handler's arguments, as FastAPI does, has done so.

    :param client: the ``receive`` of ASGI, or a request that has it, as those of Starlette, FastAPI and Litestar do.
    :param awaitable: what is awaited, such as ``driver.run(plan)``.
    :returns: its result.
    :raises ClientLeftError: the client has gone. An answer reaches nobody.
    :raises ArgumentError: the request's body was not read; or whatever is raised by the awaitable.
    """
    receive: Receive = getattr(client, "receive", client)
    raised: list[Exception] = []
    done: list[T] = []

    async def watch(scope: anyio.CancelScope) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            if message.get("body") or message.get("more_body"):
                raised.append(ArgumentError("the request has a body that was not read: read it before"))
                break
        else:
            raised.append(ClientLeftError("the client has gone"))
        scope.cancel()

    async def call(scope: anyio.CancelScope) -> None:
        try:
            done.append(await awaitable)
        except Exception as error:
            raised.insert(0, error)
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, tasks.cancel_scope)
        tasks.start_soon(call, tasks.cancel_scope)
    if done:
        return done[0]
    raise raised[0]
