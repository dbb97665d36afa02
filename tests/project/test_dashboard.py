"""``docs/dashboard.json`` is a dashboard of Grafana's, and asks for what the exporter for Prometheus shows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import prometheus_client
import promql_parser
import pytest
import torch
from concurrency import run_on, together
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from aiocomms.errors import CommAbortedError
from aiocomms.integrations.prometheus import instrument
from aiocomms.serving import Service
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic

TEXT = (Path(__file__).parents[2] / "docs" / "dashboard.json").read_text()


def panels():
    return [panel for panel in json.loads(TEXT)["panels"] if panel["type"] != "row"]


def queries():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_dashboard_round_trips_through_grafana_classes():
    """Grafana's own classes read it; what they write again is the same, so they know every field."""
    register_default_plugins()
    read = Dashboard.from_json(json.loads(TEXT))
    assert json.loads(JSONEncoder().encode(read)) == json.loads(TEXT)


def test_every_dashboard_panel_has_description_unit_and_place():
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels())
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in panels()]
    assert len(set(places)) == len(places)


async def divide(plan):
    return 1 // plan


def scraped():
    """The names and labels of what a scrape shows in which something has ended, is pending, and has failed."""

    async def main():
        registry = prometheus_client.CollectorRegistry()
        async with (
            local_world(2, "ucx") as [one, two],
            local_world(2, name="piped") as [left, right],
            local_world(1, name="served") as [comm],
            Service(comm) as service,
            service.drive(divide) as driver,
        ):
            instrument(one, registry)
            instrument(left, registry)
            _streams = await together(lambda: left.open_stream(1), lambda: right.open_stream(0))
            instrument(service, registry)
            assert await driver.run(1) == 1
            with pytest.raises(ZeroDivisionError):
                await driver.run(0)
            for work in [one.all_reduce(torch.ones(1)), two.all_reduce(torch.ones(1))]:
                await work
            work = one.recv(torch.ones(1), 1)
            one._core.in_flight.heartbeat.look(time.monotonic())  # the watchdog does so a while later
            prometheus_client.generate_latest(registry)
            two.abort("enough")
            with pytest.raises(CommAbortedError):
                await work
            return prometheus_client.generate_latest(registry).decode()

    families = text_string_to_metric_families(run_on("asyncio", main))
    found = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_dashboard_queries_only_exported_metrics(monkeypatch):
    monkeypatch.setenv("AIOCOMMS_HEARTBEAT", "5")
    known, asked = scraped(), set()

    def look(node):
        if isinstance(node, promql_parser.VectorSelector):
            asked.add(node.name)
            assert {matcher.name for matcher in node.matchers.matchers} <= known[node.name]
        if isinstance(node, promql_parser.AggregateExpr):
            grouped.update(node.modifier.labels)

    for query in queries():
        grouped = set()
        promql_parser.walk(promql_parser.parse(query.replace("$__rate_interval", "5m")), look)
        assert grouped <= set().union(*(labels for name, labels in known.items() if name in query))
    assert asked == set(known)
