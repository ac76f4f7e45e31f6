"""/metrics is Prometheus text with the training sink's names; the dashboard names only those."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.observe.test_sinks import EVENTS, STARTED, evaluated, trained
from tests.server.conftest import client_of, make_run
from tools import dashboard
from xsake import shipped
from xsake.observe import metrics, sinks
from xsake.observe.events import Resumed
from xsake.server.routes.status import SERVER

ROOT = Path(__file__).parent.parent.parent


def samples(text):
    """{(name, run, file): value}, by Prometheus's own parser."""
    return {
        (x.name, x.labels.get("run"), x.labels.get("file")): x.value
        for family in text_string_to_metric_families(text)
        for x in family.samples
    }


def test_the_server_and_the_training_sink_say_the_same(client):
    sink = sinks.Prometheus(run="a")
    for event in EVENTS:
        sink.write(event)
    own = samples(generate_latest(sink.registry).decode())
    server = samples(client.get("/metrics").text)
    assert own == {key: value for key, value in server.items() if key[0] not in names_of(SERVER)}
    assert own["xsake_train_loss_nats", "a", None] == 2.5
    assert own["xsake_evaluation_perplexity", "a", "valid"] == 9.0
    assert own["xsake_train_tokens_seen_total", "a", None] == 192
    for wanted in ("gradient_norm", "step_seconds", "density_ratio"):
        assert (f"xsake_train_{wanted}", "a", None) in own


def names_of(found):
    return {metric.name for metric in found}


def test_every_metric_is_named_by_an_event_field_with_its_unit(client):
    known = names_of([metrics.STEPS, *metrics.METRICS.values(), *SERVER])
    assert {name for name, _, _ in samples(client.get("/metrics").text)} <= known
    assert {"xsake_train_peak_bytes", "xsake_train_tokens_seen_total"} <= known
    assert all(re.fullmatch(r"xsake_[a-z_]+", name) for name in known)
    counters = {x.name for x in metrics.METRICS.values() if x.is_counter}
    assert counters == {"xsake_train_tokens_seen_total", "xsake_train_skipped_steps_total"}


def test_counters_only_rise_when_a_run_is_resumed(root):
    """The run goes back to step 2 of 9: its counter waits, its gauges go back."""
    run = make_run(root, "b", events=[STARTED, *(trained(step) for step in range(1, 10))])
    with client_of(runs=(root,), published=False) as client:
        before = samples(client.get("/metrics").text)
        file = sinks.EventFile(run / "events.jsonl", 2)
        file.write(Resumed(step=2, commit="", device=""))
        file.write(trained(3, loss=7.0))
        after = samples(client.get("/metrics").text)
        for step in range(4, 12):
            file.write(trained(step))
        file.close()
        later = samples(client.get("/metrics").text)
    tokens = ("xsake_train_tokens_seen_total", "b", None)
    assert before[tokens] == after[tokens] == 64 * 9
    assert later[tokens] == 64 * 11
    assert after["xsake_train_loss_nats", "b", None] == 7.0
    assert after["xsake_step", "b", None] == 3


def test_what_is_not_finite_is_left_out_and_labels_are_quoted(root):
    make_run(root, 'x "y"\\z', events=[STARTED, trained(1, loss=float("nan")), evaluated(1)])
    with client_of(runs=(root,), published=False) as client:
        found = samples(client.get("/metrics").text)
    assert ("xsake_train_loss_nats", 'x "y"\\z', None) not in found
    assert found["xsake_evaluation_loss_nats", 'x "y"\\z', "valid"] == 2.2
    assert all(math.isfinite(value) for value in found.values())


def test_the_sink_and_its_scrapes_take_less_than_a_hundredth_of_a_step():
    """Of the shortest step that is published, with an event for each step and a scrape every 15 s.

    The functions check their types here, so that they take longer than in a run.
    """
    path = max(shipped.RESULTS.glob("train-step-*.json"))
    step = min(row["median_seconds"] for row in json.loads(path.read_text())["results"])
    sink, event = sinks.Prometheus(run="a"), trained(1)

    def seconds(function, count=50):
        began = time.process_time()
        for _ in range(count):
            function()
        return (time.process_time() - began) / count

    write = seconds(lambda: sink.write(event))
    scrape = seconds(lambda: generate_latest(sink.registry))
    assert write / step + scrape / 15 < 0.01


def test_the_dashboard_names_only_metrics_that_exist():
    known = names_of([metrics.STEPS, *metrics.METRICS.values(), *SERVER])
    text = (ROOT / dashboard.FILE).read_text()
    named = set(re.findall(r"xsake_[a-z_]+", text))
    assert named
    assert named <= known
    assert text == dashboard.text()
    assert {panel["title"] for panel in json.loads(text)["panels"]} >= {"Training loss", "Density"}
    scrape = (ROOT / "deploy" / "prometheus.yml").read_text()
    assert "metrics_path: /metrics" in scrape
