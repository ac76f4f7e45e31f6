"""Events round-trip through their file, and all sinks report the same values."""

from __future__ import annotations

import json
import socket
import urllib.request

import pytest
from jax import monitoring

from xsake import _first_calls
from xsake.observe import registry, sinks
from xsake.observe.compiling import COMPILED, LOWERED, compiling
from xsake.observe.events import (
    Evaluated,
    Event,
    PlanSwapped,
    Resumed,
    RunStarted,
    Sampled,
    Stopped,
    TrainStep,
    parse,
)

STARTED = RunStarted(
    step=0,
    run="a",
    config_hash="c0ffee",
    data_hash="da7a",
    commit="abc",
    device="cpu",
    versions={"jax": "0"},
    parameters=10,
    steps=20,
    tokens_per_step=64,
)


def trained(step, loss=2.5):
    return TrainStep(
        step=step,
        loss_nats=loss,
        learning_rate=0.1,
        gradient_norm=1.5,
        skipped_steps=0,
        density_ratio=0.43,
        tokens_seen=64 * step,
        step_seconds=0.5,
        tokens_per_second=128.0,
        mfu_ratio=0.25,
    )


def evaluated(step, perplexity=9.0):
    return Evaluated(
        step=step,
        file="valid",
        data_hash="da7b",
        loss_nats=2.2,
        perplexity=perplexity,
        targets=100,
        density_ratio=0.43,
    )


SWAPPED = PlanSwapped(
    step=2,
    path="plans/a",
    plan_hash="b1a5",
    requested_density_ratio=0.43,
    density_ratio=0.43,
    head_density_ratios=[[0.4, 0.46]],
    calibration_seconds=0.1,
)
EVENTS = [STARTED, trained(1), trained(2), SWAPPED, evaluated(2), trained(3)]


@pytest.mark.parametrize("event", EVENTS, ids=lambda x: type(x).__name__)
def test_an_event_round_trips_through_json(event):
    assert parse(event.to_json()) == event


def test_a_value_that_is_not_finite_is_written_as_null():
    line = trained(1, float("nan")).to_json()

    def refuse(name):
        raise AssertionError(name)

    assert json.loads(line, parse_constant=refuse)["loss_nats"] is None


def test_unknown_fields_are_ignored_and_unknown_events_raise():
    line = json.dumps({**json.loads(trained(1).to_json()), "colour": "blue"})
    assert parse(line).loss_nats == 2.5
    with pytest.raises(ValueError, match="no such event"):
        parse('{"event": "Sang", "step": 1}')


def written(path, events, step=0):
    file = sinks.EventFile(path, step)
    for event in events:
        file.write(event)
    file.close()


def test_reopening_a_file_at_a_step_removes_later_events(tmp_path):
    path = tmp_path / "events.jsonl"
    written(path, [*EVENTS, Stopped(step=3, reason="signal")])
    with path.open("a") as file:
        file.write('{"event": "TrainStep", "step": 4, "loss_na')  # cut off
    again = [Resumed(step=2, commit="abc", device="cpu"), trained(3), trained(4)]
    written(path, again, step=2)
    assert sinks.read(path) == [*EVENTS[:-1], *again]


def test_a_file_opened_before_the_first_step_is_empty(tmp_path):
    path = tmp_path / "events.jsonl"
    written(path, EVENTS)
    written(path, [STARTED], step=-1)
    assert sinks.read(path) == [STARTED]


def test_an_incomplete_last_line_is_ignored(tmp_path):
    path = tmp_path / "events.jsonl"
    written(path, EVENTS[:2])
    with path.open("a") as file:
        file.write(trained(2).to_json()[:30])
    assert sinks.read(path) == EVENTS[:2]


def test_a_damaged_line_in_the_middle_raises(tmp_path):
    path = tmp_path / "events.jsonl"
    written(path, EVENTS)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2 is damaged"):
        sinks.EventFile(path, 3)


def test_scalars_have_prefixes_and_exclude_step_and_time():
    assert sinks.scalars(evaluated(2))["evaluation/valid/perplexity"] == 9.0
    found = sinks.scalars(trained(1))
    assert found["train/loss_nats"] == 2.5
    assert not any("time" in name or name.endswith("/step") for name in found)
    assert sinks.scalars(STARTED) == {}
    assert "train/loss_nats" not in sinks.scalars(parse(trained(1, float("nan")).to_json()))


def test_prometheus_serves_the_newest_values_as_text():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sink = sinks.Prometheus(port, run="a")
    for event in EVENTS:
        sink.write(event)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    sink.close()
    assert 'xsake_train_density_ratio{run="a"} 0.43' in text
    assert 'xsake_train_tokens_seen_total{run="a"} 192.0' in text
    assert 'xsake_evaluation_perplexity{file="valid",run="a"} 9.0' in text
    assert 'xsake_step{run="a"} 3.0' in text


def test_tensorboard_has_every_scalar(tmp_path):
    """Read back as TFRecords: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event as Record

    sink = sinks.TensorBoard(tmp_path)
    for event in EVENTS:
        sink.write(event)
    sink.close()
    (path,) = tmp_path.iterdir()
    content, offset, found = path.read_bytes(), 0, {}
    while offset < len(content):
        size = int.from_bytes(content[offset : offset + 8], "little")
        record = Record.FromString(content[offset + 12 : offset + 12 + size])
        found |= {(x.tag, record.step): x.simple_value for x in record.summary.value}
        offset += 16 + size
    expected = {(name, e.step): x for e in EVENTS for name, x in sinks.scalars(e).items()}
    assert found == pytest.approx(expected)


def test_wandb_writes_offline_and_nowhere_else(tmp_path):
    pytest.importorskip("wandb")
    sink = sinks.Wandb(tmp_path, "a", {"seed": 0})
    for event in EVENTS:
        sink.write(event)
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_the_terminal_prints_one_line_per_step(capsys):
    sink = sinks.Terminal(steps=3)
    sampled = Sampled(step=2, prompt="It\nwas", text="so.\n\nThen")
    for event in [Resumed(step=1, commit="", device="", note="look out"), sampled, *EVENTS[2:]]:
        sink.write(event)
    sink.close()
    printed = capsys.readouterr().out
    assert "resumed at step 1. look out" in printed
    assert "step 3/3  loss 2.500  128 tokens/s  MFU 25.0%  density 0.43" in printed
    assert "step 2: perplexity 9.00 on valid" in printed
    assert "step 2: “It was” continues: so. Then" in printed


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_terminal_says_when_xla_compiles(capsys, monkeypatch, is_terminal):
    """In the bar of a terminal at every compilation; elsewhere once, after the run has started."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1" if is_terminal else "")
    sink = sinks.Terminal(steps=3)
    monitoring.record_event_duration_secs(LOWERED, 0.1)
    for event in (STARTED, trained(1)):
        sink.write(event)
        monitoring.record_event_duration_secs(LOWERED, 0.1)
        if is_terminal:
            sink._progress.refresh()
        monitoring.record_event_duration_secs(COMPILED, 0.1)
    sink.close()
    monitoring.record_event_duration_secs(LOWERED, 0.1)
    printed = capsys.readouterr().out
    if is_terminal:
        assert -1 < printed.find("compiling") < printed.rfind("loss 2.500")
    else:
        assert printed.count("compiling\n") == 1
        assert printed.index("10 parameters") < printed.index("compiling")


def test_kernels_that_threads_compile_are_not_the_end_of_a_compilation():
    """The threads of _first_calls.py compile kernels while the program with them is lowered."""
    reports = []
    with compiling(reports.append):
        monitoring.record_event_duration_secs(LOWERED, 0.1)
        for event in (LOWERED, COMPILED):
            record = monitoring.record_event_duration_secs
            _first_calls._compilers().submit(record, event, 0.1).result()
        assert reports == [True]
        monitoring.record_event_duration_secs(COMPILED, 0.1)
    assert reports == [True, False]


def test_runs_are_listed_with_their_hashes_and_results(tmp_path):
    for name, events in (("b", EVENTS), ("a", [*EVENTS, Stopped(step=3, reason="finished")])):
        (tmp_path / name / "checkpoints" / "3").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        written(tmp_path / name / "events.jsonl", events)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    (tmp_path / "no run").mkdir()
    a, b, c = registry.runs(tmp_path)
    assert (a.state, b.state, c.state) == ("finished", "dead", "not started")
    with registry.lock(tmp_path / "b") as has_lock:  # as the process that trains does
        assert has_lock
        assert registry.summary(tmp_path / "b").state == "running"
    assert registry.summary(tmp_path / "b").state == "dead"
    assert (a.config_hash, a.data_hash, a.commit, a.plan) == ("c0ffee", "da7a", "abc", "b1a5")
    assert (a.step, a.steps, a.checkpoints, a.perplexity) == (3, 20, (3,), {"valid": 9.0})
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        list(registry.runs(tmp_path / "none"))


WRONG = {
    "no JSON": "nonsense",
    "a list": "[]",
    "a number": "3",
    "deep": "[" * 100_000,
    "no step": '{"event": "Stopped", "reason": "finished"}',
    "text as step": '{"event": "Stopped", "step": "x", "reason": "finished"}',
    "a list as event": '{"event": [], "step": 1}',
}


@pytest.mark.parametrize("line", [*WRONG.values(), trained(2).to_json().replace("2.5", '"x"')])
def test_a_run_with_an_event_of_the_wrong_shape_is_listed_as_damaged(tmp_path, line):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "a" / "events.jsonl").write_text(f"{STARTED.to_json()}\n{line}\n")
    (a,) = registry.runs(tmp_path)
    assert "events.jsonl, line 2 is damaged" in a.state


@pytest.mark.parametrize("name", WRONG)
def test_a_line_of_the_wrong_shape_stops_a_run_in_one_sentence(tmp_path, name):
    path = tmp_path / "events.jsonl"
    path.write_text(f"{WRONG[name]}\n{trained(1).to_json()}\n")
    if name == "a list as event":  # written by a later version, perhaps: it is kept
        sinks.EventFile(path, 3).close()
        return
    with pytest.raises(ValueError, match=r"line 1 is damaged: .*; remove it to resume"):
        sinks.EventFile(path, 3)


def test_blank_lines_are_ignored(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"\n{event.to_json()}\n  \n" for event in EVENTS))
    assert sinks.read(path) == EVENTS
    last = trained(4)
    written(path, [last], step=3)
    assert sinks.read(path) == [*EVENTS, last]


def test_every_kind_of_event_is_known_by_its_name():
    assert all(kind.__name__ == name for name, kind in Event.kinds.items())
    assert "TrainStep" in Event.kinds
