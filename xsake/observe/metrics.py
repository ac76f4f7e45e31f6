"""The numbers of an event and their names, for every sink and for the server's /metrics.

    TrainStep.loss_nats    train/loss_nats              xsake_train_loss_nats{run}
    TrainStep.tokens_seen  train/tokens_seen            xsake_train_tokens_seen_total{run}: counter
    Evaluated.perplexity   evaluation/FILE/perplexity   xsake_evaluation_perplexity{file, run}

W&B, TensorBoard and Trackio take the names in the middle (`scalars`), Prometheus those on the right
(`Newest`). Both are derived from the fields of the event classes: a new field is a new metric.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from xsake.observe.events import Evaluated, Event, PlanSwapped, TrainStep

PREFIXES: dict[type[Event], str] = {
    TrainStep: "train",
    Evaluated: "evaluation",
    PlanSwapped: "plan",
}
EXCLUDED = ("step", "time_unix_seconds")
STEP = "xsake_step"


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event by name: "train/loss_nats", "evaluation/enwiki-test/loss_nats" …."""
    if type(event) not in PREFIXES:
        return {}
    prefix = PREFIXES[type(event)]
    prefix += f"/{event.file}" if isinstance(event, Evaluated) else ""
    return {f"{prefix}/{name}": value for name, value in _numbers(event).items()}


def _numbers(event: Event) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in vars(event).items()
        if isinstance(value, int | float) and name not in EXCLUDED
    }


# --------------------------------------------------------------------------------------- Prometheus


class Metric(NamedTuple):
    """A metric of Prometheus."""

    name: str
    help: str
    is_counter: bool = False  # its value only rises
    labels: tuple[str, ...] = ("run",)


def _metrics() -> Iterator[tuple[tuple[type[Event], str], Metric]]:
    for kind, prefix in PREFIXES.items():
        hints = typing.get_type_hints(kind)
        labels = ("file", "run") if kind is Evaluated else ("run",)
        for field in dataclasses.fields(kind):
            types = set(typing.get_args(hints[field.name]) or (hints[field.name],))
            if field.name in EXCLUDED or not types <= {int, float, type(None)}:
                continue
            is_counter = bool(field.metadata.get("is_counter"))
            name = f"xsake_{prefix}_{field.name}" + "_total" * is_counter
            help_text = f"{field.name} of the newest {kind.__name__} event of a run"
            yield (kind, field.name), Metric(name, help_text, is_counter, labels)


METRICS: dict[tuple[type[Event], str], Metric] = dict(_metrics())
STEPS = Metric(STEP, "number of completed updates of a run")


class Newest:
    """The newest value of every metric of one run; counters never fall.

    A run that resumes from a checkpoint logs its later steps again. Its counters keep their values
    until the run has passed them.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[Metric, str], float] = {}  # by metric and file

    def write(self, event: Event) -> None:
        """Takes the numbers of an event."""
        file = event.file if isinstance(event, Evaluated) else ""
        for name, value in _numbers(event).items():
            metric = METRICS.get((type(event), name))
            if metric is not None:
                before = self.values.get((metric, file), value)
                value = max(before, value) if metric.is_counter else value
                self.values[metric, file] = value
        self.values[STEPS, ""] = float(event.step)


def families(runs: Mapping[str, Newest]) -> Iterator[Any]:
    """prometheus_client's metric families of some runs, by their names."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for metric in (STEPS, *METRICS.values()):
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels)
        for run, newest in runs.items():
            for (other, file), value in list(newest.values.items()):
                if other == metric:
                    known = {"file": file, "run": run}
                    family.add_metric([known[label] for label in metric.labels], value)
        if family.samples:
            yield family
