"""A driver and its workers: rank 0 sends plans (units of work) to all ranks, and every rank runs each plan."""

from __future__ import annotations

from aiocomms.serving.current import CurrentComm
from aiocomms.serving.driver import Driver, DriverState
from aiocomms.serving.service import Service
from aiocomms.serving.statistics import PlanFailures, ServiceStatistics
from aiocomms.serving.watch import PlanStart

__all__ = ["CurrentComm", "Driver", "DriverState", "PlanFailures", "PlanStart", "Service", "ServiceStatistics"]
