"""The batcher on rank 0: it makes micro-batches of requests, plans of micro-batches, and answers of plans."""

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
"""The most tokens in one micro-batch, with padding. They are about a tenth of a second of work for a stage."""
MORE_PADDING = 16
"""The most padding tokens that a text may add to a micro-batch. With more, a separate micro-batch costs less.

Measured on a core (AMD EPYC, Zen 5): the whole model takes 4.5 ms for a micro-batch and 0.23 ms for each of its tokens.
"""


LOST = "The model lost one of its stages; another process is about to take its place."


class PipelineDownError(Exception):
    """The error of a pipeline that cannot answer, because a stage is lost or the server is stopping."""


@dataclass(eq=False, slots=True)
class Text:
    """One text in the pipeline."""

    tokens: list[int]
    vector: asyncio.Future[list[float]]
    came: float  # the time of arrival, by `time.perf_counter`


class Waiting:
    """The texts that are not in a micro-batch yet, by length, in the order of their arrival.

    A micro-batch is as long as its longest text, and padding costs as much as text. So the text that has waited longest
    determines the length, and the texts of the nearest lengths join its micro-batch.
    """

    def __init__(self) -> None:
        self._by_length: defaultdict[int, deque[Text]] = defaultdict(deque)

    def __iter__(self) -> Iterator[Text]:
        return itertools.chain.from_iterable(self._by_length.values())

    def add(self, text: Text) -> None:
        """Add a text."""
        self._by_length[len(text.tokens)].append(text)

    def clear(self) -> None:
        """Drop all texts."""
        self._by_length.clear()

    def take(self) -> list[Text]:
        """Take the texts of one micro-batch, or none if no text waits. Drop texts whose requests were given up."""
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
    """Return whether a text fits into a micro-batch of `count` texts with `total` tokens."""
    size, whole = longest * count, max(longest, length) * (count + 1)
    more_padding = (whole - total - length) - (size - total)
    return count == 0 or (whole <= MICRO_BATCH_TOKENS and more_padding <= MORE_PADDING)


class Batcher:
    """The batcher of texts from concurrent requests, which returns their vectors.

    No request waits for later requests. When the pipeline has room for a micro-batch, the waiting texts that fit go
    into it.

    :param driver: the driver of the plans
    :param stages: the length of the pipeline; at most one micro-batch more is in flight
    :param lost: the sentence for clients while a stage is lost
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
        """Return one vector per text. A cancellation drops the texts that are not in a micro-batch yet.

        :raises PipelineDownError: the pipeline cannot answer
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
        """Run waiting texts, one micro-batch after the other, until the task is cancelled."""
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
                if not text.vector.done():  # the request may be cancelled by now
                    text.vector.set_result(vector)
        finally:
            self._in_flight.remove(batch)
            self._room.release()

    def stop(self, reason: str) -> None:
        """Refuse all present and later texts.

        :param reason: the sentence for the client
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
    """Return the number of texts without a vector whose requests still wait."""
    return sum(not text.vector.done() for text in itertools.chain(*batches))


def refuse(texts: Iterable[Text], reason: str) -> None:
    """Fail the requests of these texts."""
    for text in texts:
        if not text.vector.done():
            text.vector.set_exception(PipelineDownError(reason))
