"""A service behind an ASGI application, for example of Starlette, FastAPI or Litestar.

A service executes plans: units of work that rank 0 sends to all ranks. This module does not import any web framework.

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
from aiocomms.errors import ArgumentError, ClientLeftError, CommClosedError, CommError
from aiocomms.lowlevel.handles import Handle
from aiocomms.progress.guard import ends_task
from aiocomms.serving import Driver, Service
from aiocomms.serving.plans import Execute

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Start = Callable[[], Awaitable[tuple[Service, Execute]]]
"""A function that opens the service on a rank, and returns the service and the function that runs plans."""

_TEXT = "text/plain; charset=utf-8"


class WebService(Handle):
    """A service whose rank 0 is a web server with health probes. All ranks run the same program.

    :param start: an async function, which is called once on each rank. The function opens a communicator, loads the
        model, and returns the :class:`~aiocomms.serving.Service` and the function that runs plans.
    :param max_running: the largest number of plans that run at once; see :meth:`Service.drive`.
    :param max_waiting: the largest number of plans that wait; see :meth:`Service.drive`.
    """

    def __init__(self, start: Start, max_running: int | None = None, max_waiting: int | None = None) -> None:
        self._start = start
        self._most = max_running, max_waiting
        self._driver: Driver | None = None

    @property
    def driver(self) -> Driver:
        """The driver of the service, which exists while :meth:`lifespan` runs.

        :raises CommClosedError: the service is not open.
        """
        if self._driver is None:
            raise CommClosedError("the service is not open: is lifespan= of the application this one's?")
        return self._driver

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Run the driver on rank 0 while the application runs. Pass this method as ``lifespan=`` to the framework.

        If the service cannot continue, for example because no process replaces a lost rank in time, this method sends
        SIGTERM to this process. The web server's signal handler then ends the server. A launcher that restarts ranks
        starts this rank again.

        :raises CommError: the service could not continue.
        """
        service, execute = await self._start()
        _measure(service)
        async with service, service.drive(execute, *self._most) as self._driver, anyio.create_task_group() as tasks:
            tasks.start_soon(_end_with, self._driver)
            yield
            tasks.cancel_scope.cancel()

    async def work(self) -> None:
        """Run plans until rank 0 ends. Every rank except 0 calls this method."""
        service, execute = await self._start()
        _measure(service)
        async with service:
            await service.work(execute)

    def main(self, serve: Callable[[], object]) -> None:
        """Run the web server on rank 0, and :meth:`work` on every other rank.

        The launcher's environment variables give this process's rank. Without a launcher, this process is rank 0.

        :param serve: a function that runs the web server, such as ``lambda: uvicorn.run(app)``.
        """
        launch = read_environment(os.environ)
        if launch is None or launch.rank == 0:
            serve()
        else:
            anyio.run(self.work)

    async def probes(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer ``/healthz``, ``/readyz`` and ``/metrics``.

        This method is an ASGI application, which can be mounted anywhere.

        ``/healthz`` answers 200 while the service runs or recovers. ``/readyz`` answers 200 while the service accepts
        plans. In all other states, both answer 503 with the reason. ``/metrics`` answers with all metrics of
        Prometheus' default registry, which include those of this service.
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
    """Register a service with Prometheus, if Prometheus' Python client is installed."""
    try:
        from aiocomms.integrations.prometheus import instrument
    except ImportError:
        return
    instrument(service)


async def _end_with(driver: Driver) -> None:
    """End the web server when the service cannot continue."""
    await driver.wait_ended()
    if callable(signal.getsignal(signal.SIGTERM)):  # Without a handler the process would end before its answers.
        signal.raise_signal(signal.SIGTERM)


async def until_disconnect(client: Any, awaitable: Awaitable[T]) -> T:
    """Await an awaitable on behalf of a client, and cancel the awaitable when the client disconnects.

    Web frameworks themselves do not cancel the handler when the client disconnects. This function does not change the
    exceptions that the awaitable and ``receive`` raise.

    Read the body of the request before this call, so that the client's next message is the disconnection. FastAPI
    reads the body before the handler, if the handler has an argument for the body.

    :param client: ASGI's ``receive`` function, or a request with a method ``receive``, as in Starlette, FastAPI and
        Litestar.
    :param awaitable: the awaitable, such as ``driver.run(plan)``.
    :returns: the result of the awaitable.
    :raises ClientLeftError: the client has disconnected, so an answer would not arrive.
    :raises ArgumentError: the body of the request was not read before this call.
    """
    receive: Receive = getattr(client, "receive", client)
    raised: list[BaseException] = []
    done: list[T] = []

    async def watch(scope: anyio.CancelScope) -> None:
        try:
            raised.append(await _departure(receive))
        except BaseException as error:  # The framework's receive has failed.
            if ends_task(error):
                raise
            raised.append(error)
        scope.cancel()

    async def call(scope: anyio.CancelScope) -> None:
        try:
            done.append(await awaitable)
        except BaseException as error:
            if ends_task(error):
                raise
            raised.insert(0, error)
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, tasks.cancel_scope)
        tasks.start_soon(call, tasks.cancel_scope)
    if done:
        return done[0]
    raise raised[0]


async def _departure(receive: Receive) -> CommError:
    """Wait until the client disconnects, and return the error that :func:`until_disconnect` raises."""
    while (message := await receive())["type"] != "http.disconnect":
        if message.get("body") or message.get("more_body"):
            return ArgumentError("the request has a body that was not read: read it before")
    return ClientLeftError("the client has disconnected")
