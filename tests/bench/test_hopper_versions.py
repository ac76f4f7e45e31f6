"""The suite `hopper-versions`, with a made-up other version, and its table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tools.version_tables import hopper_versions as table
from xsake.bench import measure, programs, run
from xsake.bench.suites import Part, hopper
from xsake.bench.suites import hopper_versions as suite
from xsake.cli import machine

ROOT = Path(__file__).parents[2]

ASKED = suite.Asked("1·16·64·16 causal", 1, 64, 16, causal=True, dtype="float32", backend="dense")

# The modules that WORKER imports; a call of `fn` is said to last as long as its argument.
OTHER = {
    "__init__": "",
    "masks": "causal = everything = lambda: 'rule'",
    "bench/__init__": "",
    "bench/cases": "hopper_case = None\ndef Case(*args, **named): return args, named",
    "bench/checks": "def checked_calls(case, given, calls): pass",
    "bench/measure": (
        "def compiled(case, backend):\n"
        "    import sys; print('a line of a library'); print('a warning', file=sys.stderr)\n"
        "    assert case[1]['dtype'] == 'float32', backend\n"
        "    return {}, {'forward': (None, (0.5,)), 'backward': (None, (2.0,))}"
    ),
    "bench/timing": (
        "import types\n"
        "def time_queued(fn, x, seconds, rounds):\n"
        "    return types.SimpleNamespace(median_seconds=x)"
    ),
}


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A checkout of a made-up version, whose modules other(path, source) replaces; ours is too."""

    def write(name, source):
        path = tmp_path / "xsake" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    for name, source in OTHER.items():
        write(name, source)
    monkeypatch.setenv(suite.AGAINST, str(tmp_path))
    monkeypatch.setenv(suite.AGAINST_COMMIT, "the other")
    monkeypatch.setenv("XSAKE_COMMIT", "this")
    calls = {"forward": (None, ()), "backward": (None, ())}
    monkeypatch.setattr(suite, "compiled", lambda case, backend: ({}, calls))
    monkeypatch.setattr(suite, "checked_calls", lambda *args: None)
    monkeypatch.setattr(suite, "_seconds", lambda fn, args, seconds: 1.0)
    return write


def test_both_versions_are_timed_in_turns_and_the_table_has_their_ratio(other):
    forward, backward = suite.records(ASKED, [])
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    assert (forward["over_against"], backward["over_against"]) == (2.0, 0.5)
    assert forward["against_commit"] == "the other"
    assert forward["rounds"] == suite.ROUNDS
    spread = {"least_over_against": 0.45, "most_over_against": 0.55}
    head, rows = table([forward, backward | spread])
    assert head[0] == "B·N·T·H"
    assert rows == [
        ["1·16·64·16 causal", "forward", "1000.000", "500.000", "2.000", "2.000 … 2.000"],
        ["1·16·64·16 causal", "backward", "1000.000", "2000.000", "0.500", "0.450 … 0.550"],
    ]


def test_both_versions_are_checked_before_they_are_timed(other, monkeypatch):
    """A version that compiles keeps nobody from timing: only checks are beside others."""
    happened = []

    @contextlib.contextmanager
    def noted(what):
        happened.append(what)
        yield

    real = suite.Other.ask
    monkeypatch.setattr(suite.Other, "ask", lambda *x: (happened.append(x[1]), real(*x))[1])
    monkeypatch.setattr(suite, "checked_calls", lambda *_: happened.append("check here"))
    monkeypatch.setattr(suite, "beside", lambda: noted("beside"))
    monkeypatch.setattr(suite, "alone", lambda: noted("alone"))
    list(suite.records(ASKED, []))
    timed = ["alone", *["forward"] * suite.ROUNDS, "alone", *["backward"] * suite.ROUNDS]
    assert happened == ["beside", "check here", "check", *timed]


def test_each_version_is_the_first_in_every_other_round():
    order = []
    one, two = (lambda x=x: order.append(x) or x for x in (1.0, 2.0))
    assert suite.by_turns(one, two, 3) == ([1.0] * 3, [2.0] * 3)
    assert order == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0]


def test_another_version_that_fails_is_reported_with_what_it_printed(other):
    other("bench/checks", "def checked_calls(*args): raise ValueError('errors exceed 1e-2')")
    with pytest.raises(RuntimeError, match=r"(?s)other version ended with status 1.*exceed 1e-2"):
        list(suite.records(ASKED, []))


def test_warnings_do_not_end_up_inside_an_answer(other):
    """Such as a piece of a line that is printed just before it."""
    other(
        "bench/timing",
        "import sys, types\n"
        "def time_queued(fn, x, seconds, rounds):\n"
        "    print('a warning', end='', file=sys.stderr, flush=True)\n"
        "    return types.SimpleNamespace(median_seconds=x)",
    )
    assert len(list(suite.records(ASKED, []))) == 2


@pytest.mark.parametrize("printed", ["stdout", "stderr"])
def test_another_version_that_ended_between_two_answers_is_reported(other, printed):
    other(
        "bench/measure",
        "import sys\n"
        "def compiled(case, backend):\n"
        f"    print('the last words', file=sys.{printed}, flush=True)\n"
        "    return {}, {}",
    )
    with suite.Other(suite.checkout(), ASKED) as process:
        assert process.answer() == "compiled"
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
        with pytest.raises(RuntimeError, match=r"ended with status -9: .*the last words"):
            process.ask("forward")


@pytest.fixture
def measured(monkeypatch, other):
    """The commits of the other version for which a case was measured."""
    found = []

    def part(name):
        def measured_part(done):
            found.append(suite.against_commit())
            yield {"case": name, "against_commit": found[-1]}

        return Part(name, measured_part)

    monkeypatch.setattr(suite, "parts", lambda quick, model=None: map(part, "ab"))
    monkeypatch.setattr(programs, "why_not", lambda need: None)
    return found


def test_results_against_one_commit_are_not_taken_for_those_against_another(
    measured, tmp_path, monkeypatch
):
    """Neither resumed nor joined, and not resumed if the other checkout had changes."""
    out, second = tmp_path / "r.json", tmp_path / "second.json"
    for commit in ("one", "one", "two", "two+", "two+", "unknown", "unknown"):
        monkeypatch.setenv(suite.AGAINST_COMMIT, commit)
        found = run.run_suite("hopper-versions", out, only="a")
        assert [x["against_commit"] for x in found["results"]] == [commit]
    assert measured == ["one", "two", "two+", "two+", "unknown", "unknown"]
    monkeypatch.setenv(suite.AGAINST_COMMIT, "one")
    run.run_suite("hopper-versions", second, only="b")
    with pytest.raises(
        ValueError, match=r"has against_commit one, .* has unknown; join only files"
    ):
        run.join("hopper-versions", [out, second], tmp_path / "all.json")
    run.run_suite("hopper-versions", out, only="a")
    found = run.join("hopper-versions", [out, second], tmp_path / "all.json")
    assert [x["against_commit"] for x in (found, *found["results"])] == ["one"] * 3


def test_the_commit_of_the_other_version_is_that_of_its_checkout(monkeypatch):
    """Not XSAKE_COMMIT, which is that of this version."""
    monkeypatch.setenv("XSAKE_COMMIT", "this")
    monkeypatch.delenv(suite.AGAINST_COMMIT, raising=False)
    monkeypatch.setenv(suite.AGAINST, str(ROOT))
    monkeypatch.setattr(suite.provenance, "commit_of", lambda folder: f"of {folder}")
    assert suite.against_commit() == f"of {ROOT}"


def test_the_option_against_names_the_checkout_while_the_suite_runs(
    measured, tmp_path, monkeypatch
):
    folder, out = os.environ[suite.AGAINST], tmp_path / "r.json"
    monkeypatch.delenv(suite.AGAINST)
    machine.bench("hopper-versions", out=out, against=Path(folder))
    assert measured == ["the other"] * 2
    assert suite.AGAINST not in os.environ
    monkeypatch.setenv(suite.AGAINST, "elsewhere")
    machine.bench("hopper-versions", out=out, against=Path(folder))
    assert os.environ[suite.AGAINST] == "elsewhere"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"check": True}, "--check measures its own ratios and takes no other option"),
        ({"join": (Path("a.json"),)}, "--join measures nothing: give only --suite"),
        (
            {"autotune": True, "suite": None},
            "--against is for --suite hopper-versions; got --autotune",
        ),
        ({"suite": "hopper"}, "--against is for --suite hopper-versions; got --suite hopper"),
    ],
    ids=str,
)
def test_the_option_against_is_refused_where_it_would_be_ignored(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        machine.bench(**{"suite": "hopper-versions", "against": tmp_path} | given)


@pytest.mark.parametrize("number", range(5))
def test_both_versions_make_the_same_case(number, monkeypatch):
    """The text that the other version runs, run here: full, causal and three densities."""

    class Made(Exception):
        pass

    def compiled(case, backend):
        raise Made(case, backend)

    asked = [part.measure.args[0] for part in suite.parts(quick=False)][number]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(dataclasses.asdict(asked))])
    monkeypatch.setattr(measure, "compiled", compiled)
    with pytest.raises(Made) as found:
        exec(suite.WORKER, {})
    case, backend = found.value.args
    assert dataclasses.asdict(case) == dataclasses.asdict(asked.case())
    assert backend == asked.backend


def test_a_folder_without_another_version_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv(suite.AGAINST, raising=False)
    with pytest.raises(ValueError, match="--against FOLDER names a checkout"):
        suite.checkout()
    monkeypatch.setenv(suite.AGAINST, str(tmp_path))
    with pytest.raises(
        ValueError, match=r"is not a checkout of XSAKE: it has no xsake/__init__\.py"
    ):
        suite.checkout()


@pytest.mark.parametrize("quick", [True, False])
def test_its_cases_are_those_of_the_suite_hopper(quick):
    """But for uneven heads and transposed lists, which are ratios within one version."""
    names = [part.case for part in suite.parts(quick)]
    extra = [x.case for x in hopper.parts(quick) if x.case not in names]
    assert set(names) <= {part.case for part in hopper.parts(quick)}
    assert [x for x in extra if "heads" not in x and "lists" not in x] == []


@pytest.mark.slow
def test_a_real_checkout_is_measured(monkeypatch):
    """Of this commit, by a process of its own: the ratio is of the order of 1."""
    monkeypatch.setenv(suite.AGAINST, str(ROOT))
    monkeypatch.setattr(suite, "ROUNDS", 3)
    quick = dataclasses.replace(ASKED, T=256, seconds=0.01)
    forward, backward = suite.records(quick, [])
    assert forward["median_seconds"] > 0
    assert 1 / 20 < backward["over_against"] < 20  # another process may have a core of its own
