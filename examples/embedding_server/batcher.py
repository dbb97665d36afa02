"""Rank 0's two ends of the pipeline: requests become micro-batches, micro-batches become answers."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import torch
from anyio import to_thread
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .model import load_tokenizer

if TYPE_CHECKING:
    from anyio.abc import ObjectStream

MICRO_BATCH_TOKENS = 1024
"""Most tokens in one micro-batch, padding included: about a tenth of a second of work for a stage."""


class PipelineDownError(Exception):
    """Raised when the pipeline cannot answer: a stage is gone, or the server is stopping."""


@dataclass(eq=False, slots=True)
class Text:
    """One text on its way through the pipeline."""

    tokens: list[int]
    vector: asyncio.Future[list[float]]


class Batcher:
    """Gathers the texts of concurrent requests into micro-batches and hands out their vectors.

    No request waits for others to come: whenever the pipeline has room for another micro-batch, all that is
    waiting by then goes into it, as far as it fits.

    :param stages: length of the pipeline; one micro-batch more than that is kept in flight
    """

    def __init__(self, stages: int) -> None:
        self.down: str | None = "The pipeline has not been opened."
        """Why the pipeline cannot answer, as a sentence; None while it can."""
        self.opened = anyio.Event()
        """Set when there is, or was, a pipeline."""
        self._stages = stages
        self._numbers = itertools.count()  # of micro-batches; not one is used twice, on whatever pipeline
        self._tokenizer = load_tokenizer()
        self._waiting: deque[Text] = deque()
        self._in_flight: dict[int, list[Text]] = {}
        self._news = anyio.Event()
        self._closing = False
        self._room = anyio.Semaphore(stages + 1)

    def open(self) -> None:
        """Begin with a new pipeline, in which nothing is under way."""
        self.down = None
        self._in_flight.clear()
        self._room = anyio.Semaphore(self._stages + 1)
        self.opened.set()

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text. When cancelled, texts that have not left yet do not leave any more.

        :raises PipelineDownError: if the pipeline is, or goes, down
        """
        encodings = await to_thread.run_sync(self._tokenizer.encode_batch, texts)
        if self.down is not None:
            raise PipelineDownError(self.down)
        loop = asyncio.get_running_loop()
        batch = [Text(encoding.ids, loop.create_future()) for encoding in encodings]
        self._waiting.extend(batch)
        self._news.set()
        return await asyncio.gather(*(text.vector for text in batch))

    async def feed(self, pipeline: ObjectStream[Tensor]) -> None:
        """Send what is waiting into the pipeline, micro-batch by micro-batch, until `close` is called."""
        for number in self._numbers:
            await self._room.acquire()
            batch = await self._next_batch()
            if not batch:
                break
            self._in_flight[number] = batch
            await pipeline.send(torch.tensor([number, *(len(text.tokens) for text in batch)]))
            await pipeline.send(pad_sequence([torch.tensor(text.tokens) for text in batch], batch_first=True))
        await pipeline.send_eof()

    async def collect(self, pipeline: ObjectStream[Tensor]) -> None:
        """Hand out the vectors that come back from the pipeline, until its stream ends."""
        async for header in pipeline:
            vectors = await pipeline.receive()
            batch = self._in_flight.pop(int(header[0]))
            for text, vector in zip(batch, vectors.tolist(), strict=True):
                if not text.vector.done():  # a request may have been given up meanwhile
                    text.vector.set_result(vector)
            self._room.release()

    def close(self) -> None:
        """Let `feed` end the stream once nothing is waiting."""
        self._closing = True
        self._news.set()

    def fail(self, reason: str) -> None:
        """Give up on every text, those still to come included, until there is a new pipeline.

        :param reason: a sentence for the client; the first one stays
        """
        self.down = self.down or reason
        for text in itertools.chain(self._waiting, *self._in_flight.values()):
            if not text.vector.done():
                text.vector.set_exception(PipelineDownError(self.down))
        self._waiting.clear()

    def statistics(self) -> dict[str, int]:
        """Return how many texts wait to be sent, and how many are under way through the pipeline."""
        waiting, in_flight = (
            sum(not text.vector.done() for text in texts)
            for texts in (self._waiting, itertools.chain(*self._in_flight.values()))
        )
        return {"waiting": waiting, "in_flight": in_flight}

    async def _next_batch(self) -> list[Text]:
        while not (batch := take_batch(self._waiting)) and not self._closing:
            self._news = anyio.Event()
            await self._news.wait()
        return batch


def take_batch(waiting: deque[Text]) -> list[Text]:
    """Take from the front of `waiting` the texts of one micro-batch, and drop those nobody waits for."""
    batch: list[Text] = []
    longest = 0
    while waiting:
        text = waiting[0]
        if not text.vector.done():
            longest = max(longest, len(text.tokens))
            if batch and longest * (len(batch) + 1) > MICRO_BATCH_TOKENS:
                break
            batch.append(text)
        waiting.popleft()
    return batch
