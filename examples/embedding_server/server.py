"""The HTTP side: `POST /embed`, the library's probes, and a sentence for each error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Mount, Route

from aiocomms.errors import ClientLeftError
from aiocomms.integrations.asgi import until_disconnect

from . import metrics
from .batcher import PipelineDownError
from .web import explain, ignore, read_body, unavailable

if TYPE_CHECKING:
    from starlette.requests import Request

    from .rank import EmbeddingServer

MAX_TEXTS = 64  # the most texts of one request
MAX_CHARACTERS = 10_000  # the most characters of one text


def create_app(server: EmbeddingServer) -> Starlette:
    """Return the ASGI application."""

    async def embed(request: Request) -> Response:
        texts = parse(await read_body(request))
        try:
            vectors = await until_disconnect(request, server.batcher.embed(texts))
            # The encoding blocks the loop. msgspec is much faster than the json module.
            response = Response(msgspec.json.encode({"embeddings": vectors}), media_type="application/json")
        except PipelineDownError as down:
            response = unavailable(str(down))
        except ClientLeftError:
            response = Response(status_code=499)  # the client has left
        metrics.requests.labels(response.status_code).inc()
        return response

    return Starlette(
        routes=[Route("/embed", embed, methods=["POST"]), Mount("/", server.probes)],
        exception_handlers={HTTPException: explain, ClientDisconnect: ignore},
        lifespan=server.lifespan,
    )


def parse(body: bytes) -> list[str]:
    """Return the texts in a request's body.

    :raises HTTPException: the body is wrong; it has status 400 or 413 and a sentence with the reason
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The body is not valid JSON: {error}.") from None
    texts = content.get("texts") if isinstance(content, dict) else None
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list):
        raise HTTPException(400, 'The body must be a JSON object like {"texts": ["one text", "another"]}.')
    if not texts:
        raise HTTPException(400, "There is no text: the list of texts is empty.")
    if len(texts) > MAX_TEXTS:
        raise HTTPException(413, f"There are {len(texts)} texts; at most {MAX_TEXTS} are taken at once.")
    for index, text in enumerate(texts):
        check_text(index, text)
    return texts


def check_text(index: int, text: Any) -> None:
    """Refuse a text that the model cannot embed."""
    if not isinstance(text, str):
        raise HTTPException(400, f"Text {index} is not a string.")
    if not text.strip():
        raise HTTPException(400, f"Text {index} is empty.")
    if len(text) > MAX_CHARACTERS:
        raise HTTPException(413, f"Text {index} has {len(text)} characters; at most {MAX_CHARACTERS} are taken.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise HTTPException(400, f"Text {index} is not valid Unicode: it has half of a surrogate pair.")
