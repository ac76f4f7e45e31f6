"""Suites measured by several processes: groups, turns, failures, time limits, resuming."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

from xsake.bench import programs, run, side_by_side
from xsake.bench.suites import Part
from xsake.cli import machine

CASES = {"a": "", "b1": "b", "b2": "b", "c": ""}  # case: group


@pytest.fixture
def started(monkeypatch):
    """A suite of four cases in three groups, and the cases of every process that was started."""

    def part(name, group):
        return Part(name, lambda done: iter([{"case": name, "before": len(done)}]), group)

    suite = types.SimpleNamespace(parts=lambda quick, model: [part(*x) for x in CASES.items()])
    monkeypatch.setitem(run.SUITES, "hopper", suite)
    monkeypatch.setenv("XSAKE_COMMIT", "one")
    return []


def starting(started, code="pass", fails=()):
    """Measures in this process, then starts one that runs `code`, or fails for some cases."""

    def start(name, out, quick, cases, more, log):
        started.append(list(cases))
        if not set(cases) & set(fails):
            run.run_suite(name, out, quick, cases=cases)
        text = "raise SystemExit('no kernel')" if set(cases) & set(fails) else code
        return subprocess.Popen([sys.executable, "-c", text], stdout=log, stderr=log)

    return start


def test_groups_are_measured_by_one_process_and_joined_in_order(started, tmp_path):
    out = tmp_path / "new" / "r.json"
    found = side_by_side.run_jobs("hopper", out, 2, start=starting(started))
    assert started == [["a"], ["b1", "b2"], ["c"]]
    assert not found.missing
    records = json.loads(out.read_text())["results"]
    assert [(x["case"], x["before"]) for x in records] == [("a", 0), ("b1", 0), ("b2", 1), ("c", 0)]
    assert [x.name for x in out.parent.iterdir()] == ["r.json"]  # nothing is left behind


def test_cases_that_fail_are_named_and_measured_the_next_time(started, tmp_path):
    out, said = tmp_path / "r.json", []
    how = {"report": said.append}
    found = side_by_side.run_jobs("hopper", out, 3, start=starting(started, fails=("b2",)), **how)
    assert set(found.missing) == {"b1", "b2"}
    assert "exit status 1: no kernel" in found.missing["b2"]
    assert min(said) == "a: measured"
    found = side_by_side.run_jobs("hopper", out, 3, start=starting(started))
    assert started[3:] == [["b1", "b2"]]
    assert not found.missing
    assert [x["case"] for x in found.result["results"]] == list(CASES)


def test_after_the_time_limit_processes_are_ended(started, tmp_path):
    slow = "import time; time.sleep(60)"
    found = side_by_side.run_jobs(
        "hopper", tmp_path / "r.json", 1, only="b", seconds=0.5, start=starting(started, slow)
    )
    assert found.missing == dict.fromkeys(("b1", "b2"), "not done after 0.5 s")
    assert found.result is None
    assert not (tmp_path / "r.json").exists()


@pytest.mark.slow
def test_a_real_process_says_why_it_fails(tmp_path, monkeypatch):
    """Here there is no Hopper GPU: the reason of the backend is what the process printed last."""
    monkeypatch.setattr(side_by_side, "WORDS", 4000)
    only = "4·16·4096·64 causal"
    found = side_by_side.run_jobs("hopper-statistics", tmp_path / "r.json", 1, only=only)
    assert list(found.missing) == [only]
    assert "hopper" in found.missing[only]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite": "cpu", "jobs": 2}, "for the hopper suites"),
        ({"suite": "hopper", "jobs": 0}, "must be positive"),
        ({"suite": "hopper", "seconds": 0.0}, "must be positive"),
        ({"autotune": True, "jobs": 2}, "leave them out for --autotune"),
        ({"check": True, "jobs": 2}, "takes no other option"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        machine.bench(**options)


def test_missing_cases_are_an_error_after_the_rest_is_written(started, tmp_path, monkeypatch):
    out = tmp_path / "r.json"
    monkeypatch.setattr(programs, "why_not", lambda need: None)
    monkeypatch.setattr(side_by_side, "start_process", starting(started, fails=("c",)))
    with pytest.raises(ValueError, match=r"1 case is missing, the others are in .*r\.json: c: "):
        machine.bench("hopper", out=out, jobs=2)
    assert [x["case"] for x in json.loads(out.read_text())["results"]] == ["a", "b1", "b2"]
