"""Requests become micro-batches, micro-batches become plans, and plans become answers; on rank 0."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import torch
from anyio import to_thread
from torch.nn.utils.rnn import pad_sequence

from aiocomms.errors import CommError

from . import metrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tokenizers import Tokenizer

    from aiocomms.serving import Driver

MICRO_BATCH_TOKENS = 1024
"""Most tokens in one micro-batch, padding included: about a tenth of a second of work for a stage."""
MORE_PADDING = 16
"""Most tokens of padding that a text may add to a micro-batch; with more, one of its own costs less.

Measured on a core (AMD EPYC, Zen 5): the whole model takes 4.5 ms for a micro-batch and 0.23 ms for each of its tokens.
"""


LOST = "The model lost one of its stages; another process is about to take its place."


class PipelineDownError(Exception):
    """Raised when the pipeline cannot answer: a stage is gone, or the server is stopping."""


@dataclass(eq=False, slots=True)
class Text:
    """One text on its way through the pipeline."""

    tokens: list[int]
    vector: asyncio.Future[list[float]]
    came: float  # when, by the clock of `time.perf_counter`


class Waiting:
    """The texts that have not left yet, by their length, and in the order in which they came.

    A micro-batch is as long as its longest text, and padding is computed as all else is. So the text that has waited
    longest chooses the length, and those that are nearest to it go along.
    """

    def __init__(self) -> None:
        self._by_length: defaultdict[int, deque[Text]] = defaultdict(deque)

    def __iter__(self) -> Iterator[Text]:
        return itertools.chain.from_iterable(self._by_length.values())

    def add(self, text: Text) -> None:
        """One more."""
        self._by_length[len(text.tokens)].append(text)

    def clear(self) -> None:
        """Drop all."""
        self._by_length.clear()

    def take(self) -> list[Text]:
        """Take the texts of one micro-batch, and drop those nobody waits for; empty if there is none."""
        for length, texts in list(self._by_length.items()):
            while texts and texts[0].vector.done():
                texts.popleft()
            if not texts:
                del self._by_length[length]
        if not self._by_length:
            return []
        first = min(self._by_length, key=lambda length: self._by_length[length][0].came)
        batch: list[Text] = []
        longest = total = 0
        for length in sorted(self._by_length, key=lambda length: abs(length - first)):
            texts = self._by_length[length]
            while texts and fits(length, longest, total, len(batch)):
                text = texts.popleft()
                if not text.vector.done():
                    batch.append(text)
                    longest, total = max(longest, length), total + length
        return batch


def fits(length: int, longest: int, total: int, count: int) -> bool:
    """Whether a text goes into a micro-batch of `count` texts with `total` tokens."""
    size, whole = longest * count, max(longest, length) * (count + 1)
    more_padding = (whole - total - length) - (size - total)
    return count == 0 or (whole <= MICRO_BATCH_TOKENS and more_padding <= MORE_PADDING)


class Batcher:
    """Gathers the texts of concurrent requests into micro-batches and hands out their vectors.

    No request waits for others to come: whenever the pipeline has room for another micro-batch, all that is
    waiting by then goes into it, as far as it fits.

    :param driver: gives out the plans
    :param stages: length of the pipeline; one micro-batch more than that is kept in flight
    :param lost: what clients are told while a stage is lost, as a sentence
    """

    def __init__(self, driver: Driver, stages: int, tokenizer: Tokenizer, lost: str = LOST) -> None:
        self._driver = driver
        self._lost = lost
        self._stopping: str | None = None
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self._waiting = Waiting()
        self._in_flight: list[list[Text]] = []
        self._news = anyio.Event()
        self._room = anyio.Semaphore(stages + 1)
        metrics.waiting.set_function(lambda: pending([self._waiting]))
        metrics.in_flight.set_function(lambda: pending(self._in_flight))

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text. When cancelled, texts that have not left yet do not leave any more.

        :raises PipelineDownError: if the pipeline is, or goes, down
        """
        came = time.perf_counter()
        encodings = await to_thread.run_sync(self._tokenizer.encode_batch, texts)
        tokenized = time.perf_counter()
        metrics.seconds["tokenizer"].inc(tokenized - came)
        if self._stopping is not None:
            raise PipelineDownError(self._stopping)
        loop = asyncio.get_running_loop()
        batch = [Text(encoding.ids, loop.create_future(), tokenized) for encoding in encodings]
        for text in batch:
            self._waiting.add(text)
        self._news.set()
        return await asyncio.gather(*(text.vector for text in batch))

    async def feed(self) -> None:
        """Give out what is waiting, micro-batch by micro-batch, until cancelled."""
        async with anyio.create_task_group() as batches:
            while True:
                await self._room.acquire()
                batches.start_soon(self._carry_out, await self._next_batch())

    async def _carry_out(self, batch: list[Text]) -> None:
        left = time.perf_counter()
        lengths = [len(text.tokens) for text in batch]
        ids = pad_sequence([torch.tensor(text.tokens) for text in batch], batch_first=True)
        self._in_flight.append(batch)
        try:
            vectors, spent = await self._driver.run((next(self._numbers), ids, torch.tensor(lengths)))
        except CommError:
            refuse(batch, self._lost)
        else:
            metrics.note_batch(lengths, left - batch[0].came, time.perf_counter() - left, spent)
            for text, vector in zip(batch, vectors.tolist(), strict=True):
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

    async def _next_batch(self) -> list[Text]:
        while not (batch := self._waiting.take()):
            self._news = anyio.Event()
            await self._news.wait()
        return batch


def pending(batches: Iterable[Iterable[Text]]) -> int:
    """How many of these texts have no vector yet, and are waited for."""
    return sum(not text.vector.done() for text in itertools.chain(*batches))


def refuse(texts: Iterable[Text], reason: str) -> None:
    """Tell the requests of these texts that there will be no answer."""
    for text in texts:
        if not text.vector.done():
            text.vector.set_exception(PipelineDownError(reason))
