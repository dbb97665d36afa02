"""Requests become micro-batches, micro-batches become plans, and plans become answers; on rank 0."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import torch
from anyio import to_thread
from torch.nn.utils.rnn import pad_sequence

from aiocomms.errors import CommError

from .model import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiocomms.serving import Driver

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

    :param driver: gives out the plans
    :param stages: length of the pipeline; one micro-batch more than that is kept in flight
    :param lost: what clients are told while a stage is lost, as a sentence
    """

    def __init__(self, driver: Driver, stages: int, lost: str) -> None:
        self._driver = driver
        self._lost = lost
        self._stopping: str | None = None
        self._tokenizer = load_tokenizer()
        self._waiting: deque[Text] = deque()
        self._in_flight: list[list[Text]] = []
        self._news = anyio.Event()
        self._room = anyio.Semaphore(stages + 1)

    @property
    def down(self) -> str | None:
        """Why the pipeline cannot answer, as a sentence; None while it can."""
        return self._stopping or (self._lost if self._driver.failure is not None else None)

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

    async def feed(self) -> None:
        """Give out what is waiting, micro-batch by micro-batch, until cancelled."""
        async with anyio.create_task_group() as batches:
            while True:
                await self._room.acquire()
                batches.start_soon(self._carry_out, await self._next_batch())

    async def _carry_out(self, batch: list[Text]) -> None:
        lengths = torch.tensor([len(text.tokens) for text in batch])
        ids = pad_sequence([torch.tensor(text.tokens) for text in batch], batch_first=True)
        self._in_flight.append(batch)
        try:
            vectors = (await self._driver.run((ids, lengths))).tolist()
        except CommError:
            refuse(batch, self._lost)
        else:
            for text, vector in zip(batch, vectors, strict=True):
                if not text.vector.done():  # a request may have been given up meanwhile
                    text.vector.set_result(vector)
        finally:
            self._in_flight.remove(batch)
            self._room.release()

    def stop(self, reason: str) -> None:
        """Give up on every text, those still to come included.

        :param reason: a sentence for the client
        """
        self._stopping = reason
        for batch in (self._waiting, *self._in_flight):
            refuse(batch, reason)
        self._waiting.clear()

    def statistics(self) -> dict[str, int]:
        """Return how many texts wait to be sent, and how many are under way through the pipeline."""
        waiting, in_flight = (
            sum(not text.vector.done() for text in texts)
            for texts in (self._waiting, itertools.chain(*self._in_flight))
        )
        return {"waiting": waiting, "in_flight": in_flight}

    async def _next_batch(self) -> list[Text]:
        while not (batch := take_batch(self._waiting)):
            self._news = anyio.Event()
            await self._news.wait()
        return batch


def refuse(texts: Iterable[Text], reason: str) -> None:
    """Tell the requests of these texts that there will be no answer."""
    for text in texts:
        if not text.vector.done():
            text.vector.set_exception(PipelineDownError(reason))


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
