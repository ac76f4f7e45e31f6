"""Autotuning: candidates are compared, tables are written and joined; kernels are stubbed."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from tests.conditions import needs_newer_jax
from xsake.backends import Call, hopper, reference
from xsake.backends.options import Options
from xsake.bench import autotune, timing
from xsake.bench.cases import hopper_case
from xsake.bench.checks import WrongResultError
from xsake.cli import machine


@pytest.fixture
def stubs(monkeypatch):
    """The reference instead of the kernels; wrong for tilings of the order `wrong_order`."""
    state = {"wrong_order": ""}

    def forward(settings, q, k, v, mask):
        out, lse = reference.forward(Call(q, k, v, None, mask, settings.scale, None, Options()))
        tiling = settings.options.hopper_forward
        wrong = tiling is not None and tiling.order == state["wrong_order"]
        return out * (1.5 if wrong else 1), lse

    def backward(settings, saved, cotangents):
        q, k, v, mask, *_ = saved
        run = jax.vjp(lambda *x: forward(settings, *x, mask), q, k, v)[1]
        return run(cotangents)

    monkeypatch.setattr(hopper, "run_forward", forward)
    monkeypatch.setattr(hopper, "run_backward", backward)
    quickly = functools.partial(timing.time_queued, seconds=0.0)
    monkeypatch.setattr(timing, "time_queued", quickly)
    monkeypatch.setattr(autotune, "FORWARD", ({"order": "sections"}, {"order": "natural"}))
    monkeypatch.setattr(autotune, "BACKWARD", ({"fused": True}, {"fused": False}))
    cases = {"a mixed": [hopper_case(1, 256, 64, d) for d in (0.9, 0.7)]}
    monkeypatch.setattr(autotune, "groups", lambda: iter([cases, {"another": []}]))
    return state


@needs_newer_jax
def test_only_the_selected_classes_are_updated(stubs, tmp_path):
    """An entry records all candidates, and the fields that differ from the defaults."""
    path, before = tmp_path / "table.json", table("day 1", another="day 1")
    path.write_text(json.dumps(before))
    autotune.autotune(path, only="a mixed", report=lambda line: None)
    written = json.loads(path.read_text())["classes"]
    assert written["forward"]["another"] == before["classes"]["forward"]["another"]
    entry = written["forward"]["a mixed"]
    assert entry["cases"] == ["1·16·256·64 density=0.9", "1·16·256·64 density=0.7"]
    assert [fields for fields, _ in entry["candidates"]] == [
        {"order": "sections"},
        {"order": "natural"},
    ]
    assert entry["tiling"] in ({}, {"order": "natural"})
    assert set(written["backward"]) == {"a mixed"}


def table(date, machine="a GPU", **entries):
    """A table whose forward entries have these dates."""
    facts = {"date": date, "machine": machine, "versions": "1", "commit": date, "command": date}
    classes = {name: {"tiling": {"from": date}, "date": x} for name, x in entries.items()}
    return facts | {"classes": {"forward": classes, "backward": {}}}


def test_tables_are_joined_by_class(tmp_path):
    """The newest entry of a class wins."""
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    tables = table("day 3", new="day 3", old="day 1"), table("day 2", new="day 1", old="day 2")
    for path, content in zip(paths, tables, strict=True):
        path.write_text(json.dumps(content))
    machine.bench(autotune=True, join=tuple(paths), out=tmp_path / "both.json")
    joined = json.loads((tmp_path / "both.json").read_text())
    assert joined["classes"]["forward"] == {
        "new": {"tiling": {"from": "day 3"}, "date": "day 3"},
        "old": {"tiling": {"from": "day 2"}, "date": "day 2"},
    }
    assert joined["command"] == "day 3; day 2"
    assert joined["commit"] == "day 3"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "got list"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "it has no 'date'"),
        (lambda: json.dumps(table("day 1", "a") | {"classes": {"sideways": {}}}), "'sideways' are"),
        (lambda: json.dumps(table("day 1", "a") | {"classes": {"forward": []}}), "'forward' are"),
    ],
    ids=["list", "deep", "empty", "direction", "classes"],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, content, message):
    file = tmp_path / "t.json"
    file.write_text(content if isinstance(content, str) else content())
    with pytest.raises(ValueError, match=rf"t\.json is not a tiling table of .*{message}"):
        autotune.join([file], tmp_path / "o.json")
    with pytest.raises(ValueError, match=rf"t\.json is not a tiling table of .*{message}"):
        autotune.autotune(file, only="nothing")


def test_joining_tables_of_two_machines_raises(tmp_path):
    paths = [tmp_path / name for name in ("one.json", "two.json")]
    for path, name in zip(paths, ("a GPU", "another"), strict=True):
        path.write_text(json.dumps(table("day 1", name)))
    with pytest.raises(ValueError, match=r"machine a.*join only tables of one machine"):
        autotune.join(paths, tmp_path / "both.json")


@needs_newer_jax
def test_a_tiling_that_changes_the_result_raises(stubs, tmp_path):
    """It is not skipped."""
    stubs["wrong_order"] = "natural"
    with pytest.raises(WrongResultError, match=r"order='natural'.*differs from the first"):
        autotune.autotune(tmp_path / "table.json", only="a mixed", report=lambda line: None)


@needs_newer_jax
def test_the_largest_geometric_mean_wins():
    """4 · 1 < 2 · 3, though the first has the largest single speed."""
    from xsake.backends.hopper.forward_kernel import ForwardTiling

    entry = autotune._best(
        ForwardTiling,
        ({"order": "sections"}, {"order": "natural"}),
        {"x": [4.0, 2.0], "y": [1.0, 3.0]},
    )
    assert entry["tiling"] == {"order": "natural"}
    assert entry["teraflops"] == [2.0, 3.0]
    assert jnp.allclose(entry["candidates"][1][1], 6**0.5, atol=0.1)
