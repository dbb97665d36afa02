"""The HTTP side: `POST /generate`, whose answer is a stream of events, `GET /healthz` and `GET /metrics`."""

from __future__ import annotations

import codecs
import json
import time
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import anyio
from embedding_server.web import explain, ignore, read_body, unavailable
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .front import Client, TooLargeError, UnavailableError
from .serve import drain, fronting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from .front import Front
    from .worker import Options

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


def create_app(options: Options) -> Starlette:
    """Return the ASGI application, whose `state.drain` is awaited before it ends."""
    front: Front

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        nonlocal front
        async with fronting(options) as front:
            yield

    async def generate(request: Request) -> Response:
        prompt, count = parse(await read_body(request))
        try:
            front.check(prompt, count)
        except TooLargeError as error:
            raise HTTPException(413, str(error)) from None
        client = Client()
        return Events(front.generate(prompt, count, client), client)

    async def healthz(_: Request) -> Response:
        if front.stopping or not front.pairs():
            return unavailable(front.stopping or "No decoder is there; one is coming.")
        return JSONResponse({"status": "ok", **front.statistics()})

    async def metrics(_: Request) -> Response:
        return Response(await front.metrics(), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        lifespan=lifespan,
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/healthz", healthz),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: explain, ClientDisconnect: ignore},
    )
    app.state.drain = lambda: drain(front)
    return app


class Events(Response):
    """The answer to a request: one event for each token, or a 503 if there is no token.

    :param tokens: the generator of tokens, which is closed when the client leaves
    """

    def __init__(self, tokens: AsyncGenerator[int], client: Client) -> None:
        self._tokens, self._client = tokens, client
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, receive, tasks.cancel_scope)
            async with aclosing(self._tokens):
                try:
                    await self._stream(send, await anext(self._tokens))
                except UnavailableError as error:
                    await unavailable(str(error))(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        """Stop the work when the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client.left = time.monotonic()
        scope.cancel()

    async def _stream(self, send: Send, first: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may have several tokens

        async def event(data: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            await event(json.dumps({"text": decoder.decode(bytes([first])), "token": first}))
            async for token in self._tokens:
                await event(json.dumps({"text": decoder.decode(bytes([token])), "token": token}))
            await event("[DONE]", more=False)
        except UnavailableError as error:
            await event(json.dumps({"error": str(error)}), more=False)


def parse(body: bytes) -> tuple[bytes, int]:
    """Return the prompt in a request's body, and the number of tokens that must follow.

    :raises HTTPException: the body is wrong; it has status 400 and a sentence with the reason
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The body is not valid JSON: {error}.") from None
    prompt, count = (content.get(name) for name in ("prompt", "max_tokens")) if isinstance(content, dict) else ("", 0)
    if not isinstance(content, dict) or "prompt" not in content or "max_tokens" not in content:
        raise HTTPException(400, 'The body must be a JSON object like {"prompt": "A lane is", "max_tokens": 64}.')
    if not isinstance(prompt, str) or not prompt:
        raise HTTPException(400, "The prompt must be a string that is not empty.")
    if type(count) is not int or count < 1:
        raise HTTPException(400, "max_tokens must be an integer, and at least 1.")
    try:
        return prompt.encode(), count
    except UnicodeEncodeError:
        raise HTTPException(400, "The prompt is not valid Unicode: it has half of a surrogate pair.") from None
