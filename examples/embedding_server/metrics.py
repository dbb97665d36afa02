"""What the server adds to `GET /metrics`: requests, where the time of a micro-batch goes, how late the loop is."""

from __future__ import annotations

import time

import anyio
from prometheus_client import Counter, Gauge, Histogram

BEAT = 0.01  # seconds between two looks at how late the loop is
LATE = (0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
PARTS = ("tokenizer", "waiting", "model", "pool", "links")
"""Where the time goes: turning texts into tokens; until a micro-batch leaves; computing, on all stages; until a thread
computes, and until the loop hears of it; and the rest, in which the ranks tell each other."""

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
    """Note a micro-batch that has come back.

    :param waited: seconds of its first text until it left
    :param took: seconds from then on
    :param spent: seconds that were spent computing, and waiting for a thread to do so in
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
    """Note again and again by how much the event loop is late, until cancelled."""
    while True:
        due = time.perf_counter() + BEAT
        await anyio.sleep(BEAT)
        late.observe(max(0.0, time.perf_counter() - due))
