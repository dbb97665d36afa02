"""The server's own metrics for `GET /metrics`: requests, the time of a micro-batch by part, the loop's lateness."""

from __future__ import annotations

import time

import anyio
from prometheus_client import Counter, Gauge, Histogram

BEAT = 0.01  # seconds between two measurements of the loop's lateness
LATE = (0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
PARTS = ("tokenizer", "waiting", "model", "pool", "links")
"""The parts of the time: tokenization, the wait for a micro-batch, computation on all stages, the wait for a thread or
the loop, and communication."""

requests = Counter("embedding_requests", "Answers by status.", ["status"])
texts = Counter("embedding_texts", "Texts in micro-batches that have left.")
batches = Counter("embedding_batches", "Micro-batches that have left.")
tokens = Counter("embedding_tokens", "Tokens of them, and what these were padded with.", ["kind"])
seconds = {
    part: counter.labels(part)
    for counter in [Counter("embedding_seconds", "Seconds of all requests or micro-batches, by part.", ["part"])]
    for part in PARTS
}
waiting = Gauge("embedding_texts_waiting", "Texts that wait for their micro-batch to leave.")
in_flight = Gauge("embedding_texts_in_flight", "Texts on their way through the pipeline.")
late = Histogram("embedding_loop_lateness_seconds", "How late the loop was.", buckets=LATE)


def note_batch(lengths: list[int], waited: float, took: float, spent: list[float]) -> None:
    """Record a micro-batch that is done.

    :param waited: the seconds that its first text waited for the micro-batch
    :param took: the seconds from then until the end
    :param spent: the seconds of computation, and of waits for a thread
    """
    model, pool = spent
    parts = {"waiting": waited, "model": model, "pool": pool, "links": max(0.0, took - model - pool)}
    for part, of_it in parts.items():
        seconds[part].inc(of_it)
    texts.inc(len(lengths))
    batches.inc()
    tokens.labels("text").inc(sum(lengths))
    tokens.labels("padding").inc(max(lengths) * len(lengths) - sum(lengths))


async def watch_loop() -> None:
    """Record the event loop's lateness repeatedly, until the task is cancelled."""
    while True:
        due = time.perf_counter() + BEAT
        await anyio.sleep(BEAT)
        late.observe(max(0.0, time.perf_counter() - due))
