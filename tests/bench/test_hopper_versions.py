"""The suite `hopper-versions`, with a made-up other version, and its table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tools.version_tables import hopper_versions as table
from xsake.bench.suites import hopper
from xsake.bench.suites import hopper_versions as suite

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
        "    print('a line of a library')\n"
        "    assert case[1]['dtype'] == 'float32', backend\n"
        "    return {}, {'forward': (None, (0.5,)), 'backward': (None, (2.0,))}"
    ),
    "bench/timing": (
        "import types\n"
        "def time_queued(fn, x, seconds, rounds):\n"
        "    return types.SimpleNamespace(median_seconds=x)"
    ),
    "observe/__init__": "",
    "observe/provenance": (
        "import os\ndef commit(): return os.environ['XSAKE_COMMIT'] or 'the other'"
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


def test_each_version_is_the_first_in_every_other_round():
    order = []
    one, two = (lambda x=x: order.append(x) or x for x in (1.0, 2.0))
    assert suite.by_turns(one, two, 3) == ([1.0] * 3, [2.0] * 3)
    assert order == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0]


def test_another_version_that_fails_is_reported_with_what_it_printed(other):
    other("bench/checks", "def checked_calls(*args): raise ValueError('errors exceed 1e-2')")
    with pytest.raises(RuntimeError, match=r"(?s)other version ended with status 1.*exceed 1e-2"):
        list(suite.records(ASKED, []))


def test_a_folder_without_another_version_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv(suite.AGAINST, raising=False)
    with pytest.raises(ValueError, match="--against FOLDER names a checkout"):
        suite.checkout()
    monkeypatch.setenv(suite.AGAINST, str(tmp_path))
    with pytest.raises(ValueError, match=r"is no checkout of XSAKE: it has no xsake/__init__\.py"):
        suite.checkout()


@pytest.mark.parametrize("quick", [True, False])
def test_its_cases_are_those_of_the_suite_hopper(quick):
    """But for uneven heads and transposed lists, which are ratios within one version."""
    names = [part.case for part in suite.parts(quick)]
    extra = [x.case for x in hopper.parts(quick) if x.case not in names]
    assert set(names) <= {part.case for part in hopper.parts(quick)}
    assert [x for x in extra if "heads" not in x and "lists" not in x] == []


@pytest.mark.slow
def test_a_checkout_of_this_version_is_as_fast_up_to_noise(monkeypatch):
    """The process of the other version is a real one here, of the same commit."""
    root = Path(__file__).parents[2]
    monkeypatch.setenv(suite.AGAINST, str(root))
    monkeypatch.setattr(suite, "ROUNDS", 3)
    quick = dataclasses.replace(ASKED, T=256, seconds=0.01)
    forward, backward = suite.records(quick, [])
    assert forward["median_seconds"] > 0
    assert 1 / 20 < backward["over_against"] < 20  # another process may have a core of its own
