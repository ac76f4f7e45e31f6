"""The table of tilings, with stand-ins for the kernels."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from tests.conditions import needs_newer_jax
from xsake.backends import Options, hopper, reference
from xsake.bench import autotune, timing
from xsake.bench.cases import hopper_case
from xsake.bench.checks import WrongResultError


@pytest.fixture
def stand_ins(monkeypatch):
    """The reference in the kernels' place, wrong where the tiling is not in `right`."""
    right = {"wrong_order": ""}

    def forward(settings, q, k, v, mask):
        out, lse = reference.forward(
            q, k, v, None, mask, scale=settings.scale, soft_cap=None, options=Options()
        )
        tiling = settings.options.hopper_forward
        wrong = tiling is not None and tiling.order == right["wrong_order"]
        return out * (1.5 if wrong else 1), lse

    def backward(settings, saved, cotangents):
        q, k, v, mask, *_ = saved
        run = jax.vjp(lambda *x: forward(settings, *x, mask), q, k, v)[1]
        return run(cotangents)

    monkeypatch.setattr(hopper, "_forward", forward)
    monkeypatch.setattr(hopper, "_backward", backward)
    quickly = functools.partial(timing.time_queued, seconds=0.0)
    monkeypatch.setattr(timing, "time_queued", quickly)
    monkeypatch.setattr(autotune, "FORWARD", ({"order": "sections"}, {"order": "natural"}))
    monkeypatch.setattr(autotune, "BACKWARD", ({"fused": True}, {"fused": False}))
    cases = {"a mixed": [hopper_case(1, 256, 64, d) for d in (0.9, 0.7)]}
    monkeypatch.setattr(autotune, "groups", lambda: iter([cases, {"another": []}]))
    return right


@needs_newer_jax
def test_every_class_asked_for_has_a_row_and_others_stay(stand_ins, tmp_path):
    """With what it was chosen from, and only what differs from the defaults."""
    table = tmp_path / "table.json"
    kept = {"forward": {"another": {"tiling": {}}}, "backward": {}}
    table.write_text(json.dumps({"classes": kept}))
    autotune.autotune(table, only="a mixed", tell=lambda line: None)
    written = json.loads(table.read_text())["classes"]
    assert written["forward"]["another"] == {"tiling": {}}
    row = written["forward"]["a mixed"]
    assert row["cases"] == ["1·16·256·64 density=0.9", "1·16·256·64 density=0.7"]
    assert [fields for fields, _ in row["candidates"]] == [
        {"order": "sections"},
        {"order": "natural"},
    ]
    assert row["tiling"] in ({}, {"order": "natural"})
    assert set(written["backward"]) == {"a mixed"}


@needs_newer_jax
def test_a_tiling_that_changes_values_is_an_error(stand_ins, tmp_path):
    """It is not merely passed over."""
    stand_ins["wrong_order"] = "natural"
    with pytest.raises(WrongResultError, match=r"order='natural'.*differs from the first"):
        autotune.autotune(tmp_path / "table.json", only="a mixed", tell=lambda line: None)


@needs_newer_jax
def test_the_largest_geometric_mean_wins():
    """4 · 1 < 2 · 3, though the first has the largest single speed."""
    from xsake.backends.hopper_forward import ForwardTiling

    row = autotune._best(
        ForwardTiling,
        ({"order": "sections"}, {"order": "natural"}),
        {"x": [4.0, 2.0], "y": [1.0, 3.0]},
    )
    assert row["tiling"] == {"order": "natural"}
    assert row["teraflops"] == [2.0, 3.0]
    assert jnp.allclose(row["candidates"][1][1], 6**0.5, atol=0.1)
