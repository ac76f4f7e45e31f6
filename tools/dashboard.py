"""Writes the Grafana dashboard: `python -m tools.dashboard`.

xsake/observe/metrics.py ─ the metrics that exist ─ PANELS ─ deploy/grafana-dashboard.json

The file is never edited by hand; a test compares it with what this program writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xsake.observe.events import Evaluated, TrainStep
from xsake.observe.metrics import METRICS, STEPS
from xsake.server.routes.status import LIVE

FILE = Path("deploy/grafana-dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${source}"}

# (title, event, field, unit of Grafana); a counter is shown as its rate
PANELS = (
    ("Training loss", TrainStep, "loss_nats", "none"),
    ("Perplexity", Evaluated, "perplexity", "none"),
    ("Gradient norm", TrainStep, "gradient_norm", "none"),
    ("Tokens per second", TrainStep, "tokens_seen", "none"),
    ("Step time", TrainStep, "step_seconds", "s"),
    ("Peak memory", TrainStep, "peak_bytes", "bytes"),
    ("Density", TrainStep, "density_ratio", "percentunit"),
    ("Model FLOPs utilisation", TrainStep, "mfu_ratio", "percentunit"),
    ("Skipped steps", TrainStep, "skipped_steps", "none"),
)
WIDTH, HEIGHT = 8, 8  # of a panel; a row of Grafana is 24 wide


def dashboard() -> dict[str, Any]:
    """The dashboard: a panel for each of PANELS, and the step and state of every run."""
    found = [
        _panel(0, "Step", f'{STEPS.name}{{run=~"$run"}}', "{{run}}", "none", "stat"),
        _panel(1, "Running", f'{LIVE.name}{{run=~"$run"}}', "{{run}}", "none", "stat"),
    ]
    for number, (title, kind, field, unit) in enumerate(PANELS, 3):
        metric = METRICS[kind, field]
        shown = f'{metric.name}{{run=~"$run"}}'
        shown = f"rate({shown}[$__rate_interval])" if metric.is_counter else shown
        legend = "{{run}} {{file}}" if "file" in metric.labels else "{{run}}"
        found.append(_panel(number, title, shown, legend, unit))
    return {
        "title": "XSAKE training",
        "uid": "xsake-training",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "source"},
                {
                    "name": "run",
                    "type": "query",
                    "label": "run",
                    "datasource": SOURCE,
                    "query": f"label_values({STEPS.name}, run)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                },
            ]
        },
        "panels": found,
    }


def _panel(
    number: int, title: str, expression: str, legend: str, unit: str, kind: str = "timeseries"
) -> dict[str, Any]:
    place = {"w": WIDTH, "h": HEIGHT, "x": number % 3 * WIDTH, "y": number // 3 * HEIGHT}
    return {
        "id": number + 1,
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
    }


def text() -> str:
    """The dashboard as JSON."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> None:
    """Writes FILE."""
    FILE.write_text(text())
    print(f"written: {FILE}")


if __name__ == "__main__":
    main()
