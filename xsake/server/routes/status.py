"""/health and /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

import xsake
from xsake.observe import metrics
from xsake.server import schemas
from xsake.server.served import Here, Json, Served

router = APIRouter(tags=["status"])
LIVE = metrics.Metric("xsake_run_live", "1 if a process trains in the run's folder, else 0")
LISTENERS = metrics.Metric("xsake_server_listeners", "open streams of live events", labels=())
SERVER = (LIVE, LISTENERS)  # metrics that are of the server, not of events


@router.get("/health", response_model=schemas.Health)
def health() -> Response:
    """The server is up; needs no token."""
    return Json(schemas.Health(version=xsake.__version__))


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def get_metrics(served: Here) -> Response:
    """The newest numbers of every run as Prometheus text; their names are those of the events."""
    registry = CollectorRegistry()
    registry.register(_Collector(served))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _Collector:
    """What prometheus_client collects from: the runs of a server."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def describe(self) -> list[Any]:
        """Nothing: a registry would collect once more to find out."""
        return []

    def collect(self) -> Iterator[Any]:
        """Families of all runs."""
        yield from metrics.families(self.served.runs.newest())
        live = GaugeMetricFamily(LIVE.name, LIVE.help, labels=LIVE.labels)
        for name, run in self.served.runs.all().items():
            live.add_metric([name], float(run.is_live))
        yield live
        yield GaugeMetricFamily(LISTENERS.name, LISTENERS.help, self.served.listeners)
