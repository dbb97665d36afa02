"""The metrics of every process, and their merge into one page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

BEAT = 0.005  # seconds
SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class Measures:
    """The metrics of one process.

    :param process: the name of the process
    """

    def __init__(self, process: str) -> None:
        self.registry = CollectorRegistry()
        self.process = process

    def histogram(self, name: str, about: str, buckets: Iterable[float] = SHORT) -> Histogram:
        """Return a new histogram of seconds."""
        made = Histogram(f"text_generator_{name}", about, ["process"], registry=self.registry, buckets=tuple(buckets))
        return made.labels(self.process)

    def counter(self, name: str, about: str) -> Counter:
        """Return a new counter."""
        return Counter(f"text_generator_{name}", about, ["process"], registry=self.registry).labels(self.process)

    def text(self) -> str:
        """Return all metrics as text for Prometheus."""
        return generate_latest(self.registry).decode()

    async def beat(self) -> None:
        """Measure the event loop's lateness repeatedly, until the task is cancelled."""
        late = self.histogram("loop_lateness_seconds", "By how much the event loop was late, each 5 ms.")
        while True:
            due = time.perf_counter() + BEAT
            await asyncio.sleep(BEAT)
            late.observe(time.perf_counter() - due)


class Merged(Collector):
    """The pages of several processes, merged so that each metric's name and help occur once."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        families: dict[str, Metric] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text):
                families.setdefault(family.name, family).samples.extend(
                    family.samples if families.get(family.name) is not family else []
                )
        yield from families.values()


def merge(texts: Iterable[str]) -> str:
    """Return several pages merged into one."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged(texts))
    return generate_latest(registry).decode()
